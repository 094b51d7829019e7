"""Splits the last backwards of a finished order into I and W, so that W fills what ranks idle at the end of a step.

At the end of a step a gradient goes through the ranks one after the other, which idle before and after it. Where these
backwards are split it passes sooner, and the W left over fill the wait. A full pipeline has no idle time for a W, which
takes memory until it runs; and the halves take longer than the whole where a backward hides collectives behind its
weight gradients. So all other backwards stay whole, unless to split them all is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate
from math import inf
from typing import TypeVar

from helixpipe.lowering.bound import BoundCosts
from helixpipe.planning.memory.held import held_by, stored_by
from helixpipe.planning.memory.room import beside_units
from helixpipe.planning.order.list_scheduling import ABANDONED, ListSchedule, Rules, best_of
from helixpipe.planning.order.problem import ByUnit, Problem
from helixpipe.program.costs import Costs
from helixpipe.program.program import Op, Program, Unit
from helixpipe.program.tasks import Buffer
from helixpipe.program.transfer import Transfer
from helixpipe.program.workload import Workload

Made = TypeVar("Made")

Row = tuple[float, ...]
"""A figure for each unit."""

LAST = (1, 2, 4)
"""How many of a rank's last backwards are split, over the number of ranks, beside all of them."""

RULES = ((1, inf), (1, 0.5), (2, inf))
"""`Rules.ahead` and `Rules.patience` that are tried."""


def split_last(
    program: Program, costs: Costs, limit: float, slowest: float = inf
) -> list[tuple[float, Callable[[], Program]]]:
    """Return (makespan by list scheduling, the program's maker) with the last backwards split, the fastest first.

    program: F and B, a stage a rank, all ranks through the microbatches in one order, their chunks ascending in F and
    descending in B; it may recompute. limit: of a rank's memory in all, in the costs' unit, kept to as far as can be
    told without the memory sweep. slowest: the longest makespan that is of use.
    """
    order = _FinishedOrder(program, costs, limit)
    every = len(order.units)
    rules = [Rules(order=order.fixed, ahead=ahead, patience=wait) for ahead, wait in RULES]
    made = []
    for count in {*(min(each * program.num_ranks, every) for each in LAST), every}:
        best = best_of(order.problem(count), rules, slowest)
        if best is not ABANDONED:
            made.append((best.makespan, partial(order.program_of, best, count)))
    return sorted(made, key=lambda each: each[0])


def split_work(program: Program, costs: Costs) -> float:
    """Return the most time that a rank takes for F, I and W of all its units, a stage a rank: a lower bound for any
    order with all backwards split in which nothing is recomputed."""
    bound = BoundCosts(replace(program, activations={}), costs)
    units = [op[2:] for op in program.ranks[0] if op.kind == "F"]
    alike = {*bound.alike}
    return max(sum(bound.op_time(Op(kind, stage, *unit)) for kind in "FIW" for unit in units) for stage in alike)


def each_once(make: Callable[..., Made], *columns: Sequence[object]) -> tuple[Made, ...]:
    """Return what is made of each line of the columns: of lines of the same objects once, as of stages alike."""
    known: dict[tuple[int, ...], Made] = {}
    made = []
    for line in zip(*columns, strict=True):
        key = tuple(map(id, line))
        if key not in known:
            known[key] = make(*line)
        made.append(known[key])
    return tuple(made)


