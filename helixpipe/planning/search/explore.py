"""Best first: what promises most is tried, and what stands beside what was good.

A search goes in rounds, of which each is decided by what all earlier ones have found, so that its answer is the same
however many processes make the trials. First of every schedule what is estimated best is tried; then, over all, what is
estimated best, an estimate being corrected by what its schedule's last trial came to. From a trial that is of use lead
steps to its neighbours: more or fewer chunks or stages, other options, more or less saved of memory. What cannot be
among the best by the bounds (`bounds`) is never tried. The search ends when nothing is left that may be of use, or when
it has simulated as much as it may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from helixpipe.planning.search.documents import bounds_of
from helixpipe.planning.search.space import Candidate, ParallelSizes, Question, Saving, Setting
from helixpipe.planning.search.trial import Trial
from helixpipe.planning.search.workers import Crew, TrialRequest

ROUND = 16
"""Candidates of a round."""

SLACK = 0.05
"""The error allowed to an estimate: candidates estimated slower than the last of the best by more are left out."""

BUDGET = 110_000
"""Ops that a search for `FEW_GPUS` simulates, each weighed with its schedule's effort; more GPUs have more sizes and
longer pipelines, so it grows with their number, to the power of `GROWTH`."""

FEW_GPUS = 64
GROWTH = 0.65

PLACED_OPS, OFFLOADED_OPS, OFFLOADED = 12_000, 1_500, 1
"""Limits for programs with recomputation placed in idle time (ops), for those with a search for offloading (ops), and
for how many of the best that recompute have one: both take longer than all else, the second as long as a whole search.
"""

LIGHT = 0.3
"""Part of the memory that weights may take before it is tried from the start to divide them over data-parallel ranks;
of what is good it is tried in any case."""

LENGTHS_OPS = 100
"""Ops that take about as long as finding where one chunk of many ends."""

GRANULARITIES = (None, "without-attention", "full")


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
    simulated. interrupted: by the user. least_bound: the least that any candidate without a trial needs by its bound,
    bytes.
    """

    best: list[TriedCandidate] = field(default_factory=list)
    every: list[TriedCandidate] = field(default_factory=list)
    counts: CandidateCounts = field(default_factory=CandidateCounts)
    interrupted: bool = False
    least_bound: float = inf

    @property
    def least(self) -> TriedCandidate | None:
        """The trial that needs the least memory."""
        return min(self.every, key=lambda each: each.trial.peak, default=None)


class _Promise(NamedTuple):
    """Estimates of a waiting candidate: seconds of its step, expected and at least, and weighted ops of its trial."""

    estimate: float
    bound: float
    cost: float


def budget(gpus: int) -> int:
    """Return the number of ops that a search may simulate."""
    return int(BUDGET * max(gpus / FEW_GPUS, 0.5) ** GROWTH)


