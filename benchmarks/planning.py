"""`make bench-planning`: processor time of planning: lowering steps of 4,096 ops, and `simulate` of large ones.

    python benchmarks/planning.py [--rounds 5] [--beside DIR] [--json out.json]

Each figure is the least user time of the rounds, which other processes disturb less than the wall clock. Lowering is
`lowering.lower` alone, the program made before. `simulate` is the whole command but for the interpreter's start.
--beside: another checkout of this repository with its own `.venv`, whose commands run in turn with these.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from helixpipe.lowering.lower import lower
from schedules import Shape, build

ROOT = Path(__file__).resolve().parents[1]
STEPS = {
    "1f1b": Shape(8, 256, 8),
    "zb1p": Shape(8, 170, 8),
    "seq1f1b": Shape(8, 64, 8, 4),
    "helix": Shape(8, 32, 24),
}
"""About 4,096 ops each."""
COMMANDS = (
    "simulate 1f1b -p 64 -m 512 -L 64 --json",
    "simulate seq1f1b -k 16 -p 32 -m 128 --model llama3-8b --seq-length 32768 --json",
    "simulate helix -p 32 --json",
)
CODE = """
import contextlib, importlib, io, os, sys
try:
    main = importlib.import_module("schedules.command").main
except ImportError:
    main = importlib.import_module("helixpipe.cli").main
start = os.times().user
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main()
print(os.times().user - start)
"""


def user_time(work: Callable[[], Any]) -> float:
    start = os.times().user
    work()
    return os.times().user - start


def command_time(words: str, root: Path) -> float:
    """Of a `helixpipe` command in a checkout, in seconds of user time."""
    python = root / ".venv" / "bin" / "python"
    command = [str(python if python.exists() else sys.executable), "-c", CODE, *words.split()]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of each figure (default: 5)")
    parser.add_argument("--beside", type=Path, metavar="DIR", help="another checkout to compare with")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    arguments = parser.parse_args()
    rows: dict[str, list[float]] = {}
    print(f"{'user seconds, least of the rounds':<84} {'here':>6}" + f" {'beside':>6}" * bool(arguments.beside))
    for name, shape in STEPS.items():
        program = build(name, shape)
        fresh = [replace(program) for _ in range(arguments.rounds)]  # what is derived from one is kept with it
        times = [user_time(partial(lower, each)) for each in fresh]
        label = f"lower a step of {sum(map(len, program.ranks))} ops, {name}"
        rows[label] = [min(times)]
        print(f"{label:<84} {min(times):>6.2f}")
    for words in COMMANDS:
        roots = [ROOT, *([arguments.beside] if arguments.beside else [])]
        rounds = [[command_time(words, root) for root in roots] for _ in range(arguments.rounds)]
        rows[words] = [min(times) for times in zip(*rounds, strict=True)]
        print(f"{words:<84} " + " ".join(f"{seconds:>6.2f}" for seconds in rows[words]))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
