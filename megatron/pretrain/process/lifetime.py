"""Ends child processes with the process they work for, however that one ends."""

from __future__ import annotations

import os
import threading
import time

_CHECK_SECONDS = 0.25


def end_with_parent() -> None:
    """End this process, at once and without clean-up, when its parent is gone; watched by a thread."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
