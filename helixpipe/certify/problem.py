"""The scheduling problem that a simulated step is one solution of: what every order of its work has to respect.

A bound holds for all programs with the same ops (F, B, I, W and R with their times), each on the same rank, with the
same messages and collectives of a divided head, under the same limits of memory; the order of ops on a rank and of
transfers on a link is free, and so is which forward runs beside which backward (`pairs`). What an order itself decides
is left out, so that a bound says no more than holds for all of them: borrowed and gathered weights, sums over replicas,
keys and values between ranks, copies to the host, barriers between turns, compute time that transfers take of ranks. Of
memory only what ops make and ops free counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from helixpipe.certify.pairs import BACKWARDS, apart, op_times
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.build import build_graph
from helixpipe.lowering.graph import Graph
from helixpipe.program.program import Op, Program, Unit
from helixpipe.program.tasks import Resource
from helixpipe.program.transfer import Transfer
from helixpipe.simulate.simulator import Simulation
from helixpipe.simulate.sweep import ACTIVATIONS, CATEGORY_OF, GIVEN

KEPT = frozenset({"activation", "gradient", "head_input", "head_sums", "head_gradient"})
"""Kinds of transfers that are the same for every order."""


class TimedTask(NamedTuple):
    """An op or a transfer. unit: whose work, or whose data. time: the least it takes. start, end: as simulated, the two
    ops of a pair one after the other. alone: what it takes beside no other op, no less than time."""

    kind: str
    unit: Unit
    resource: Resource
    time: float
    start: float
    end: float
    alone: float

    def __str__(self) -> str:
        op = Op(self.kind, *self.unit)
        return str(op) if self.resource.kind == "compute" else f"{self.kind} {op._replace(kind='F')}"


class Held(NamedTuple):
    """Memory of a rank, from the start of the op `first`, or its end where `after` is set, to the end of the op
    `last`; ops by their number."""

    rank: int
    first: int
    last: int
    size: float
    after: bool


@dataclass(frozen=True)
class OrderingProblem:
    """tasks: ops, then transfers. before: for each task those that it waits for. limits: what `held` may come to on
    each rank, in the costs' unit of memory. others: transfers that are not in it, for the timeline."""

    program: Program
    tasks: tuple[TimedTask, ...]
    before: tuple[tuple[int, ...], ...]
    held: tuple[Held, ...]
    limits: tuple[float, ...]
    others: tuple[TimedTask, ...]


def problem_of(simulation: Simulation, limit: float | None = None) -> OrderingProblem:
    """Return the problem of a simulated step. limit: what each rank may have in all, in the costs' unit; a step that
    needs more may have what its fullest rank needs, and so may every step where it is None."""
    program, costs = replace(simulation.lowered.program, pairs=frozenset()), simulation.costs
    graph = build_graph(program) if simulation.lowered.program.pairs else simulation.lowered.graph
    bound = BoundCosts(program, costs)
    times = op_times(bound)
    least = [times[op].least for op in graph.ops]
    starts = _starts(simulation)
    starts |= apart(simulation.lowered.graph.pairs, starts, least)
    tasks = [
        TimedTask(op.kind, op.unit, Resource("compute", (rank,)), least[number], *starts[number], times[op].alone)
        for number, (op, rank) in enumerate(zip(graph.ops, graph.ranks, strict=True))
    ]
    number_of = {number: number for number in range(graph.num_ops)}
    others = []
    for task, transfer in enumerate(graph.transfers, start=graph.num_ops):
        made = _transfer(transfer, bound.transfer_time(transfer), starts.get(task, (0.0, 0.0)))
        if transfer.kind in KEPT:
            number_of[task] = len(tasks)
            tasks.append(made)
        elif task in starts:
            others.append(made)
    before: list[list[int]] = [[] for _ in tasks]
    for first, then in _edges(graph):
        if first in number_of and then in number_of:
            before[number_of[then]].append(number_of[first])
    room = max(simulation.device_needs, default=0.0)
    room = max(room, 0.0 if limit is None else limit)
    pieces = map(program.pieces_of_rank, range(program.num_ranks))
    held = tuple(_held(graph, bound))
    own = (_most(tasks, held, rank) for rank in range(program.num_ranks))
    limits = tuple(max(room - costs.static_memory(each), most) for each, most in zip(pieces, own, strict=True))
    return OrderingProblem(
        program, tuple(tasks), tuple(tuple(set(each)) for each in before), held, limits, tuple(others)
    )


def _most(tasks: Sequence[TimedTask], held: Iterable[Held], rank: int) -> float:
    """Return what a rank holds at most in the step; more than its memory, where the forward of a pair fills what the
    backward frees: here each counts whole."""
    changes = []
    for each in held:
        if each.rank == rank:
            first = tasks[each.first]
            changes += [(first.end if each.after else first.start, each.size), (tasks[each.last].end, -each.size)]
    return max(accumulate((size for _, size in sorted(changes)), initial=0.0))


def _starts(simulation: Simulation) -> dict[int, tuple[float, float]]:
    """When each task started and ended; without those that the timeline leaves out."""
    graph, timeline = simulation.lowered.graph, simulation.timeline
    shown = [each for each in graph.transfers if each.producer or each.consumer]
    times = {number: (event.start, event.end) for number, event in enumerate(timeline.ops)}
    pairs = zip(shown, timeline.transfers, strict=True)
    return times | {graph.task(each): (event.start, event.end) for each, event in pairs}


def _transfer(transfer: Transfer, time: float, times: tuple[float, float]) -> TimedTask:
    return TimedTask(transfer.kind, transfer.unit, Resource(transfer.resource, transfer.ranks), time, *times, time)


