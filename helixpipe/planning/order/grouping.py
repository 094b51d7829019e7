"""Finds which chains of chunks run together, and in which order, by simulation under a memory limit.

A group whose longest chain has N chunks keeps N - 1 chunks more than 1F1B on every rank. Chains sorted by their number
of chunks and run in groups of similar length keep that many only as long as it takes, which leaves the other groups
more to keep instead of recomputing it (Wang et al., InfiniPipe, 2025). The groups are found by dynamic programming:
the best for the chains up to some place is the least of the best up to an earlier place, what a group of those between
has to recompute, and what it costs to go over to it. The paper does not say which group comes first. Here it is the one
of the longest chains: then a rank that goes over to the next has backwards to spare, and idles for none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import NamedTuple

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.lower import scheduled
from helixpipe.planning.catalogue import Shape
from helixpipe.planning.memory.chunk_recompute import Estimates, recompute_chunks
from helixpipe.planning.memory.early import peak_memory
from helixpipe.planning.memory.recompute_needs import LayerSizes
from helixpipe.planning.memory.sharding import shared_out
from helixpipe.planning.order.pipeline_times import PipelineTimes
from helixpipe.program.costs import Costs
from helixpipe.program.program import Op, Program

Groups = tuple[tuple[int, ...], ...]
"""The microbatches of each group, in the order in which they run."""

MOST_RUNS = 6
"""Runs of chains of as many chunks that groups are made of; their possible groups are half the square of that."""

NEGLIGIBLE = 1e-3
"""Part of a step's time that a change of groups may cost where nothing says what it is worth."""


class Chains(NamedTuple):
    """An order. ahead: forwards that a rank runs ahead for each rank downstream."""

    groups: Groups
    ahead: int


Orders = Callable[[Chains], Sequence[Sequence[int]]]
"""The order of each rank, n for F of the workload's unit number n and ~n for its B, without the microbatches that are
in no group."""


def best_chains(
    name: str, orders: Orders, shape: Shape, grouping: bool, sort: bool, ahead: int | None, recompute: bool
) -> Program:
    """Return the fastest order that fits, by simulation, with what it recomputes, as a program of that name that has a
    stage a rank.

    grouping: whether chains are sorted by their numbers of chunks and grouped. sort: whether those of as many are
    sorted by time. ahead: see `Chains`; None: 1, or 2 where that is faster and within the memory limit. recompute:
    whether layers may be recomputed to keep to the limit.
    """
    search = _GroupingSearch(name, orders, shape, recompute and shape.memory_limit is not None)
    runs = search.runs(grouping, sort)
    first = ahead or 1
    tried = [Chains((sum(runs, ()),), first)]
    if len(runs) > 1:
        tried += [Chains(tuple(runs), first), Chains(search.grouped(_joined(runs), first), first)]
    chosen = search.best(tried)
    if ahead is None and shape.memory_limit is not None and shape.ranks > 1:
        chosen = search.best([chosen, chosen._replace(ahead=2)])
    return search.program(chosen)


