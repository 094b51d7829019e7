"""Computes how much each unit could offload with its copies hidden behind computation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.graph import Graph
from helixpipe.lowering.order import TaskTimes
from helixpipe.planning.memory.offload import OffloadOptions, timed, with_shares
from helixpipe.program.costs import Costs
from helixpipe.program.program import Program, Unit
from helixpipe.program.tasks import Buffer


class OffloadAmount(NamedTuple):
    """How much a rank offloads.

    amount: between nothing (0) and everything (1). longest: whole units are offloaded, those first whose activations
    wait longest; else a share of each unit, in proportion to what can be copied in the time that hides it, at 0.5 just
    that.
    """

    amount: float
    longest: bool = False


class Base:
    """A program that offloads nothing yet, and what each of its units could offload for nothing.

    hidden: for each rank and unit the share that can be copied in the time that hides it, which may be above 1.
    recomputing: the time that each rank spends on recomputation.
    """

    def __init__(self, program: Program, options: OffloadOptions, costs: Costs):
        self.program, self.costs = program, costs
        self.graph, self.times = timed(program, costs)
        everything = with_shares(program, options, dict.fromkeys(program.units(), 1.0), costs)
        leaving, bound = BoundCosts(everything, costs), BoundCosts(program, costs)
        self.recomputing = [sum(bound.recompute_time(op) for op in ops if op.kind in "BI") for ops in program.ranks]
        self.hidden: list[dict[Unit, float]] = []
        self._copying: list[dict[Unit, float]] = []
        for rank, tasks in enumerate(self.graph.rank_tasks):
            shares, times = {}, {}
            for unit, span, gap in sorted(_spans(self.graph, self.times, tasks), key=lambda each: -each[2]):
                if gap > 0 and leaving.size(Buffer("offloaded", rank, *unit)):
                    both_ways = (leaving.load(kind, (rank,), unit) for kind in ("offload", "fetch"))
                    times[unit] = max(map(costs.transfer_time, both_ways))
                    shares[unit] = span / times[unit] if times[unit] else inf
            self.hidden.append(shares)  # those that wait longest first
            self._copying.append(times)

    def shares(self, places: Sequence[OffloadAmount]) -> dict[Unit, float]:
        """Return the share of every unit that offloads. places: of each rank."""
        shares: dict[Unit, float] = {}
        for rank, place in enumerate(places):
            shares |= self._shares(rank, place)
        return shares

    def exposed(self, rank: int, place: OffloadAmount) -> float:
        """Return the approximate time of copies that is not hidden."""
        hidden, copying = self.hidden[rank], self._copying[rank]
        return sum(max(0.0, s - hidden[unit]) * copying[unit] for unit, s in self._shares(rank, place).items())

    def _shares(self, rank: int, place: OffloadAmount) -> dict[Unit, float]:
        hidden = self.hidden[rank]
        if place.longest:
            whole = place.amount * len(hidden)
            counted = ((unit, min(1.0, whole - number)) for number, unit in enumerate(hidden))
            return {unit: share for unit, share in counted if share > 1e-6}
        if place.amount <= 0:
            return {}
        if place.amount <= 0.5:
            return {unit: 2 * place.amount * min(1.0, share) for unit, share in hidden.items() if share > 0}
        most = max([1.0, *(1 / share for share in hidden.values() if 0 < share < 1)])
        factor = 1 + (2 * place.amount - 1) * (most - 1)
        return {unit: min(1.0, factor * share) for unit, share in hidden.items() if share > 0}


def _spans(graph: Graph, times: TaskTimes, tasks: range) -> Iterator[tuple[Unit, float, float]]:
    """Yield, for each unit of a rank, the time that hides a copy of it in either direction, and how long it waits."""
    ops = [graph.ops[task] for task in tasks]
    start = {op: times.start[task] for op, task in zip(ops, tasks, strict=True)}
    end = {op: times.end[task] for op, task in zip(ops, tasks, strict=True)}
    readers = {}
    for op in reversed(ops):
        if op.kind in "RBI":
            readers[op.unit] = op  # the first that needs what F saved
    forwards = [op for op in ops if op.kind == "F"]
    reading = sorted(readers.values(), key=start.__getitem__)
    until = {op: end[after] for op, after in pairwise(forwards)}
    since = {op: start[before] for before, op in pairwise(reading)}
    for op in forwards:
        reader = readers[op.unit]
        gap = start[reader] - end[op]
        span = min(until.get(op, inf) - end[op], start[reader] - since.get(reader, -inf), gap / 2)
        yield op.unit, span, gap
