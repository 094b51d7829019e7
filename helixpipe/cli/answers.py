"""Answers the questions of the playground's page: a simulated step as data that a page draws.

The page runs this module in the browser, as it is. A question is a JSON object:

    {"schedule": "1f1b", "flags": ["-p", "4", "-m", "8"], "costs": ["--message-time", "0.5"], "moves": [[0, 5, 2]]}

flags, costs: of `helixpipe simulate`; costs are those that a program's file is simulated with, too. moves: changes of
the program's order one after another; of rank 0 the op at place 5 goes to place 2. The answer has what `simulate
--json` prints, and when everything runs; or the sentence of an error, and the circle of ops that wait for each other.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from helixpipe.certify.certificate import Certificate, certify
from helixpipe.cli.model import ModelOnCluster
from helixpipe.cli.model_report import report
from helixpipe.cli.parser import as_typed, parsed, parsers
from helixpipe.cli.programs import make_simulations, plan_of
from helixpipe.cli.side_by_side import one_size
from helixpipe.common.errors import ProgramError, UserError
from helixpipe.common.json_values import parse_json
from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.models import MODELS
from helixpipe.draw.page import html_page
from helixpipe.draw.style import KIND_STYLES, TRANSFER_STYLES
from helixpipe.lowering.validate import CircleError
from helixpipe.planning.catalogue import Catalogue
from helixpipe.program.files import save_program
from helixpipe.program.json_text import json_text
from helixpipe.program.program import Op, Program
from helixpipe.simulate.curve import memory_curves
from helixpipe.simulate.simulator import Simulation

MOST_OPS = 20_000
"""Of a program that the page shows: so many take a browser about a minute."""

_NEEDS = "To fit this into its memory takes {}, which a page does not have: raise the memory limit, or run the command."


@dataclass(frozen=True)
class ShownStep:
    """A simulated step. limit: what a rank may keep, in the costs' unit of memory; None: no limit."""

    simulation: Simulation
    plan: ModelOnCluster | None
    limit: float | None

    @property
    def program(self) -> Program:
        return self.simulation.lowered.program


