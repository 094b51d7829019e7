"""The machine that was measured, and by which clock."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch


def needs_wall_clock(threads: int, processes: int) -> bool:
    """Whether wall-clock time must be measured instead of this thread's processor time. Processor time excludes other
    programs on the machine, but also other threads, and processes that have to share a core.
    """
    return threads > 1 or processes > (os.cpu_count() or 1)


def clock_name(on_gpu: bool, wall: bool) -> str:
    return "CUDA events" if on_gpu else "monotonic" if wall else "processor time"


def machine() -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if on_gpu else _processor()
    return {
        "device": name,
        "devices": torch.cuda.device_count() if on_gpu else 0,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _processor() -> str:
    """Return the processor's name, if the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
