"""Defines the problem that list scheduling of split backwards solves: times, and memory of units under a limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from typing import Any

from helixpipe.compiled import core
from helixpipe.lowering.bound import BoundCosts
from helixpipe.planning.memory.held import held_by, stored_by
from helixpipe.planning.memory.room import beside_units
from helixpipe.planning.order.orders import backward_units, forward_units
from helixpipe.program.costs import Costs
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import Stage
from helixpipe.program.tasks import Buffer
from helixpipe.program.transfer import Transfer
from helixpipe.program.workload import Workload

ByUnit = tuple[tuple[float, ...], ...]
"""A figure for each stage and each of its units, in the order of F."""


@dataclass(frozen=True)
class Problem:
    """A scheduling problem.

    workload: every (microbatch, chunk) of it is a unit of each stage. homes: the rank of each stage. forward, inputs,
    weights: times of F, I, W. message: time of a message from each stage to the next (and of its gradient back). held:
    memory of a unit from F to I. deferred: its memory from I to W. added: what a rank keeps more while an I runs.
    limit: the most each rank may keep; at least a whole microbatch, the largest, of all its stages and the reserve.
    reserve: the most that an I adds (gradients beside activations) on each rank, which F leave free.
    """

    workload: Workload
    homes: tuple[int, ...]
    forward: ByUnit
    inputs: ByUnit
    weights: ByUnit
    message: ByUnit
    held: ByUnit
    deferred: ByUnit
    added: ByUnit
    limit: tuple[float, ...]
    reserve: tuple[float, ...]

    @cached_property
    def own(self) -> list[list[int]]:
        """The stages of each rank."""
        return [[s for s, home in enumerate(self.homes) if home == rank] for rank in range(1 + max(self.homes))]

    @cached_property
    def forward_units(self) -> list[tuple[int, int]]:
        """(microbatch, chunk) in the order of F: causal attention needs a sequence from its start."""
        return forward_units(self.workload)

    @cached_property
    def backward_units(self) -> list[tuple[int, int]]:
        """(microbatch, chunk) in the order of I and W: gradients of keys and values come from later chunks."""
        return backward_units(self.workload)

    @cached_property
    def starts(self) -> list[int]:
        """The index of each microbatch's first unit in the order of F, and the number of all units."""
        return [0, *accumulate(len(chunks) for chunks in self.workload.microbatches)]

    @cached_property
    def ops(self) -> list[dict[str, list[Op]]]:
        """The F, I and W of each stage's units, in the order of F."""
        return [
            {kind: [Op(kind, stage, *unit) for unit in self.forward_units] for kind in "FIW"}
            for stage in range(len(self.homes))
        ]

    @cached_property
    def left(self) -> list[list[float]]:
        """For each stage, the memory kept by a unit and those of its microbatch after it."""
        return [
            [
                kept
                for start, end in pairwise(self.starts)
                for kept in reversed(list(accumulate(reversed(held[start:end]))))
            ]
            for held in self.held
        ]

    @cached_property
    def work(self) -> list[float]:
        """The sum of the times of each rank's ops."""
        times = (self.forward, self.inputs, self.weights)
        return [sum(sum(of_kind[stage]) for of_kind in times for stage in own) for own in self.own]

    @cached_property
    def compiled(self) -> Any | None:
        """The same for the compiled twin of list scheduling; None where nothing was compiled."""
        module = core()
        if module is None:
            return None
        return module.SplitBackwards(
            self.homes,
            self.own,
            [microbatch for microbatch, _ in self.forward_units],
            self.starts,
            [self.place(*unit) for unit in self.backward_units],
            *(self.forward, self.inputs, self.weights, self.message, self.held, self.deferred, self.added, self.left),
            *(self.limit, self.reserve, self.work),
        )

    def place(self, microbatch: int, chunk: int) -> int:
        """Return the place of a unit in the order of F."""
        return self.starts[microbatch] + chunk

    def first(self, microbatches: int) -> Problem:
        """Return the problem of the first `microbatches` microbatches."""
        if microbatches >= len(self.workload):
            return self
        end = self.starts[microbatches]
        names = ("forward", "inputs", "weights", "message", "held", "deferred", "added")
        figures = {name: tuple(row[:end] for row in getattr(self, name)) for name in names}
        workload = replace(self.workload, microbatches=self.workload.microbatches[:microbatches])
        return replace(self, workload=workload, **figures)

    def lower_bounds(self) -> tuple[float, float]:
        """Return lower bounds, for any order, of the makespan and of the time from a rank's first op to its last.

        A rank starts when the first chunk arrives; until its first I it can run as many F as its memory holds; and
        after its last I there are the I of all stages before, beside which it has only the W it still keeps.
        """
        crossing = [a != b for a, b in pairwise(self.homes)]
        travel = [[time * far for time in times] for times, far in zip(self.message, crossing, strict=True)]
        # When the first F of each stage can start; how long the last I of the stages before it take.
        first, back = [0.0], [0.0]
        chunks = self.starts[1]
        ends = list(accumulate(self.forward[0][:chunks]))  # of the first microbatch's F in one stage, then in the next
        last_unit = self.place(*self.backward_units[-1])
        for s, times in enumerate(travel):
            first.append(first[-1] + self.forward[s][0] + times[0])
            back.append(back[-1] + self.inputs[s][last_unit] + times[last_unit])
            end = 0.0
            for chunk, time in enumerate(self.forward[s + 1][:chunks]):
                ends[chunk] = end = max(end, ends[chunk] + times[chunk]) + time
        turn = [ends[-1]]  # when the first I of each stage can start
        for s, times in reversed(list(enumerate(travel))):
            turn.insert(0, turn[0] + self.inputs[s + 1][chunks - 1] + times[chunks - 1])
        makespan = span = 0.0
        for rank, stages in enumerate(self.own):
            forward, inputs, weights = (
                sum(sum(times[s]) for s in stages) for times in (self.forward, self.inputs, self.weights)
            )
            early = min(forward, self._units(rank, self.held) * max(max(self.forward[s]) for s in stages))
            late = min(weights, self._units(rank, self.deferred) * max(max(self.weights[s]) for s in stages))
            idle = max(0.0, turn[stages[-1]] - first[stages[0]] - early)
            tail = max(0.0, back[stages[0]] + self.weights[0][last_unit] - late) if stages[0] else 0.0
            span = max(span, idle + forward + inputs + weights)
            makespan = max(makespan, first[stages[0]] + idle + forward + inputs + weights + tail)
        return makespan, span

    def _units(self, rank: int, kept: ByUnit) -> float:
        """Return the most units that the rank's memory holds."""
        least = min(min(kept[s]) for s in self.own[rank])
        return self.limit[rank] // (least * (1 - 1e-9)) if least else inf


