"""Measures what the executor itself takes of the host for each instruction, and a layer, in microseconds.

    make bench-host ARGS="[--steps 150] [--cases 1f1b 'llama layer'] [--beside DIR] [--json out.json]"

One rank's stream runs on a model that computes next to nothing and a transport that sends nothing, so that what is left
is the executor, autograd and the few calls of torch that nobody could do without. These alone, in a plain loop, are the
column `floor`. The cases of a layer run a small model with its autograd; their figures are of a layer and chunk, and
their floor is the same layer in plain torch.
--beside: another checkout of this repository, in a process of its own, whose steps take turns with these one by one, so
that what else the machine does hits both alike. A figure is the median over a step's instructions of a kind (of a
layer: the mean over chunks), and of these the least of the steps; the ratio is the median over pairs of steps.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import host_steps, layer_steps
from benchmarks.host_steps import Times
from benchmarks.ranks import own_environment
from benchmarks.report import ROOT, Figures, Outcome
from benchmarks.rounds import in_turn, median_ratio
from helixpipe.common.flags import option
from helixpipe.common.json_values import parse_json
from helixpipe.draw.table import right_aligned

CASES = {**dict.fromkeys(host_steps.CASES, host_steps), **dict.fromkeys(layer_steps.CASES, layer_steps)}
"""By name the module that runs it."""

WARM_UP = 5
KINDS = ("F", "B", "I", "W", "R", "RECV", "WAIT", "SEND", "REDUCE", "FREE", "per op")
"""Of instructions, in microseconds; last, processor time of a step over its ops."""


@dataclass(frozen=True)
class Options(Figures):
    steps: int = option(150, "Of each case.", at_least=1)
    cases: tuple[str, ...] = option(tuple(CASES), "Which cases.", choices=tuple(CASES))
    beside: str | None = option(None, "Another checkout to compare with.", metavar="DIR")


def run(options: Options) -> Outcome:
    roots = [ROOT, *([Path(options.beside).resolve()] if options.beside else [])]
    figures = {}
    for case in options.cases:
        figures[case] = run_case(case, roots, options.steps)
        print("", *report(case, *figures[case]), sep="\n", flush=True)
    return Outcome(figures=figures)


def run_case(case: str, roots: Sequence[Path], steps: int) -> tuple[list[list[Times]], Times]:
    """(of each checkout the times of each step, the floor of an executor's)."""
    workers = [start(case, root) for root in roots]
    floor = ask(workers[0], "floor")
    found = in_turn(range(len(roots)), steps, lambda which: ask(workers[which], "step"), WARM_UP)
    for worker in workers:
        worker.communicate()
    return list(found.values()), floor


def start(case: str, root: Path) -> subprocess.Popen[str]:
    """A process on the code of a checkout, which runs a step whenever it is told."""
    command = [sys.executable, str(CASES[case].__file__), case]
    environment = own_environment({"PYTHONPATH": str(root)})
    return subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def ask(worker: subprocess.Popen[str], what: str) -> Times:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(what + "\n")
    worker.stdin.flush()
    answer: Times = parse_json(worker.stdout.readline())
    return answer


def report(case: str, found: Sequence[Sequence[Times]], floor: Times) -> list[str]:
    """A line a kind of instruction."""
    rows = []
    for kind in [each for each in KINDS if each in found[0][0]]:
        least = [f"{min(times[kind] for times in steps):.2f}" for steps in found]
        columns = [[times[kind] for times in steps] for steps in found]
        beside = [f"{median_ratio(*columns):.2f}"] if len(found) > 1 else []
        rows.append([kind, *least, *beside, f"{floor[kind]:.2f}" if kind in floor else ""])
    heads = [case, "here", *(("beside", "ratio") if len(found) > 1 else ()), "floor"]
    return right_aligned(heads, rows, [18] + [7] * (len(heads) - 1))
