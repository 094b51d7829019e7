"""The `helixpipe` command with this project's catalogue: `python -m schedules.command` is the same."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from helixpipe.cli.main import main as run
from helixpipe.common.command import PIPE_CLOSED, USER_ERROR
from schedules import CATALOGUE

__all__ = ["PIPE_CLOSED", "USER_ERROR", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run(CATALOGUE, argv)


if __name__ == "__main__":
    sys.exit(main())
