"""Memory that was refused, whoever asked for it."""

from __future__ import annotations

import errno
import re

_TORCH = ("DefaultCPUAllocator: can't allocate memory", "Cannot allocate memory (12)")
"""Parts of torch's messages: of its allocator, and of memory that processes share."""

_ASKED = re.compile(r"tried to allocate (\d+) bytes|[Aa]llocate ([\d.]+ \w+)")


def out_of_memory(error: BaseException) -> str | None:
    """Return `the GPU` or `this host` if an error of Python, numpy, torch or the system says that
    memory was too small.
    """
    if isinstance(error, RuntimeError) and type(error).__name__ == "OutOfMemoryError":  # torch's
        return "the GPU"
    of_torch = isinstance(error, RuntimeError) and any(words in str(error) for words in _TORCH)
    of_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return "this host" if of_torch or of_system or isinstance(error, MemoryError) else None


def asked_for(said: str) -> str:
    """Return ` (37.3 GiB more were asked for)` if a message says how much; else an empty text."""
    match = _ASKED.search(said)
    if match is None:
        return ""
    return f" ({match[2] or f'{int(match[1]) / 2**30:.1f} GiB'} more were asked for)"
