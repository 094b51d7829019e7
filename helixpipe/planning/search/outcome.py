"""The result of a search for plans."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from helixpipe.planning.search.space import Candidate, ParallelSizes
from helixpipe.planning.search.trial import Trial


@dataclass(frozen=True)
class TriedCandidate:
    """A candidate and its trial."""

    candidate: Candidate
    trial: Trial


@dataclass
class CandidateCounts:
    """Counts of candidates. candidates: all of them. by_time, by_memory: ruled out by their bounds. refused: shapes
    that the schedule does not take. tried: simulated. left: not tried, as the search had reached its limit.
    """

    candidates: int = 0
    by_time: int = 0
    by_memory: int = 0
    refused: int = 0
    tried: int = 0
    left: int = 0


@dataclass
class SearchResult:
    """The result of a search. best: that fit, the fastest first, one of each group. every: trials of all that were
    simulated. plain: the best of each schedule that is `plain`. open: groups that a further candidate promises to be
    best of. interrupted: by the user. least_bound: the least that
    any candidate without a trial needs by its bound, bytes.
    """

    best: list[TriedCandidate] = field(default_factory=list)
    every: list[TriedCandidate] = field(default_factory=list)
    plain: dict[str, TriedCandidate] = field(default_factory=dict)
    counts: CandidateCounts = field(default_factory=CandidateCounts)
    open: set[tuple[ParallelSizes, str]] = field(default_factory=set)
    interrupted: bool = False
    least_bound: float = inf

    @property
    def least(self) -> TriedCandidate | None:
        """The trial that needs the least memory."""
        return min(self.every, key=lambda each: each.trial.peak, default=None)
