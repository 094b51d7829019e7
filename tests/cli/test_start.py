"""`helixpipe simulate` starts at once: what takes long to import is not imported."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "numpy", "scipy", "matplotlib", "rich", "asyncio", "http.server", "multiprocessing.pool", "socket")
SLOW = ("fractions", "decimal", "difflib", "random", "subprocess", "helixpipe.certify.certificate")
OF_OTHER_COMMANDS = ("helixpipe.cli.command_plan", "helixpipe.planning.search", "helixpipe.planning.reorder")

PROGRAM = f"""
import sys
from schedules.command import main
status = main("simulate 1f1b seq1f1b zb1p helix -p 4 -m 8 -k 2".split())
sys.exit(status or " ".join(name for name in {(*HEAVY, *SLOW, *OF_OTHER_COMMANDS)!r} if name in sys.modules) or 0)
"""


def test_nothing_heavy_is_imported() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr  # on a busy machine a line of progress stands there, too