class Answers:
    """Answers of one catalogue; the last schedule's program is kept, for the changes of its order that follow."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._parser, self._commands = parsers(catalogue, only="simulate")
        self._base: tuple[tuple[str, ...], ShownStep] | None = None

    def choices(self) -> str:
        """Return what the page lets its user choose from, and the colours it draws with."""
        schedules = [
            {"name": each.name, "paper": each.paper, "virtual": each.virtual_stages, "oneRank": each.one_rank}
            for each in self._catalogue.values()
        ]
        models = [{"name": each.name, "layers": each.layers, "tokens": each.seq_length} for each in MODELS.values()]
        return json.dumps(
            {
                "schedules": schedules,
                "models": models,
                "hardware": list(HARDWARE),
                "kinds": {kind: style._asdict() for kind, style in KIND_STYLES.items()},
                "transfers": {kind: style._asdict() for kind, style in TRANSFER_STYLES.items()},
            }
        )

    def answer(self, question: str) -> str:
        """Return the step that the question asks for, or what is wrong with it."""
        try:
            return json.dumps(step_data(self._step(parse_json(question))))
        except CircleError as error:
            return json.dumps({"error": str(error)} | _circle(error))
        except UserError as error:
            return json.dumps({"error": str(error)})
        except ModuleNotFoundError as error:
            return json.dumps({"error": _NEEDS.format(error.name)})

    def bound(self, question: str) -> str:
        """Return a lower bound of the step, as `simulate --certify` gives it where no linear program is needed."""
        answer = self._step(parse_json(question))
        return json.dumps(certificate(answer).figures())

    def file(self, question: str, suffix: str) -> str:
        """Return the content of a file of the step: `.json` or `.csv`, its program, or `.html`, its timeline."""
        try:
            answer = self._step(parse_json(question))
            return json.dumps({"content": _file(answer, suffix)})
        except UserError as error:
            return json.dumps({"error": str(error)})

    def _step(self, question: Mapping[str, Any]) -> ShownStep:
        arguments = (question["schedule"], *question["flags"], *question["costs"])
        if self._base is None or self._base[0] != arguments:
            self._base = None
            self._base = arguments, self._simulated(arguments)
        base, moves = self._base[1], question.get("moves", ())
        if not moves:
            return base
        program = replace(base.program, ranks=moved(base.program.ranks, moves))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "edited.json"
            save_program(program, path)
            try:
                return self._simulated((str(path), *question["costs"]))
            except UserError as error:
                error.args = (str(error).replace(f"{path}: ", "").replace(str(path), "the program"),)
                raise

    def _simulated(self, arguments: Sequence[str]) -> ShownStep:
        namespace = parsed(self._parser, self._commands, self._catalogue, ["simulate", *arguments])
        one = one_size(namespace)
        if one is None:
            raise UserError("the page shows one size at a time; give -m, -k and -v one number each.")
        name, ranks = arguments[0], one.ranks or 4
        ops = 2 * ranks * (one.microbatches or 2 * ranks) * (one.chunks or 1) * (one.virtual_stages or 1)
        if ops > MOST_OPS:
            raise UserError(f"{ops} ops are more than the {MOST_OPS} that this page draws; the command shows any.")
        with as_typed(namespace):
            plan = plan_of([name], one)
            (simulation,) = make_simulations([name], one, plan)
        limit = one.memory_limit if plan is None else plan.limit
        return ShownStep(simulation, plan, limit)


def certificate(answer: ShownStep) -> Certificate:
    """Return the certificate of a step, from bounds that need no linear program."""
    return certify(answer.simulation, answer.limit, linear_program=False)


def moved(ranks: tuple[tuple[Op, ...], ...], moves: Sequence[Sequence[int]]) -> tuple[tuple[Op, ...], ...]:
    """Return the ranks' orders after moves, each a rank, a place in its order, and the place the op there goes to.
    Raises ProgramError for places that are not there."""
    orders = [list(ops) for ops in ranks]
    for rank, before, after in moves:
        if not 0 <= rank < len(orders) or not all(0 <= place < len(orders[rank]) for place in (before, after)):
            raise ProgramError(f"rank {rank} has no op to move from place {before} to {after}.")
        orders[rank].insert(after, orders[rank].pop(before))
    return tuple(map(tuple, orders))


def step_data(answer: ShownStep) -> dict[str, Any]:
    """Return what the page draws: figures as `simulate --json` prints them, ops in columns in each rank's order,
    transfers, and memory over time."""
    simulation, plan = answer.simulation, answer.plan
    graph, start, end = simulation.lowered.graph, simulation.times.start, simulation.times.end
    number = {op: task for task, op in enumerate(graph.ops)}
    tasks = [number[op] for ops in answer.program.ranks for op in ops]
    figures = simulation.to_json()
    fits = answer.limit is None or max(simulation.peak_activation) <= answer.limit
    if plan is not None:
        step = report(simulation, plan)
        figures |= {"unit": "s", "step": step.to_json()}
        fits = step.fits
    return {
        "figures": figures,
        "fits": fits,
        "limit": answer.limit,
        "unit": simulation.unit,
        "ops": _columns([op for ops in answer.program.ranks for op in ops], answer.program)
        | {"start": [start[task] for task in tasks], "end": [end[task] for task in tasks]},
        "transfers": [
            [event.kind, event.source, event.target, event.start, event.end, str(event.producer or ""), str(event.op)]
            for event in simulation.timeline.transfers
        ],
        "memory": {
            "unit": simulation.costs.memory_unit,
            "ranks": [
                [[(end if level.at_end else start)[level.task], level.device] for level in curve.levels]
                for curve in memory_curves(simulation.lowered, simulation.costs)
            ],
        },
    }


def _columns(ops: Sequence[Op], program: Program) -> dict[str, Any]:
    return {
        "rank": [rank for rank, own in enumerate(program.ranks) for _ in own],
        "kind": "".join(op.kind for op in ops),
        "stage": [op.stage for op in ops],
        "microbatch": [op.microbatch for op in ops],
        "chunk": [op.chunk for op in ops],
        "cell": list(map(str, ops)),
    }


def _circle(error: CircleError) -> dict[str, Any]:
    """Return a program that cannot run: its ops, which of them end, and those that wait for each other."""
    ops = [op for own in error.program.ranks for op in own]
    number = {op: task for task, op in enumerate(ops)}
    return {
        "ops": _columns(ops, error.program),
        "ended": [int(op in error.ended) for op in ops],
        "circle": [[number[op], number[other], int(direct)] for op, other, direct in error.circle],
    }


def _file(answer: ShownStep, suffix: str) -> str:
    if suffix == ".html":
        return html_page([answer.simulation])
    if suffix == ".json":
        return json_text(answer.program)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"program{suffix}"
        save_program(answer.program, path)
        return path.read_text(encoding="utf-8")
