"""Places R ops in idle time, within what memory allows."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf

from helixpipe.costs.by_hand import unit_costs
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.build import graph_of
from helixpipe.lowering.graph import Graph
from helixpipe.lowering.lower import lowered_valid, scheduled
from helixpipe.lowering.order import TaskTimes
from helixpipe.lowering.validate import validate
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.program.costs import Costs
from helixpipe.program.program import Op, Program, Unit
from helixpipe.simulate.needs import device_needs
from helixpipe.simulate.streams import times_as_run

SWEEPS = 8
"""The most sweeps of `place_early` over idle time; two nearly always find all of it."""

_EQUAL = 1e-9
"""Times that differ by less than this part of them are equal."""


def recomputed(
    program: Program, options: RecomputeOptions, costs: Costs | None = None, limit: float | None = None
) -> Program:
    """Return the program with what the options recompute, unless its schedule has chosen that itself, and R ops in idle
    time unless they say otherwise. Raises ProgramError when R ops are to be placed in a program that is not valid.
    """
    own = any(stage.recompute for stage in program.stages)
    if options.granularity is not None and not own:
        program = replace(program, stages=options.stages(program.stages))
    if options.recompute_early and any(stage.recompute for stage in program.stages):
        validate(program)
        program = place_early(program, costs or unit_costs(), limit)
    return program


def place_early(program: Program, costs: Costs, limit: float | None = None, offloads: bool = False) -> Program:
    """Add an R op for every unit that is recomputed, each where its rank would otherwise wait.

    An R goes right before its backward, so that it may run before the gradient has come; where it would still keep the
    backward waiting, into an earlier gap of its rank that is long enough. So no op starts later than before. What an R
    makes is kept until its backward: a rank that would then keep more than `limit` (in the costs' unit, weights and
    optimizer included) keeps its R inside the backward, or in its place before it. Without a limit every R goes before
    its backward, and into earlier gaps as long as its rank keeps no more for it. One that fills no idle time, being
    still right before a backward whose gradient has come by then, is left to the backward, which keeps less. Messages
    then leave at other times and weights may come with other ones, so a step may be no faster for it all the same: then
    the order stays as it was. offloads: whether copies from the host, which are not there yet, will still delay
    backwards; then an R stays that fills no idle time yet, but where its rank makes the gradient itself.
    """
    if program.forward_only or not recomputes(program):
        return program
    explicit = {op.unit for ops in program.ranks for op in ops if op.kind == "R"}
    given = program
    placed = replace(program, ranks=tuple(tuple(_with_r(program, ops, explicit)) for ops in program.ranks))
    program = _what_fits(program, placed, costs, inf if limit is None else limit)
    for _ in range(SWEEPS):
        moved = _fill_gaps(program, costs, limit)
        if moved.ranks == program.ranks:
            break
        program = moved
    program = _without_vain(program, costs, explicit, offloads)
    bound = 1 + _EQUAL if offloads else 1 - _EQUAL
    if program.ranks != given.ranks and makespan(program, costs) < makespan(given, costs) * bound:
        return program
    return given


def recomputes(program: Program) -> bool:
    """Whether any unit recomputes anything."""
    own = (activations.recompute for activations in program.activations.values())
    return any(stage.recompute for stage in program.stages) or any(own)


def busy(program: Program, costs: Costs) -> list[float]:
    """Return the sum of the times of each rank's ops, a lower bound for any order of them."""
    bound = BoundCosts(program, costs)
    return [sum(map(bound.op_time, ops)) for ops in program.ranks]


def makespan(program: Program, costs: Costs) -> float:
    """Return the makespan as executed: with the order of messages and the waits of streams that lowering adds."""
    return times_as_run(lowered_valid(program, costs), costs).makespan


def _with_r(program: Program, ops: Sequence[Op], explicit: Container[Unit]) -> Iterator[Op]:
    """Yield a rank's ops with an R right before every backward that recomputes and has none."""
    for op in ops:
        if op.kind in "BI" and op.unit not in explicit and program.activations_of(op.unit).recompute:
            yield op._replace(kind="R")
        yield op


