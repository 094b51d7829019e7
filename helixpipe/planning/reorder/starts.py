"""Programs derived from a given one, to begin a search with.

Each is a valid program for the same model, workload and ranks, good or bad; whoever asks simulates them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from helixpipe.planning.memory.fitting import Fitting, Limits
from helixpipe.planning.order.problem import problem
from helixpipe.planning.order.zero_bubble import search
from helixpipe.program.chunked import in_chunks
from helixpipe.program.costs import Costs
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import Piece, Stage, uneven_stages
from helixpipe.program.workload import Workload, uniform

CUTS = (2, 4)
"""Chunks that sequences are cut into, where they are whole."""

Start = tuple[str, Callable[[], Program]]
"""The name of a starting program, and the function that makes it."""


Cut = Callable[[int], Workload]
"""A callback for the workload of a step whose microbatches run in so many chunks."""


def relatives(program: Program, costs: Costs, limit: float, workload: Cut | None = None) -> Iterator[Start]:
    """Yield programs derived from one that trains.

    Args:
        program: The program to begin with.
        costs: Costs of its ops.
        limit: The memory of each rank in all, in the costs' unit.
        workload: Says how whole sequences are cut; None: into equal chunks.
    """
    yield "backwards split", partial(split, program)
    if program.num_chunks == 1 and program.workload.proportional:
        for count in CUTS:
            yield f"{count} chunks", partial(cut, program, count, workload)
            yield f"{count} chunks, backwards split", partial(_cut_and_split, program, count, workload)
    if any(stage.placement != "resident" for stage in program.stages):
        return
    if program.activations:
        return
    ranks = program.num_ranks
    down, up = tuple(range(ranks)), tuple(reversed(range(ranks)))
    for name, homes in (("a line", down), ("a V", down + up), ("two rounds", down + down)):
        if len(homes) <= program.num_layers:
            yield f"list-scheduled in {name}", partial(listed, program, homes, costs, limit)


def split(program: Program) -> Program:
    """Replace every B of a stage with weights by I and W."""

    def halves(op: Op) -> tuple[Op, ...]:
        whole = op.kind != "B" or not program.stages[op.stage].has_weights
        return (op,) if whole else (op._replace(kind="I"), op._replace(kind="W"))

    return replace(program, ranks=tuple(tuple(half for op in ops for half in halves(op)) for ops in program.ranks))


def joined(program: Program) -> Program:
    """Replace every I that is directly followed by its W by B."""
    ranks = []
    for ops in program.ranks:
        order: list[Op] = []
        for op in ops:
            if op.kind == "W" and order and order[-1] == op._replace(kind="I"):
                order[-1] = op._replace(kind="B")
            else:
                order.append(op)
        ranks.append(tuple(order))
    return replace(program, ranks=tuple(ranks))


def cut(program: Program, count: int, workload: Cut | None = None) -> Program:
    """Cut each microbatch of a program of whole ones into `count` chunks: equal ones unless `workload` says more."""
    return in_chunks(program, workload(count) if workload is not None else uniform(program.num_microbatches, count))


def _cut_and_split(program: Program, count: int, workload: Cut | None) -> Program:
    return split(cut(program, count, workload))


def listed(program: Program, homes: Sequence[int], costs: Costs, limit: float) -> Program:
    """Return the best list schedule of split backwards with a stage for each of these homes, layers divided evenly;
    what the given program recomputes is recomputed inside the backwards.
    """
    count, layers = len(homes), program.num_layers
    cuts = [layers * stage // count for stage in range(count + 1)]
    runs = [run for stage in program.stages for run in stage.recompute]
    stages = tuple(
        replace(stage, recompute=_within(runs, stage.pieces))
        for stage in uneven_stages([after - before for before, after in pairwise(cuts)], program.layer_kinds)
    )

    def find(stages: tuple[Stage, ...], limits: Limits) -> Program:
        given = problem(program.schedule, stages, tuple(homes), program.workload, len(program.workload), costs, limits)
        return replace(program, stages=stages, ranks=search(given, ()).ranks)

    return Fitting(find, stages, program.num_ranks, costs, limit).ordered()


def _within(runs: Sequence[Sequence[Piece]], pieces: Sequence[Piece]) -> tuple[tuple[Piece, ...], ...]:
    """Return the part of each run that is among the pieces."""
    own = set(pieces)
    parts = (tuple(piece for piece in run if piece in own) for run in runs)
    return tuple(part for part in parts if part)