def problem(
    name: str,
    stages: tuple[Stage, ...],
    homes: tuple[int, ...],
    workload: Workload,
    inflight: float,
    costs: Costs,
    memory_limits: Sequence[float] | None = None,
) -> Problem:
    """Ask `costs` once for everything. inflight: the limit, in microbatches (the largest) of all the stages of a rank,
    at least 1. memory_limits: what each rank may use in all, in the costs' unit; kept to as far as one microbatch
    allows."""
    empty = Program(name, stages, ((),) * (1 + max(homes)), workload)
    bound = BoundCosts(empty, costs)
    alike: dict[int, int] = {}  # microbatches cut alike have one tuple of extents: the first stands for all
    likeness = [alike.setdefault(id(extents), number) for number, extents in enumerate(workload.extents)]

    def by_unit(ask: Callable[[Op], float], kind: str, count: int = len(stages)) -> ByUnit:
        figures = []
        for s in range(count):
            of = {m: [ask(Op(kind, s, m, chunk)) for chunk in range(len(workload.chunks(m)))] for m in alike.values()}
            figures.append(tuple(figure for m in likeness for figure in of[m]))
        return tuple(figures)

    def message_time(op: Op) -> float:
        target = op._replace(stage=op.stage + 1)
        ranks = homes[op.stage], homes[target.stage]
        return bound.transfer_time(Transfer(0, "activation", ranks, target.unit, op, target))

    held = by_unit(lambda op: held_by(bound, op), "F")
    deferred = by_unit(lambda op: bound.size(Buffer("deferred", 0, *op[1:])), "W")
    stored = by_unit(lambda op: stored_by(bound, op), "F")
    added = tuple(
        tuple(later - now + stays for later, now, stays in zip(*figures, strict=True))
        for figures in zip(deferred, held, stored, strict=True)
    )
    ranks = [[s for s, home in enumerate(homes) if home == rank] for rank in range(1 + max(homes))]
    ends = [0, *accumulate(len(chunks) for chunks in workload.microbatches)]
    whole = {m: slice(ends[m], ends[m + 1]) for m in alike.values()}
    reserve, limit = [], []
    for rank, own in enumerate(ranks):
        reserve.append(max(max(0.0, *added[s]) for s in own))
        one = max(sum(size for s in own for size in held[s][units]) for units in whole.values())
        limit.append(inflight * one + reserve[-1])
        if memory_limits is not None:
            pieces = [piece for s in own for piece in stages[s].pieces]
            spare = memory_limits[rank] - costs.static_memory(pieces) - beside_units(bound, own)
            limit[-1] = max(one + reserve[-1], min(limit[-1], spare))
    messages = by_unit(message_time, "F", len(stages) - 1)
    forward, inputs, weights = (by_unit(bound.op_time, kind) for kind in "FIW")
    return Problem(
        workload, homes, forward, inputs, weights, messages, held, deferred, added, tuple(limit), tuple(reserve)
    )