def _without_vain(program: Program, costs: Costs, given: Container[Unit], offloads: bool) -> Program:
    """Return the program without every R that fills no idle time: it is right before its backward, whose gradient has
    come when it starts, so the backward could start as soon, and run by run keeps less. given: units that had an R
    before. offloads: see `place_early`.
    """
    graph, times = graph_of(program), scheduled(program, costs)
    ready = _gradient_arrivals(graph, times)
    ranks = []
    for ops, tasks in zip(program.ranks, graph.rank_tasks, strict=True):
        own = {op.unit for op in ops if op.kind in "BI"}
        vain = {
            op
            for (op, after), (task, backward) in zip(pairwise(ops), pairwise(tasks), strict=True)
            if op.kind == "R" and op.unit == after.unit and op.unit not in given
            if not offloads or op.unit._replace(stage=op.stage + 1) in own
            if ready.get(backward, 0.0) <= times.start[task] + _EQUAL * times.end[task]
        }
        ranks.append(tuple(op for op in ops if op not in vain) if vain else ops)
    return program if tuple(ranks) == program.ranks else replace(program, ranks=tuple(ranks))


def peak_memory(program: Program, costs: Costs) -> list[float]:
    """Return the peak memory of each rank in all (`simulate.needs.device_needs`). The program must be valid."""
    return device_needs(lowered_valid(program, costs), costs)


def _what_fits(old: Program, new: Program, costs: Costs, limit: float | None) -> Program:
    """Take the new order of each rank, unless its peak memory is then above both the limit and its previous peak."""
    if new.ranks == old.ranks or limit == inf:
        return new
    before, after = peak_memory(old, costs), peak_memory(new, costs)
    bound = -inf if limit is None else limit
    chosen = zip(old.ranks, new.ranks, before, after, strict=True)
    return replace(new, ranks=tuple(n if now <= max(bound, was) else o for o, n, was, now in chosen))


def _fill_gaps(program: Program, costs: Costs, limit: float | None) -> Program:
    """Sweep once over all ranks' idle times; return the same program if no R has moved."""
    graph, times = graph_of(program), scheduled(program, costs)
    ready = _gradient_arrivals(graph, times)
    ranks = tuple(_fill_rank(program, graph, times, rank, ready) for rank in range(program.num_ranks))
    return program if ranks == program.ranks else _what_fits(program, replace(program, ranks=ranks), costs, limit)


def _fill_rank(
    program: Program, graph: Graph, times: TaskTimes, rank: int, ready: Mapping[int, float]
) -> tuple[Op, ...]:
    """Return the rank's ops with every R moved, in turn, into the first gap before it that is long enough, if its own
    place keeps its backward waiting. ready: see `_gradient_arrivals`.
    """
    tasks = graph.rank_tasks[rank]
    left: dict[int, float] = {}  # place in the order -> idle time before it that is not taken yet
    end = 0.0
    for place, task in enumerate(tasks):
        if times.start[task] > end:
            left[place] = times.start[task] - end
        end = times.end[task]
    own, position = program.ranks[rank], {op: place for place, op in enumerate(program.ranks[rank])}
    moves: dict[int, list[Op]] = {}
    for place, op in enumerate(own):
        if op.kind != "R":
            continue
        backward = tasks[place] + 1 if place + 1 < len(own) and own[place + 1].unit == op.unit else None
        if backward is None or times.end[tasks[place]] <= ready.get(backward, 0.0):
            continue  # moved already, or its backward waits for the gradient anyway
        length = times.end[tasks[place]] - times.start[tasks[place]]
        first = position[op._replace(kind="F")]
        gap = next((at for at, idle in left.items() if first < at < place and idle >= length > 0), None)
        if gap is not None:
            left[gap] -= length
            moves.setdefault(gap, []).append(op)
    if not moves:
        return own
    moved = {op for group in moves.values() for op in group}
    return tuple(
        each
        for place, op in enumerate(own)
        for each in (*moves.get(place, ()), *(() if op in moved else (op,)))
    )  # fmt: skip


def _gradient_arrivals(graph: Graph, times: TaskTimes) -> dict[int, float]:
    """Return, for each backward, when the last of its inputs arrives, without its own R."""
    arrivals: dict[int, float] = {}
    for task, successors in enumerate(graph.successors):
        if task >= graph.num_ops or graph.ops[task].kind in "BI":
            for successor in successors:
                if successor < graph.num_ops:
                    arrivals[successor] = max(arrivals.get(successor, 0.0), times.end[task])
    return arrivals