class _FinishedOrder:
    """A program as a problem of list scheduling, which numbers microbatches in the order in which they run.

    numbers: the program's number of each. units: (microbatch, chunk) in the order of F; backwards: of B. fixed: the
    order of each rank, with I for B.
    """

    def __init__(self, program: Program, costs: Costs, limit: float):
        self.program, self.costs, self.limit = program, costs, limit
        self.bound = BoundCosts(program, costs)
        self.numbers = [op.microbatch for op in program.ranks[0] if op.kind == "F" and op.chunk == 0]
        self.units = [op[2:] for op in program.ranks[0] if op.kind == "F"]
        self.backwards = [op[2:] for op in program.ranks[0] if op.kind == "B"]
        kinds = [[Op(kind, stage, 0, 0) for kind in "FI"] for stage in range(program.num_ranks)]
        self.fixed = tuple(
            tuple([forward if op[0] == "F" else inputs for op in ops])
            for ops, (forward, inputs) in zip(program.ranks, kinds, strict=True)
        )
        self.held = self._by_unit(lambda op: held_by(self.bound, op), "F")
        self.stored = self._by_unit(lambda op: stored_by(self.bound, op), "F")
        self.forward, self.backward, self.inputs, self.weights = (
            self._by_unit(self.bound.op_time, kind) for kind in "FBIW"
        )
        self._known_messages: dict[tuple[Hashable, int], Row] = {}
        self.message = tuple(self._messages(stage) for stage in range(program.num_ranks - 1))
        self.deferred = self._by_unit(lambda op: self.bound.size(Buffer("deferred", 0, *op[1:])), "W")

    def _by_unit(self, ask: Callable[[Op], float], kind: str) -> ByUnit:
        """Ask of each unit in each stage; of stages alike once, unless units recompute what others do not."""
        figures: list[tuple[float, ...]] = []
        for stage, alike in enumerate(self.bound.alike):
            known = alike < stage and not self.program.activations
            figures.append(figures[alike] if known else tuple(ask(Op(kind, stage, *unit)) for unit in self.units))
        return tuple(figures)

    def _messages(self, stage: int) -> tuple[float, ...]:
        """Return the times of a stage's messages to the next one: stages alike may have links that are not."""
        ranks = stage, stage + 1
        alike = self.bound.link(ranks), self.bound.alike[stage + 1]
        if alike not in self._known_messages:
            transfers = (Transfer(0, "activation", ranks, Unit(stage + 1, *unit)) for unit in self.units)
            self._known_messages[alike] = tuple(map(self.bound.transfer_time, transfers))
        return self._known_messages[alike]

    def problem(self, count: int) -> Problem:
        """Return the problem with the last `count` backwards split: any other I takes the time of B, and leaves W
        nothing to do and nothing to keep."""
        split = self._last(count)
        halved = [unit in split for unit in self.units]
        nothing = (0.0,) * len(halved)

        def chosen(own: Row, whole: Row = nothing) -> Row:
            return tuple([one if half else other for half, one, other in zip(halved, own, whole, strict=True)])

        def more(later: Row, now: Row, stays: Row) -> Row:
            return tuple([after - before + kept for after, before, kept in zip(later, now, stays, strict=True)])

        deferred = each_once(chosen, self.deferred)
        added = each_once(more, deferred, self.held, self.stored)
        reserve = tuple(max(0.0, *own) for own in added)
        given = self.program.workload.microbatches
        return Problem(
            workload=Workload(tuple(given[number] for number in self.numbers)),
            homes=tuple(range(self.program.num_ranks)),
            forward=self.forward,
            inputs=each_once(chosen, self.inputs, self.backward),
            weights=each_once(chosen, self.weights),
            message=self.message,
            held=self.held,
            deferred=deferred,
            added=added,
            limit=self._room(reserve),
            reserve=reserve,
        )

    def _last(self, count: int) -> set[tuple[int, ...]]:
        return set(self.backwards[-count:])

    def _room(self, reserve: tuple[float, ...]) -> tuple[float, ...]:
        """Return what units may keep on each rank, at least what they keep without a split."""
        return tuple(max(kept + more, spare) for kept, spare, more in zip(*self._rooms, reserve, strict=True))

    @cached_property
    def _rooms(self) -> tuple[list[float], list[float]]:
        """What units keep on each rank without a split, and the memory that there is for them."""
        place = {unit: at for at, unit in enumerate(self.units)}
        kept = []
        for ops, held in zip(self.program.ranks, self.held, strict=True):
            sizes = [held[place[op[2:]]] if op[0] == "F" else -held[place[op[2:]]] for op in ops]
            kept.append(max(accumulate(sizes), default=0.0))
        static = (self.costs.static_memory(self.program.pieces_of_rank(rank)) for rank in range(len(kept)))
        stages = range(len(kept)) if self.program.activations else self.bound.alike
        beside = each_once(lambda stage: beside_units(self.bound, [stage]), stages)
        return kept, [self.limit - own - around for own, around in zip(static, beside, strict=True)]

    def program_of(self, schedule: ListSchedule, count: int) -> Program:
        """Return the program of a schedule with the last `count` backwards split."""
        split, numbers = self._last(count), self.numbers

        def ops(rank: tuple[Op, ...]) -> Iterator[Op]:
            for kind, stage, place, chunk in rank:
                unit = numbers[place], chunk
                if kind == "F" or unit in split:
                    yield Op(kind, stage, *unit)
                elif kind == "I":
                    yield Op("B", stage, *unit)

        return replace(self.program, ranks=tuple(tuple(ops(rank)) for rank in schedule.ranks))
