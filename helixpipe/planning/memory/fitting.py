"""Programs that a search finds, held to what memory there is: by fewer microbatches in flight, by recomputing, or both.

A search keeps to a limit by starting forwards later, and then ranks wait; recomputing takes time of its own and lets
the order be. Which costs less depends on the model, its sequences and the limit, so all are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from helixpipe.common.collector import collector_paused
from helixpipe.planning.memory.chunk_recompute import recompute_chunks
from helixpipe.planning.memory.early import busy, makespan, peak_memory, place_early
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.planning.memory.recompute_choice import CHOICES, recomputing
from helixpipe.program.costs import Costs
from helixpipe.program.program import Program
from helixpipe.program.stages import Stage

Limits = Sequence[float] | None
"""The memory that each rank may use in all, in the costs' unit."""

Find = Callable[[tuple[Stage, ...], Limits], Program]
"""The fastest program that a search finds of these stages, within limits as far as it can tell what is needed."""

TRIES = 3
"""Searches with an estimate of the room, before one with room for a single microbatch."""

TOLERANCE = 1e-9
"""Part of a limit that rounding may exceed."""

EVERYWHERE = tuple(RecomputeOptions(granularity) for granularity in ("selective", "without-attention", "full"))
"""The recomputation that is tried on all stages."""

PART = 0.5
"""The share of each stage's layers for which any of `CHOICES` may be recomputed."""


@dataclass(frozen=True)
class Fitting:
    """A search that keeps programs within the memory limit.

    find, stages: the search, and its input. ranks: of its programs. costs: of times and memory. limit: of every rank,
    in the costs' unit of memory; None: there is none. early: whether recomputation runs before the gradient arrives
    where memory allows.
    """

    find: Find
    stages: tuple[Stage, ...]
    ranks: int
    costs: Costs
    limit: float | None
    early: bool = True

    def ordered(self) -> Program:
        """Return the program that fits with fewer microbatches in flight alone; with one at a time if nothing fits."""
        with collector_paused():
            return self._ordered(self.stages)

    def fastest(self) -> Program:
        """Return the order without a limit where that fits. Else the fastest that fits, as it runs, of: an order of
        fewer microbatches in flight; the order without a limit, with as few layers recomputed, unit by unit, as fit;
        orders for stages that recompute what one of the flags says, or for which part of the layers does. Where nothing
        fits, what needs least. The stages must recompute nothing yet.
        """
        with collector_paused():
            free = self.find(self.stages, None)
            best, rating = free, (self._excess(free), inf)
            if rating[0] <= 0:
                return free
            for least, candidate in self._candidates(free):
                if not rating[0] and least >= rating[1] * (1 - TOLERANCE):
                    continue
                built = candidate()
                program = place_early(built, self.costs, self.limit) if self.early else built
                own = max(self._excess(program), 0.0), makespan(program, self.costs)
                if own < rating:
                    best, rating = program, own
            return best

    def _candidates(self, free: Program) -> Iterator[tuple[float, Callable[[], Program]]]:
        """Yield candidates, each with a lower bound of its time: that of the free order, or the work of its busiest
        rank.
        """
        fewest = makespan(free, self.costs)
        yield fewest, partial(self._ordered, self.stages)
        yield fewest, lambda: recompute_chunks(free, self.costs, self.limit or inf, exact=False).program
        everywhere = [options.stages(self.stages) for options in EVERYWHERE]
        parts = [tuple(recomputing(stage, runs, PART) for stage in self.stages) for runs in CHOICES[1:]]
        for stages in (*everywhere, *parts):
            least = max(busy(replace(free, stages=stages), self.costs))
            yield max(least, fewest), partial(self._ordered, stages)

    def _ordered(self, stages: tuple[Stage, ...]) -> Program:
        """Searched for again with less room on ranks that need more than the limit."""
        if self.limit is None:
            return self.find(stages, None)
        allowed = [self.limit] * self.ranks
        for _ in range(TRIES):
            program = self.find(stages, allowed)
            excess = [max(0.0, peak - self.limit * (1 + TOLERANCE)) for peak in peak_memory(program, self.costs)]
            if not any(excess):
                return program
            allowed = [room - more for room, more in zip(allowed, excess, strict=True)]
        return self.find(stages, [-inf] * self.ranks)

    def _excess(self, program: Program) -> float:
        """Return how far the fullest rank is above the limit; negative if it is below."""
        if self.limit is None:
            return -inf
        return max(peak_memory(program, self.costs)) - self.limit * (1 + TOLERANCE)
