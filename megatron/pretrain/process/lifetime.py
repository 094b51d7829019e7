"""Ends child processes with the process they work for, however that one ends."""

from __future__ import annotations

import os
import threading
import time

from megatron.pretrain.process.once import LAUNCHER

_CHECK_SECONDS = 0.25

_LAUNCHERS = ("TORCHELASTIC_RUN_ID", LAUNCHER)
"""Variables that torchrun and `helixpipe train` set, which a rank does not outlive."""


def has_launcher() -> bool:
    """Whether this process's parent starts the ranks of one job, and starts them again; else it may be a shell."""
    return any(name in os.environ for name in _LAUNCHERS)


def end_with_parent() -> None:
    """End this process, at once and without clean-up, when its parent is gone; watched by a thread."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
