"""Command lines that start this Python anew, for a module of this project."""

from __future__ import annotations

import sys
from pathlib import Path

_RUN = (
    "import sys; sys.path[:] = dict.fromkeys([*{paths!r}, *filter(None, sys.path)]); import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
"""`python -m MODULE` that imports nothing before the path is set: that one puts the current folder first on it."""


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module as `python -m` does, with this process's import paths and no others before
    them.

    A `random.py` in the user's current folder is not part of the program: the child does not import from the current
    folder unless this process does, nor, from Python 3.11 on, do processes that multiprocessing starts anew.
    """
    checkout = str(Path(__file__).resolve().parents[2])
    paths = [*filter(None, sys.path), checkout]
    safe = ["-P"] if sys.version_info >= (3, 11) else []  # multiprocessing passes it on
    return [sys.executable, *safe, "-c", _RUN.format(paths=paths), module, *arguments]
