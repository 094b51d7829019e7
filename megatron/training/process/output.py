"""Lines to the terminal, each in one write: ranks share it, and print's separate newline would mix their lines."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """To standard output, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def complain(line: str) -> None:
    """To standard error, at once."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