class Search:
    """One search. say: called after each round with the share done, 0 to 1, and the best candidate."""

    def __init__(
        self,
        question: Question,
        crew: Crew,
        top: int = 10,
        ops: int | None = None,
        say: Callable[[float, TriedCandidate | None], None] = lambda done, best: None,
    ):
        self.question, self.crew, self.top, self.say = question, crew, top, say
        self.bounds = bounds_of(question)
        self.budget = ops or budget(question.gpus)
        self.outcome = SearchResult()
        self._waiting: dict[Candidate, _Promise] = {}
        self._seen: set[Candidate] = set()
        self._ratio: dict[str, float] = {}
        self._groups: dict[tuple[ParallelSizes, str], TriedCandidate] = {}
        self._spent = 0.0

    def run(self) -> SearchResult:
        """Everything. An interrupt ends it with what was found so far."""
        try:
            self._seed()
            first = True
            while chosen := self._choose(first):
                first = False
                self._learn(chosen, self.crew.run([TrialRequest(each, self._slowest) for each in chosen]))
                self.say(min(self._spent / self.budget, 0.9), next(iter(self._ranked()), None))
            self.outcome.counts.left = len(self._waiting)
            self.outcome.best = self._confirmed()
        except KeyboardInterrupt:
            self.outcome.interrupted = True
            self.outcome.counts.left = len(self._waiting)
            self.outcome.best = self._ranked()[: self.top]
        return self.outcome

    # ---------------------------------------------------------------------------------------------------- what to try

    def _seed(self) -> None:
        """Add the setting estimated best for every division of the GPUs and every schedule."""
        for sizes in self.question.sizes():
            if sizes.parts and self.question.given.parts is None:
                whole = self.bounds.figures(replace(sizes, parts=False), Saving()).static
                if whole / sizes.ranks < LIGHT * self.question.limit:
                    continue
            for setting in self.question.first_settings(sizes):
                self._add(sizes, self._saved(sizes, setting))

    def _saved(self, sizes: ParallelSizes, setting: Setting) -> Setting:
        """Return the setting with the way to save memory that is estimated to be fastest."""
        limit, ways = self.question.limit, []
        for saving in self.question.savings(sizes, setting.chunks):
            own = replace(setting, saving=saving)
            needs = self.bounds.estimated_memory(sizes, own)
            if needs <= limit:
                return own
            ways.append((needs, own))
        return min(ways, key=lambda way: way[0])[1]

    def _add(self, sizes: ParallelSizes, setting: Setting) -> None:
        candidate = Candidate(sizes, setting)
        if candidate in self._seen:
            return
        self._seen.add(candidate)
        self.outcome.counts.candidates += 1
        if (least := self.bounds.memory(sizes, setting.saving)) > self.question.limit:
            self.outcome.counts.by_memory += 1
            self.outcome.least_bound = min(self.outcome.least_bound, least)
            return
        estimate = self.bounds.estimate(sizes, setting)
        self._waiting[candidate] = _Promise(estimate, self.bounds.time(sizes, setting), self._cost(candidate))

    def _choose(self, first: bool) -> list[Candidate]:
        """Return the candidates of the next round; none at the end."""
        slowest = self._slowest
        hopeless = [each for each, promise in self._waiting.items() if promise.bound >= slowest]
        self.outcome.counts.by_time += len(hopeless)
        for candidate in hopeless:
            del self._waiting[candidate]
        # What takes long to simulate has to promise more.
        order = sorted(
            self._waiting, key=lambda each: self._expected(each) * (1 + self._waiting[each].cost / self.budget)
        )
        if first:
            order = list({each.setting.schedule: each for each in reversed(order)}.values())
        chosen: list[Candidate] = []
        cost = 0.0
        for candidate in order:
            own = self._waiting[candidate].cost
            if self._expected(candidate) * (1 - SLACK) >= slowest or self._spent + cost + own > self.budget:
                continue
            chosen.append(candidate)
            cost += own
            if len(chosen) >= ROUND and not first:
                break
        for candidate in chosen:
            del self._waiting[candidate]
        return chosen

    def _expected(self, candidate: Candidate) -> float:
        return self._waiting[candidate].estimate * self._ratio.get(candidate.setting.schedule, 1.0)

    def _ops(self, candidate: Candidate) -> int:
        setting, p = candidate.setting, candidate.sizes.ranks
        if self.question.documents:  # packing them takes about as long as simulating so many
            return 2_000 + p * len(self.question.documents) // candidate.sizes.data
        microbatches = min(self.question.microbatches(candidate.sizes), 6 * p)
        return 2 * p * microbatches * setting.chunks * (setting.virtual_stages or 1)

    def _cost(self, candidate: Candidate) -> float:
        """Return the approximate, weighted ops of the candidate's trial; finding the lengths of chunks counts as
        further ops.
        """
        chunks, effort = candidate.setting.chunks, self.question.catalogue[candidate.setting.schedule].effort
        return self._ops(candidate) * effort + (LENGTHS_OPS * chunks if chunks > 1 else 0)

    # ----------------------------------------------------------------------------------------------- what was found

    @property
    def _slowest(self) -> float:
        ranked = self._ranked()
        return ranked[self.top - 1].trial.step if len(ranked) >= self.top else inf

    def _ranked(self) -> list[TriedCandidate]:
        return sorted(self._groups.values(), key=lambda each: each.trial.step)

    def fits(self, trial: Trial) -> bool:
        hardware = self.question.hardware
        host = hardware.host_memory / hardware.gpus_per_node
        return trial.peak <= self.question.limit and trial.host <= host

    def _learn(self, chosen: Sequence[Candidate], trials: Sequence[Trial]) -> None:
        for candidate, trial in zip(chosen, trials, strict=True):
            sizes, setting = candidate.sizes, candidate.setting
            cut = LENGTHS_OPS * setting.chunks if setting.chunks > 1 else 0
            self._spent += trial.ops * self.question.catalogue[setting.schedule].effort + cut
            if trial.refused:
                self.outcome.counts.refused += 1
                for neighbour in self.question.neighbours(sizes, setting):
                    if neighbour.options != setting.options:
                        self._add(sizes, self._saved(sizes, neighbour))
                continue
            self.outcome.counts.tried += 1
            tried = TriedCandidate(candidate, trial)
            self.outcome.every.append(tried)
            ratio = trial.step / self.bounds.estimate(sizes, setting)
            if not trial.bound:
                self._ratio[setting.schedule] = ratio
            if self.fits(trial) and not trial.bound:
                known = self._groups.get(candidate.group)
                if known is None or trial.step < known.trial.step:
                    self._groups[candidate.group] = tried
            for neighbour in self._beside(tried):
                self._add(sizes, neighbour)
            if self._is_good(tried) and self.question.may_divide_weights(sizes):
                self._add(replace(sizes, parts=not sizes.parts), setting)

    def _beside(self, tried: TriedCandidate) -> Iterator[Setting]:
        """Yield the settings that a trial leads to."""
        sizes, setting = tried.candidate.sizes, tried.candidate.setting
        fits = tried.trial.peak <= self.question.limit
        here = self.bounds.estimated_memory(sizes, setting)
        for saving in self.question.savings(sizes, setting.chunks):
            own = replace(setting, saving=saving)
            needs = tried.trial.peak + self.bounds.estimated_memory(sizes, own) - here
            if _steps(setting.saving, saving) == 1 and (not fits or needs <= 1.1 * self.question.limit):
                yield own
        if self._is_good(tried):
            for neighbour in self.question.neighbours(sizes, setting):
                yield self._saved(sizes, neighbour)

    def _is_good(self, tried: TriedCandidate) -> bool:
        """Whether the candidate fits, and takes hardly longer than the best of its group."""
        known, trial = self._groups.get(tried.candidate.group), tried.trial
        fits = trial.peak <= self.question.limit and not trial.bound
        return fits and known is not None and trial.step <= known.trial.step * (1 + SLACK)

    # -------------------------------------------------------------------------------------------------------- the end

    def _confirmed(self) -> list[TriedCandidate]:
        """Return the best, simulated as a whole, with recomputation in idle time and with offloading if that helps."""
        finalists = self._ranked()[: self.top + self.top // 2]
        recomputing = [each for each in finalists if each.candidate.setting.saving.recompute is not None]
        offloading = recomputing[:OFFLOADED] if self.question.offload else []
        versions = [version for each in finalists for version in self._versions(each.candidate, each in offloading)]
        trials = self.crew.run([TrialRequest(version, kind="whole") for version in versions])
        fastest: dict[tuple[ParallelSizes, str], TriedCandidate] = {}
        for candidate, trial in zip(versions, trials, strict=True):
            if trial.refused or not self.fits(trial):
                continue
            tried = TriedCandidate(candidate, trial)
            self.outcome.every.append(tried)
            known = fastest.get(candidate.group)
            if known is None or trial.step < known.trial.step:
                fastest[candidate.group] = tried
        return sorted(fastest.values(), key=lambda each: each.trial.step)[: self.top]

    def _versions(self, candidate: Candidate, offloading: bool) -> Iterator[Candidate]:
        """Yield the candidate and, if it recomputes, the same with that in idle time, and with offloading instead."""
        setting, ops = candidate.setting, self._ops(candidate)
        yield candidate
        if setting.saving.recompute is None or ops > PLACED_OPS:
            return
        yield replace(candidate, setting=replace(setting, saving=replace(setting.saving, early=True)))
        if offloading and ops <= OFFLOADED_OPS:
            saving = Saving(None, setting.saving.mlp, setting.saving.loss, offload=True, early=True)
            yield replace(candidate, setting=replace(setting, saving=saving))


def _steps(one: Saving, other: Saving) -> int:
    """Return the number of choices in which two savings differ; granularities count by their distance."""
    recompute = abs(GRANULARITIES.index(one.recompute) - GRANULARITIES.index(other.recompute))
    return recompute + (one.mlp != other.mlp) + (one.loss != other.loss)
