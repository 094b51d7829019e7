"""A head of its own on every rank: microbatches take turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise

from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.build import graph_of
from helixpipe.lowering.graph import Graph
from helixpipe.lowering.lower import scheduled
from helixpipe.program.costs import Costs
from helixpipe.program.program import Op, Program, Unit
from helixpipe.program.stages import Activations, Piece, Stage

HEAD = Piece("head")


def spreadable(program: Program) -> bool:
    """Return whether the head can be a stage of its own, replicated on every rank: it is a plain one, no weights
    travel, and it is not on every rank already.
    """
    return (
        program.num_ranks > 1
        and program.stages[-1].pieces[-1] == HEAD
        and not program.forward_only
        and all(stage.owner is None for stage in program.stages)
        and (len(program.stages[-1].pieces) > 1 or program.stages[-1].placement == "resident")
    )


def spread_heads(program: Program, costs: Costs, split: bool = False) -> Program:
    """Move the head to a stage of its own, replicated on every rank, each of which gets as much of its work as any.

    Each head goes forward and at once backward, at the place of its rank when the rest of the last stage would have
    begun its backward. split: where the last stage's backward is split, so is the head's.
    """
    last = program.stages[-1]
    alone = len(last.pieces) == 1
    rest = len(program.stages) - 1
    head = rest if alone else rest + 1
    stages = (*program.stages[:rest], *(() if alone else (_headless(last),)), Stage((HEAD,), "replicated"))
    homes = _homes(replace(program, stages=stages), rest, costs)

    def heads(op: Op) -> list[tuple[int, tuple[Op, ...]]]:
        return [(homes[op.unit], head_ops(op, head, split))]

    ranks = with_heads(program, costs, rest, heads, drops_rest=alone)
    activations = {unit: own for unit, own in program.activations.items() if unit.stage != rest}
    if not alone:
        activations |= {unit: without_head(own) for unit, own in program.activations.items() if unit.stage == rest}
    return replace(program, stages=stages, ranks=ranks, activations=activations)


def head_ops(op: Op, head: int, split: bool) -> tuple[Op, ...]:
    """Return the ops of a head that goes forward and at once backward. op: the backward, B or I, that needs its
    gradient. split: where that is split, so is the head's."""
    return tuple(op._replace(kind=kind, stage=head) for kind in ("FIW" if split and op.kind == "I" else "FB"))


def with_heads(
    program: Program,
    costs: Costs,
    rest: int,
    heads: Callable[[Op], Sequence[tuple[int, tuple[Op, ...]]]],
    drops_rest: bool = False,
) -> tuple[tuple[Op, ...], ...]:
    """Return the order of every rank with the ops of heads in it.

    rest: the last stage that has layers. heads: from a backward of it, when the given program would begin that, the
    ranks that run ops of heads then, and these. drops_rest: the ops of `rest` itself go.
    """
    graph, starts = graph_of(program), scheduled(program, costs).start
    waits = _waits(graph)
    orders: list[list[tuple[float, int, int, Op]]] = [[] for _ in program.ranks]  # with the time, and its turn then
    for task, op in enumerate(graph.ops):
        if op.stage != rest or not drops_rest:
            orders[graph.ranks[task]].append((starts[task], task, 0, op))
        if op.stage == rest and op.kind in "BI":
            at_once = _at_once(waits, starts, task)
            for rank, ops in heads(op):  # before all else that starts at the same time, and in this order
                after = max(at_once.intersection(graph.rank_tasks[rank]), default=-1)
                orders[rank] += [(starts[task], after, 4 * task + place, each) for place, each in enumerate(ops, 1)]
    return tuple(tuple(op for *_, op in sorted(order)) for order in orders)


def _waits(graph: Graph) -> list[list[int]]:
    """Return for each task those it waits for, the op before it on its rank among them."""
    waits: list[list[int]] = [[] for _ in range(graph.num_tasks)]
    for before, tasks in enumerate(graph.successors):
        for task in tasks:
            waits[task].append(before)
    for before, task in chain.from_iterable(pairwise(tasks) for tasks in graph.rank_tasks):
        waits[task].append(before)
    return waits


def _at_once(waits: Sequence[Sequence[int]], starts: Sequence[float], task: int) -> set[int]:
    """Return the tasks that start when this one does though it waits for them: they take no time."""
    found, left = set[int](), [task]
    while left:
        more = {each for each in waits[left.pop()] if starts[each] == starts[task]} - found
        found |= more
        left += more
    return found


def _homes(program: Program, rest: int, costs: Costs) -> Mapping[Unit, int]:
    """Return the rank on which the head of each unit of stage `rest` runs: in turn the one that has the least work of
    heads so far. program: its last stage is the head.
    """
    bound, work = BoundCosts(program, costs), [0.0] * program.num_ranks
    given, homes = [0] * program.num_ranks, {}
    for place in program.workload.units():
        rank = min(range(program.num_ranks), key=lambda each: (work[each], given[each]))
        work[rank] += bound.op_time(Op("F", len(program.stages) - 1, *place))
        given[rank] += 1
        homes[Unit(rest, *place)] = rank
    return homes


def _headless(stage: Stage) -> Stage:
    own = without_head(stage.activations)
    return replace(stage, pieces=stage.pieces[:-1], recompute=own.recompute)


def without_head(own: Activations) -> Activations:
    """Return what is done with the activations of all pieces but the head."""
    recompute = tuple(run for run in own.recompute if HEAD not in run)
    offload = tuple((run, share) for run, share in own.offload if HEAD not in run)
    return replace(own, recompute=recompute, offload=offload)
