"""Processes of this host, told apart by when the kernel started them: ids are given out again."""

from __future__ import annotations

import os
from pathlib import Path


def born(pid: int) -> str | None:
    """Return the kernel's start time of a process, or None if there is no such process or it is a zombie."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else fields[18]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    except OSError:
        return None
    try:
        os.kill(pid, 0)  # no /proc on this system
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "unknown"
