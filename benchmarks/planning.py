"""Processor time of planning: lowering steps of 4,096 ops, and `simulate` of large ones.

    make bench-planning ARGS="[--rounds 5] [--beside DIR] [--json out.json]"

Each figure is the least user time of the rounds, which other processes disturb less than the wall clock. Lowering is
`lowering.lower` alone, the program made before. `simulate` is the whole command but for the interpreter's start.
--beside: another checkout of this repository with its own `.venv`, whose commands run in turn with these.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.report import ROOT, Figures, Outcome
from helixpipe.common.flags import option
from helixpipe.draw.table import table
from helixpipe.lowering.lower import lower
from schedules import Shape, build

STEPS = MappingProxyType(
    {
        "1f1b": Shape(8, 256, 8),
        "zb1p": Shape(8, 170, 8),
        "seq1f1b": Shape(8, 64, 8, 4),
        "helix": Shape(8, 32, 24),
    }
)
"""About 4,096 ops each."""
COMMANDS = (
    "simulate 1f1b -p 128 -m 1024 -L 128 --json",
    "simulate seq1f1b -k 8 -p 64 -m 256 -L 64 --json",
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


@dataclass(frozen=True)
class Options(Figures):
    rounds: int = option(5, "Of each figure.", at_least=1)
    beside: str | None = option(None, "Another checkout to compare with.", metavar="DIR")


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


def run(options: Options) -> Outcome:
    figures: dict[str, list[float]] = {}
    for name, shape in STEPS.items():
        program = build(name, shape)
        fresh = [replace(program) for _ in range(options.rounds)]  # what is derived from one is kept with it
        label = f"lower a step of {sum(map(len, program.ranks))} ops, {name}"
        figures[label] = [min(user_time(partial(lower, each)) for each in fresh)]
    roots = [ROOT, *([Path(options.beside)] if options.beside else [])]
    for words in COMMANDS:
        rounds = [[command_time(words, root) for root in roots] for _ in range(options.rounds)]
        figures[words] = [min(times) for times in zip(*rounds, strict=True)]
    cells = [(label, *(f"{each:.2f}" for each in times), "")[: 1 + len(roots)] for label, times in figures.items()]
    heads = ("user seconds, least of the rounds", "here", "beside")[: 1 + len(roots)]
    return Outcome(table(heads, cells), figures=figures)
