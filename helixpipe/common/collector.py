"""The cyclic garbage collector, paused."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector where it is on: graphs and imports make many small objects without cycles, which it would
    visit again and again, so that time would no longer grow linearly with their number."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
