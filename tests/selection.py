"""What pytest was asked to run, for fixtures that launch many cases at once: `-k chimera` launches no others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def selected(request: pytest.FixtureRequest, parameter: str, every: Sequence[Any]) -> list[Any]:
    """Those of `every` that selected tests with the requested fixture have as the value of a parameter; all of them
    where such a test has no such parameter, so looks at all."""
    wanted: set[Any] = set()
    for item in request.session.items:
        if isinstance(item, pytest.Function) and request.fixturename in item.fixturenames:
            values = item.callspec.params if hasattr(item, "callspec") else {}
            if item.module is request.module:
                wanted |= {values[parameter]} if parameter in values else set(every)
    return [each for each in every if each in wanted]