def _joined(runs: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Join the smallest runs with their neighbours until there are at most `MOST_RUNS`."""
    runs = list(runs)
    while len(runs) > MOST_RUNS:
        at = min(range(1, len(runs)), key=lambda at: len(runs[at - 1]) + len(runs[at]))
        runs[at - 1 : at + 1] = [runs[at - 1] + runs[at]]
    return runs


class _GroupingSearch:
    """The search for chains. costs: of the shape, or of times by hand if it has none. limit: None if memory does not
    matter.
    """

    def __init__(self, name: str, orders: Orders, shape: Shape, recompute: bool):
        self.name, self.orders, self.recompute = name, orders, recompute
        self.stages, self.workload = shape.even_stages(shape.ranks), shape.workload
        self.costs: Costs = shape.costs or PieceTimes()
        self.limit = shape.memory_limit
        self._in_parts = partial(shared_out, ranks=shape.sharded, gathered_once=shape.gathered_once)
        self._sizes = LayerSizes()
        self._estimates = Estimates(self.make(Chains((tuple(range(len(self.workload))),), 1)), self.costs, self._sizes)
        self._times = PipelineTimes(self.stages, self.workload, self.costs)
        self._rated: dict[Chains, tuple[bool, float]] = {}
        self._known_to_fit: dict[tuple[tuple[int, ...], int], bool] = {}

    def make(self, chains: Chains) -> Program:
        ranks = (
            tuple([forward[number] if number >= 0 else backward[~number] for number in order])
            for order, (forward, backward) in zip(self.orders(chains), self._ops, strict=True)
        )
        return Program(self.name, self.stages, tuple(ranks), self.workload)

    @cached_property
    def _ops(self) -> list[list[list[Op]]]:
        """F and B of each rank's units, by number."""
        units = list(self.workload.units())
        return [[[Op(kind, rank, *unit) for unit in units] for kind in "FB"] for rank in range(len(self.stages))]

    def runs(self, grouping: bool, sort: bool) -> list[tuple[int, ...]]:
        """Return runs of microbatches by their numbers of chunks, the most first, and among those the ones of the
        longest chunks; all in their own order if they are not grouped.
        """
        numbers = range(len(self.workload))
        counts = [len(chunks) for chunks in self.workload.microbatches]
        if not grouping:
            return [tuple(numbers)]
        times = self._row_times() if sort else [0.0] * len(counts)
        order = sorted(numbers, key=lambda number: (-counts[number], -times[number]))
        return [tuple(group) for _, group in groupby(order, key=counts.__getitem__)]

    def _row_times(self) -> list[float]:
        """Forward and backward of each microbatch in the first stage, to nine digits: equal work is equal."""
        sums = [0.0] * len(self.workload)
        for of_kind in (self._times.forward[0], self._times.backward[0]):
            for (number, _), time in zip(self._times.units, of_kind, strict=True):
                sums[number] += time
        return [float(f"{time:.9g}") for time in sums]

    def grouped(self, runs: list[tuple[int, ...]], ahead: int) -> Groups:
        """Join the runs to groups by dynamic programming: dp[i] = min over k < i of dp[k], what the group of the runs
        from k to i - 1 has to recompute by the linear relaxation, and what the change to it costs by simulation.
        """
        order = sum(runs, ())
        whole = self._makespan(Chains((order,), ahead))

        def change(at: int) -> float:
            parted = Chains((sum(runs[:at], ()), sum(runs[at:], ())), ahead)
            return self._makespan(parted) - whole

        changes = [0.0, *map(change, range(1, len(runs)))]
        if not self.recompute:  # a change is worth less memory
            changes = [cost - NEGLIGIBLE * whole for cost in changes]
        cheapest: list[tuple[float, Groups]] = [(0.0, ())]
        for end in range(1, len(runs) + 1):
            cheapest.append(
                min(
                    (
                        cheapest[start][0] + changes[start] + self._recomputing(order, group, ahead),
                        (*cheapest[start][1], group),
                    )
                    for start in range(end)
                    for group in [sum(runs[start:end], ())]
                )
            )
        return cheapest[-1][1]

    def _recomputing(self, order: tuple[int, ...], group: tuple[int, ...], ahead: int) -> float:
        """Return the least time that a group by itself spends on recomputing. order: of all microbatches."""
        if not self.recompute or self.limit is None or self._as_one_fits(order, ahead):
            return 0.0
        return self._estimates.least(self.make(Chains((group,), ahead)), self.limit)

    def _as_one_fits(self, order: tuple[int, ...], ahead: int) -> bool:
        """Whether microbatches in this order need no recomputation, by estimate, in one group. Then they need none in
        any groups: before each backward, one group has run the forwards that several have run, or more."""
        assert self.limit is not None
        if (order, ahead) not in self._known_to_fit:
            whole = self.make(Chains((order,), ahead))
            self._known_to_fit[order, ahead] = self._estimates.fits(whole, self.limit)
        return self._known_to_fit[order, ahead]

    def best(self, tried: list[Chains]) -> Chains:
        """Return the fastest of those that fit, or of all if none does; among about equally fast ones that with the
        most groups, which keeps least.
        """
        rated = [(self._rate(chains), chains) for chains in dict.fromkeys(tried)]
        if len(rated) == 1:
            return tried[0]
        least = min(rating for rating, _ in rated)
        about = [chains for (over, time), chains in rated if over == least[0] and time <= least[1] * (1 + NEGLIGIBLE)]
        return max(about, key=lambda chains: (len(chains.groups), -chains.ahead))

    def _rate(self, chains: Chains) -> tuple[bool, float]:
        """Return whether the program is over the limit, and its time."""
        if chains not in self._rated:
            if self.limit is None or (self.recompute and self._as_one_fits(sum(chains.groups, ()), chains.ahead)):
                self._rated[chains] = False, self._makespan(chains)
            elif self.recompute:
                recomputation = self._estimates.recomputation(self.make(chains), self.limit)
                self._rated[chains] = not recomputation.fits, scheduled(recomputation.program, self.costs).makespan
            else:
                over = max(peak_memory(self.make(chains), self.costs)) > self.limit
                self._rated[chains] = over, self._makespan(chains)
        return self._rated[chains]

    def _makespan(self, chains: Chains) -> float:
        return self._times.makespan(self.orders(chains))

    def program(self, chains: Chains) -> Program:
        """Return the program with as little recomputation as can be found."""
        program = self.make(chains)
        if self.limit is None or not self.recompute:
            return program
        return recompute_chunks(program, self.costs, self.limit, self._sizes, as_trained=self._in_parts).program
