"""`helixpipe improve`: search for a faster order than a schedule's own, or a faster program.

helixpipe improve seq1f1b -p 4 -m 4 -k 4 --model llama2-7b --seq-length 32768 --hardware a800 --save-program mine.json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from helixpipe.cli.chunks import Chunking
from helixpipe.cli.model import ModelOnCluster
from helixpipe.cli.model_report import report
from helixpipe.cli.options import CostOptions
from helixpipe.cli.profile import profile_costs
from helixpipe.cli.programs import make_simulations, plan_of
from helixpipe.common.errors import UserError
from helixpipe.common.files import try_file
from helixpipe.common.flags import dataclass_from_namespace, option
from helixpipe.common.progress import ProgressLine
from helixpipe.costs.hardware import GIB
from helixpipe.draw.table import table
from helixpipe.planning.order.chunk_options import ChunkOptions
from helixpipe.planning.reorder.evaluate import is_compiled
from helixpipe.planning.reorder.improve import Budget, Improved, SimulatedProgram, improve
from helixpipe.program.files import save_program
from helixpipe.program.program import Program

MOST_EVALUATIONS = 100_000_000

IN_PYTHON = (
    "Orders are judged in Python, some fifty times as slowly as compiled: install again where there is a C++ compiler."
)


@dataclass(frozen=True)
class ImproveOptions:
    """Options of the search of `improve`."""

    evaluations: int = option(
        20_000, "Orders that are judged; more take longer and find more.", at_least=1, at_most=MOST_EVALUATIONS
    )
    seed: int | None = option(None, "Of the draws: the same one finds the same (default: 0).")
    orders_only: bool = option(
        False,
        "Change the order alone: every op stays on its rank, backwards are split or whole, sequences cut as they were.",
    )
    save_program: str | None = option(
        None,
        "Write what was found to this file: a schedule like any other (--pipeline-schedule FILE.json).",
        metavar="FILE",
    )


def run(namespace: argparse.Namespace) -> None:
    options = dataclass_from_namespace(ImproveOptions, namespace)
    _check(namespace)
    if options.save_program is not None:
        try_file("--save-program", options.save_program)
    measured = profile_costs(namespace)
    plan = plan_of([namespace.schedule], namespace)
    (given,) = make_simulations([namespace.schedule], namespace, plan or measured)
    costs = dataclass_from_namespace(CostOptions, namespace)
    limit = costs.memory_limit
    if plan is not None:
        limit = inf if costs.ignore_memory_limit else plan.limit
    elif measured is not None and limit is not None:
        limit *= GIB

    def after(program: Program) -> float:
        return 0.0 if plan is None or program.forward_only else sum(plan.costs.after_time(program))

    program = given.lowered.program
    chunking = Chunking(dataclass_from_namespace(ChunkOptions, namespace), given.costs, plan)
    with ProgressLine("judging orders", unit=" %") as progress:
        improved = improve(
            program,
            given.costs,
            Budget(options.evaluations, options.seed or 0, options.orders_only),
            limit,
            after,
            lambda done, time: progress.at(round(100 * done), 100, f"best {time:.5g}"),
            lambda chunks: chunking.workload(program.num_microbatches, chunks, program.num_layers),
        )
    if options.save_program is not None:
        found = improved.after.program
        save_program(replace(found, schedule=_name(found.schedule)), options.save_program)
    answer = _Answer(improved, plan, "" if plan is None and measured is None else "s", given.costs.memory_unit)
    print(json.dumps(answer.to_json()) if namespace.json else answer.text())


def _check(namespace: argparse.Namespace) -> None:
    """Raise UserError for what is simulated otherwise than the search does. --seed is the search's, not --lengths'."""
    if namespace.p2p == "blocking":
        raise UserError("improve judges orders with messages beside ops; leave --p2p blocking out.")
    if namespace.lengths is not None:
        raise UserError("improve is for steps that are all alike; leave --lengths out.")
    namespace.seed = None


def _name(schedule: str) -> str:
    """Return the name of the program found from a schedule."""
    return schedule if schedule.startswith("improved-") else f"improved-{schedule}"


@dataclass(frozen=True)
class _Answer:
    """The result of the search and the units to report it in. plan: of --model. unit: of times; memory_unit: of a
    rank's memory.
    """

    improved: Improved
    plan: ModelOnCluster | None
    unit: str
    memory_unit: str

    def figures(self, candidate: SimulatedProgram) -> dict[str, Any]:
        simulation = candidate.simulation
        figures = {
            "start": candidate.start,
            "step_time": candidate.time,
            "makespan": simulation.makespan,
            "bubble_ratio": simulation.bubble_ratio,
            "memory": candidate.fullest,
        }
        if self.plan is not None:
            step = report(simulation, self.plan)
            figures |= {"tokens_per_second_per_gpu": step.tokens_per_gpu, "fits": step.fits}
        return figures

    def to_json(self) -> dict[str, Any]:
        improved = self.improved
        return {
            "before": self.figures(improved.before),
            "after": self.figures(improved.after),
            "gain": improved.gain,
            "tried": [self.figures(each) for each in improved.tried],
            "evaluations": improved.evaluations,
            "compiled": is_compiled(),
            "interrupted": improved.interrupted,
            "memory_unit": self.memory_unit,
        }

    def text(self) -> str:
        improved = self.improved
        rows = [self._row(improved.before.program.schedule, improved.before), self._row("found", improved.after)]
        headers = ("", "step time", "bubble", "fullest rank", *(("tokens/s/GPU",) if self.plan is not None else ()))
        lines = [table(headers, rows), "", self._gain()]
        if self.plan is not None:
            lines.append(f"The step found {report(improved.after.simulation, self.plan).verdict.sentence}.")
        if improved.interrupted:
            lines.append("Interrupted: this is the best until then.")
        if not is_compiled():
            lines.append(IN_PYTHON)
        return "\n".join(lines)

    def _row(self, name: str, candidate: SimulatedProgram) -> tuple[str, ...]:
        simulation = candidate.simulation
        in_bytes = self.memory_unit == "bytes"
        memory = f"{candidate.fullest / GIB:.1f} GiB" if in_bytes else f"{candidate.fullest:.4g} {self.memory_unit}"
        speed = () if self.plan is None else (f"{report(simulation, self.plan).tokens_per_gpu:.1f}",)
        time = f"{candidate.time:.5g} {self.unit}".rstrip()
        return (name, time, f"{100 * simulation.bubble_ratio:.1f} %", memory, *speed)

    def _gain(self) -> str:
        """Return what was gained, from which start, and the bound on any further gain."""
        improved = self.improved
        least = improved.after.least + improved.after.time - improved.after.simulation.makespan
        over = 100 * max(0.0, improved.after.time / least - 1) if least else 0.0
        start = "the schedule's own order" if improved.after.start == improved.before.start else improved.after.start
        judged = f"{improved.evaluations} orders judged"
        gained = f"Nothing faster was found, {judged}"
        if improved.after is not improved.before:
            gained = f"{100 * improved.gain:.1f} % faster, simulated, from {start}; {judged}"
        return f"{gained}. With these ops on these ranks no order is more than {over:.1f} % faster still."
