"""Lines to the terminal, each in one write: ranks share it, and print's separate newline would mix their lines.

A terminal that is gone, or a full disk behind a redirected one, does not end a run: it goes on in silence.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def say(line: str) -> None:
    """To standard output, at once."""
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except (OSError, ValueError) as error:  # ValueError: it is closed
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # until the end
        reason = getattr(error, "strerror", None) or error
        complain(f"WARNING: standard output cannot be written ({reason}): the run goes on without it.")


def complain(line: str) -> None:
    """To standard error, at once; there is nowhere to say that it fails."""
    with suppress(OSError, ValueError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