def _edges(graph: Graph) -> Iterator[tuple[int, int]]:
    """What waits for what in every order."""
    fixed = _rows_on_one_rank(graph)
    for first, waiting in enumerate(graph.successors):
        for then in waiting:
            if first < graph.num_ops and then < graph.num_ops:
                one, other = graph.ops[first], graph.ops[then]
                if one[2:] != other[2:] and (one.stage != other.stage or (one.stage, *one[2:]) not in fixed):
                    continue
            yield first, then


def _rows_on_one_rank(graph: Graph) -> frozenset[tuple[int, int, int]]:
    """The (stage, microbatch, chunk) of all rows whose chunks one rank runs in that stage."""
    ranks: dict[tuple[int, ...], int] = {op[1:]: rank for op, rank in zip(graph.ops, graph.ranks, strict=True)}
    return frozenset(
        (stage, *place)
        for row in graph.program.workload.rows
        for stage in range(len(graph.program.stages))
        if len({ranks.get((stage, *place)) for place in row}) == 1
        for place in row
    )


def _held(graph: Graph, bound: BoundCosts) -> Iterator[Held]:
    """The buffers of activations that an op makes and an op of its rank frees."""
    for last in range(graph.num_ops):
        for number in graph.frees[last]:
            buffer, first = graph.buffers[number], graph.writer[number]
            if first >= graph.num_ops or buffer.host or CATEGORY_OF[buffer.kind] != ACTIVATIONS:
                continue
            if size := bound.size(buffer):
                yield Held(buffer.rank, first, last, size, buffer.kind in GIVEN)


@dataclass(frozen=True)
class Windows:
    """When tasks can run at all. before: what each task waits for, also by `turns`. order: of all tasks,
    each after those that it waits for. heads: the least time before each task's start; tails: after its end."""

    before: tuple[frozenset[int], ...]
    order: tuple[int, ...]
    heads: list[float]
    tails: list[float]


def windows(problem: OrderingProblem, times: Sequence[float] | None = None) -> Windows:
    """times: of the tasks, whether alone or not, if not their own.

    Before the first backward of a step starts, on whichever rank, no forward runs beside one; until then forwards take
    what they take alone.
    """
    alone = [task.alone for task in problem.tasks] if times is None else times
    times = [task.time for task in problem.tasks] if times is None else times
    before = [set(each) for each in problem.before]
    for first, then in turns(problem):
        before[then].add(first)
    after: list[list[int]] = [[] for _ in before]
    for then, waited in enumerate(before):
        for first in waited:
            after[first].append(then)
    order = []
    left = [len(each) for each in before]
    ready = [task for task, count in enumerate(left) if not count]
    while ready:
        task = ready.pop()
        order.append(task)
        for then in after[task]:
            left[then] -= 1
            if not left[then]:
                ready.append(then)
    assert len(order) == len(before), "a step that was simulated waits for itself"
    starts = longest(order, before, alone, {})
    backward = min((starts[n] for n, task in enumerate(problem.tasks) if task.kind in BACKWARDS), default=0.0)
    heads = longest(order, before, times, {n: min(start, backward) for n, start in enumerate(starts)})
    tails = longest(order[::-1], after, times, {})
    return Windows(tuple(map(frozenset, before)), tuple(order), heads, tails)


def longest(
    order: Sequence[int], before: Sequence[Iterable[int]], times: Sequence[float], least: Mapping[int, float]
) -> list[float]:
    """Return the longest chain before each task. least: starts of tasks that are no earlier whatever comes before."""
    heads = [0.0] * len(order)
    for task in order:
        heads[task] = max((heads[first] + times[first] for first in before[task]), default=0.0)
        heads[task] = max(heads[task], least.get(task, 0.0))
    return heads


def turns(problem: OrderingProblem) -> Iterator[tuple[int, int]]:
    """What may be taken to wait for what, beside `OrderingProblem.before`, without making any step longer.

    Microbatches that are alike (their tasks have the same resources and times, their buffers the same sizes, and
    nothing waits for another microbatch) may change their names: call the n-th start of each kind of work that of the
    n-th of them. Whatever that work waits for has ended n times by then, so nothing changes, and memory does not
    either. Hence each kind of work takes them in turn.
    """
    tasks, alike = problem.tasks, _alike(problem)
    number_of = {(task.kind, task.unit): number for number, task in enumerate(tasks)}
    next_of = {one: other for group in alike for one, other in pairwise(group)}
    for number, (kind, unit, *_) in enumerate(tasks):
        if unit.microbatch in next_of:
            yield number, number_of[kind, unit._replace(microbatch=next_of[unit.microbatch])]


def _alike(problem: OrderingProblem) -> list[tuple[int, ...]]:
    """The groups of microbatches that are alike, in order; empty where microbatches wait for each other."""
    tasks = problem.tasks
    work: dict[int, list[tuple[object, ...]]] = defaultdict(list)
    for then, waited in enumerate(problem.before):
        kind, (stage, microbatch, chunk), resource, time, _, _, alone = tasks[then]
        if any(tasks[first].unit.microbatch != microbatch for first in waited):
            return []
        work[microbatch].append((kind, stage, chunk, *resource, time, alone))
    for _, first, last, size, after in problem.held:
        (kind, unit, *_), (end, until, *_) = tasks[first], tasks[last]
        if unit.microbatch != until.microbatch:
            return []
        work[unit.microbatch].append(("held", unit.stage, unit.chunk, kind, end, until.chunk, size, after))
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for microbatch in sorted(work):
        groups[tuple(sorted(work[microbatch], key=repr))].append(microbatch)
    return [tuple(group) for group in groups.values()]
