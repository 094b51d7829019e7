"""Lines to the terminal, each in one write: ranks share it, and print's separate newline would mix their lines.

A terminal that is gone, or a full disk behind a redirected one, does not end a run: it goes on in silence.
"""

from __future__ import annotations

import os
import sys
from typing import Literal


def say(line: str) -> None:
    """Write a line to standard output and flush it."""
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except (OSError, ValueError) as error:  # ValueError: it is closed
        give_up("stdout")
        reason = getattr(error, "strerror", None) or error
        complain(f"WARNING: standard output cannot be written ({reason}): the run goes on without it.")


def complain(line: str) -> None:
    """Write a line to standard error and flush it; a failure cannot be reported anywhere."""
    try:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        give_up("stderr")


def give_up(name: Literal["stdout", "stderr"]) -> None:
    """Let a stream lead nowhere: what it still buffers would fail again when the interpreter ends."""
    setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # until the end


def open_streams() -> None:
    """Standard streams that were closed before this process began (`>&-`) lead nowhere, rather than to the next file
    that is opened."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    names: tuple[Literal["stdout", "stderr"], ...] = ("stdout", "stderr")
    for name in names:
        if getattr(sys, name) is None:
            give_up(name)
