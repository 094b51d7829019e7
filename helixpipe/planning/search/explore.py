"""Best first: what promises most is tried, and what stands beside what was good.

A search goes in rounds, of which each is decided by what all earlier ones have found, so that its answer is the same
however many processes make the trials, unless it has a time limit. First of every schedule what is estimated best is
tried; then, over all, what is estimated best, an estimate being corrected by the least that its schedule's trials came
to. Divisions of the GPUs join a few at a time, those first that have least work a rank. From a trial that is of use
lead steps to its neighbours: more or fewer chunks or stages, layers divided otherwise, other options, more or less
saved of memory. What cannot be among the best by the bounds (`bounds`) is never tried. The search ends when nothing is
left that may be of use, or when it has simulated as much, or taken as long, as it may.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from time import monotonic
from typing import NamedTuple

from helixpipe.planning.search.documents import bounds_of
from helixpipe.planning.search.outcome import SearchResult, TriedCandidate
from helixpipe.planning.search.recomputed_layers import with_fewest_layers
from helixpipe.planning.search.space import Candidate, ParallelSizes, Question, Saving, Setting
from helixpipe.planning.search.trial import Trial, cut_alike
from helixpipe.planning.search.workers import Crew, TrialRequest

ROUND, OF_A_GROUP = 16, 3
"""Candidates of a round, and how many of them may be of one group: so that all groups come near their best."""

FURTHER = 0.5
"""Part of the budget that is added at the end to finish the groups that are shown: a group is finished when none of its
candidates is estimated faster than its best."""

SLACK = 0.05
"""The error allowed to an estimate: candidates estimated slower than the last of the best by more are left out."""

GROUP_SLACK = 0.01
"""The same beside the best of a group, whose estimates err alike."""

BUDGET = 600_000
"""Ops that a search for `FEW_GPUS` simulates, each weighed with its schedule's effort; more GPUs have more sizes and
longer pipelines, so it grows with their number, to the power of `GROWTH`: their bounds leave less to try."""

FEW_GPUS = 64
GROWTH = 0.3
LEAST = 0.25
"""Part of the budget that the fewest GPUs have; below `FEW_GPUS` it goes with their number."""

PLACED_OPS, OFFLOADED_OPS, OFFLOADED = 12_000, 1_500, 1
"""Limits for programs in pairs or with recomputation placed in idle time (ops), for those with a search for offloading
(ops), and for how many of the best that recompute have one: all take longer than all else, the last as long as a whole
search.
"""

LIGHT = 0.3
"""Part of the memory that weights may take before it is tried from the start to divide them over data-parallel ranks;
of what is good it is tried in any case."""

LENGTHS_OPS = 100
"""Ops that take about as long as finding where one chunk of many ends."""

LAST_PART = 0.25
"""Part of a time limit that is left for simulating what was found as a whole."""

SIZES = 32
"""Divisions of the GPUs that join the search before each of its rounds, while they promise to be of use."""

FAMILY_SHARE = 0.05
"""Part of the budget that the first trial of a schedule may cost, where any of its candidates costs less."""

PLAIN_ROUNDS, PLAIN_ROUND = 4, 6
"""Rounds, of so many candidates, in which the best of each schedule that Megatron-LM has is sought after the search."""

LOOKS = 3
"""Candidates of a schedule that are looked at, whatever they promise, while shapes are refused."""

GRANULARITIES = (None, "without-attention", "full")


class _Promise(NamedTuple):
    """Estimates of a waiting candidate: seconds of its step, expected and at least, and weighted ops of its trial."""

    estimate: float
    bound: float
    cost: float


def budget(gpus: int) -> int:
    """Return the number of ops that a search may simulate."""
    size = gpus / FEW_GPUS
    return int(BUDGET * (size**GROWTH if size > 1 else max(size, LEAST)))


class Search:
    """One search. ops: that it may simulate; seconds: that it may take, None: as long as that takes. say: called after
    each round with the share done, 0 to 1, and the best candidate."""

    def __init__(
        self,
        question: Question,
        crew: Crew,
        top: int = 10,
        ops: int | None = None,
        say: Callable[[float, TriedCandidate | None], None] = lambda done, best: None,
        seconds: float | None = None,
    ):
        self.question, self.crew, self.top, self.say = question, crew, top, say
        self.bounds = bounds_of(question)
        self.budget = ops or budget(question.gpus)
        self.outcome = SearchResult()
        self._begun, self._seconds = monotonic(), seconds
        self._sizes: list[tuple[float, ParallelSizes]] = []
        self._waiting: dict[Candidate, _Promise] = {}
        self._seen: set[Candidate] = set()
        self._ratios: dict[tuple[str, bool, bool], list[float]] = defaultdict(list)
        self._groups: dict[tuple[ParallelSizes, str], TriedCandidate] = {}
        self._looks = Counter[str]()
        self._cut: set[tuple[ParallelSizes, int]] = set()
        self._spent = 0.0

    def run(self) -> SearchResult:
        """Everything. An interrupt ends it with what was found so far."""
        try:
            self._sizes = self._promising_sizes()
            while self._time_left() and (chosen := self._choose()):
                self._learn(chosen, self.crew.run([TrialRequest(each, self._slowest) for each in chosen]))
                self.say(min(self._done, 0.9), next(iter(self._ranked()), None))
            self._finish()
            slowest = self._slowest
            self.outcome.open = {each.group for each in self._waiting if self._promises(each, slowest)}
            self.outcome.counts.left = len(self._waiting)
            self._find_plain()
            self.outcome.best = self._confirmed()
        except KeyboardInterrupt:
            self.outcome.interrupted = True
            self.outcome.counts.left = len(self._waiting)
            self.outcome.best = self._ranked()[: self.top]
        return self.outcome

    # --------------------------------------------------------------------------------------------------- how much more

    @property
    def _elapsed(self) -> float:
        return monotonic() - self._begun

    def _time_left(self, kept: float = LAST_PART) -> bool:
        """Whether there is time for a further round. kept: part of the time that is for what comes after."""
        return self._seconds is None or self._elapsed < (1 - kept) * self._seconds

    @property
    def _done(self) -> float:
        """The part of the search that is done, at least."""
        return max(self._spent / self.budget, 0.0 if self._seconds is None else self._elapsed / self._seconds)

    def _affordable(self) -> float:
        """Return the weighted ops that a round may come to."""
        left = self.budget - self._spent
        if self._seconds is None or not self._spent:
            return left
        seconds = (1 - LAST_PART) * self._seconds - self._elapsed
        return min(left, seconds * self._spent / self._elapsed)

    # ---------------------------------------------------------------------------------------------------- what to try

    def _promising_sizes(self) -> list[tuple[float, ParallelSizes]]:
        """Return the divisions of the GPUs that may fit, each with the least seconds of its step, the least last."""
        sizes = []
        for each in self.question.sizes():
            if each.parts and self.question.given.parts is None:
                whole = self.bounds.figures(replace(each, parts=False), Saving()).static
                if whole / each.ranks < LIGHT * self.question.limit:
                    continue
            saving = self.question.savings(each, 1)
            if (least := self.bounds.memory(each, saving[-1])) > self.question.limit:
                self.outcome.counts.candidates += 1
                self.outcome.counts.by_memory += 1
                self.outcome.least_bound = min(self.outcome.least_bound, least)
                continue
            work = self.bounds.figures(each, saving[0]).least_work * self.bounds.share(each)
            sizes.append((work / each.ranks, each))
        return sorted(sizes, reverse=True)

    def _seed(self, slowest: float, *names: str) -> None:
        """Add the first setting of every schedule, or each of the names, for some more divisions of the GPUs."""
        for _ in range(SIZES):
            if not self._sizes or self._sizes[-1][0] >= slowest:
                return
            _, sizes = self._sizes.pop()
            for setting in self.question.first_settings(sizes, *names):
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
        candidate = Candidate(sizes, self.bounds.settled(sizes, setting))
        if candidate in self._seen:
            return
        self._seen.add(candidate)
        self.outcome.counts.candidates += 1
        if (least := self.bounds.memory(sizes, setting.saving, setting)) > self.question.limit:
            self.outcome.counts.by_memory += 1
            self.outcome.least_bound = min(self.outcome.least_bound, least)
            self._add_evenly(candidate)
            return
        estimate = self.bounds.estimate(sizes, setting)
        self._waiting[candidate] = _Promise(estimate, self.bounds.time(sizes, setting), self._cost(candidate))

    def _add_evenly(self, candidate: Candidate) -> None:
        """Add the candidate with equally many layers in each stage, where a balanced division needs too much memory."""
        sizes, setting = candidate.sizes, candidate.setting
        schedule = self.question.catalogue[setting.schedule]
        if setting.balanced and False in self.question.divisions(schedule, sizes, setting.virtual_stages):
            self._add(sizes, self._saved(sizes, setting.evenly))

    def _choose(self) -> list[Candidate]:
        """Return the candidates of the next round; none at the end."""
        slowest = self._slowest
        self._seed(slowest)
        hopeless = [each for each, promise in self._waiting.items() if promise.bound >= self._useful(each, slowest)]
        for candidate in hopeless:  # but those among which the best of the plain schedules is sought later
            if not self.question.catalogue[candidate.setting.schedule].plain:
                self.outcome.counts.by_time += 1
                del self._waiting[candidate]
        # What takes long to simulate has to promise more.
        order = sorted(
            self._waiting, key=lambda each: self._expected(each) * (1 + self._waiting[each].cost / self.budget)
        )
        chosen = self._one_of_each(order) or self._affordable_ones(order, slowest, self._affordable())
        for candidate in chosen:
            del self._waiting[candidate]
        return chosen

    def _one_of_each(self, order: Sequence[Candidate]) -> list[Candidate]:
        """Return of every schedule without a trial the first that costs little, or else what costs least."""
        little = FAMILY_SHARE * self.budget
        chosen: dict[str, Candidate] = {}
        for candidate in order:
            if self._looks[candidate.setting.schedule] >= LOOKS:
                continue
            known = chosen.setdefault(candidate.setting.schedule, candidate)
            cost, known_cost = self._waiting[candidate].cost, self._waiting[known].cost
            if known_cost > little and cost < known_cost:
                chosen[candidate.setting.schedule] = candidate
        return list(chosen.values())

    def _useful(self, candidate: Candidate, slowest: float) -> float:
        """Return the step below which a candidate changes the result: the best of its group, at most `slowest`."""
        known = self._groups.get(candidate.group)
        return slowest if known is None else min(slowest, known.trial.step)

    def _promises(self, candidate: Candidate, slowest: float) -> bool:
        """Whether a waiting candidate may change the result."""
        expected, bound = self._expected(candidate), self._waiting[candidate].bound
        useful = self._useful(candidate, slowest)
        return bound < useful and expected * (1 - SLACK) < slowest and expected * (1 - GROUP_SLACK) < useful

    def _affordable_ones(self, order: Sequence[Candidate], slowest: float, affordable: float) -> list[Candidate]:
        chosen: list[Candidate] = []
        cost, groups = 0.0, Counter[tuple[ParallelSizes, str]]()
        for candidate in order:
            own, group = self._waiting[candidate].cost, candidate.group
            if cost + own > affordable or groups[group] >= OF_A_GROUP or not self._promises(candidate, slowest):
                continue
            chosen.append(candidate)
            groups[group] += 1
            cost += own
            if len(chosen) >= ROUND:
                break
        return chosen

    def _expected(self, candidate: Candidate) -> float:
        """Return the estimate, corrected by what its kind's trials came to."""
        return corrected(self._waiting[candidate].estimate, self._ratios[_kind(candidate)])

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
        effort = self.question.catalogue[candidate.setting.schedule].effort
        return self._ops(candidate) * effort + self._cutting(candidate)

    def _cutting(self, candidate: Candidate) -> int:
        """Return the ops that finding the lengths of the candidate's chunks counts as; 0 once they are known."""
        chunks = candidate.setting.chunks
        return 0 if chunks == 1 or cut_alike(candidate) in self._cut else LENGTHS_OPS * chunks

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
            cut = self._cutting(candidate)
            self._cut.add(cut_alike(candidate))
            self._looks[setting.schedule] += 1 if trial.refused else LOOKS
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
                self._ratios[_kind(candidate)].append(ratio)
            if self.fits(trial) and not trial.bound:
                known = self._groups.get(candidate.group)
                if known is None or trial.step < known.trial.step:
                    self._groups[candidate.group] = tried
            if trial.peak > self.question.limit:
                self._add_evenly(candidate)
            for neighbour in self._beside(tried):
                self._add(sizes, neighbour)
            if self._is_good(tried):
                for other in self.question.otherwise_shared(sizes):
                    self._add(other, setting)

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

    def _finish(self) -> None:
        """Go on with groups that may be shown until none of their candidates promises to be their best: first with
        those that promise to gain most.
        """
        while self._time_left():
            slowest = self._slowest
            self._seed(slowest)
            order = sorted(self._waiting, key=lambda each: self._expected(each) / self._useful(each, slowest))
            left = (1 + FURTHER) * self.budget - self._spent
            chosen = self._affordable_ones(order, slowest, left)
            if not chosen:
                return
            for candidate in chosen:
                del self._waiting[candidate]
            self._learn(chosen, self.crew.run([TrialRequest(each, self._useful(each, slowest)) for each in chosen]))

    def _find_plain(self) -> None:
        """Go on with each of Megatron-LM's schedules until none of its candidates promises to be its best."""
        names = [name for name in self.question.schedules if self.question.catalogue[name].plain]
        for name in names:
            for _ in range(PLAIN_ROUNDS):
                best = self._best_of(name)
                fastest = inf if best is None else best.trial.step
                self._seed(fastest, *names)
                own = [each for each in self._waiting if each.setting.schedule == name]
                own = [each for each in own if self._expected(each) < fastest and self._waiting[each].bound < fastest]
                chosen = sorted(own, key=self._expected)[:PLAIN_ROUND]
                if not chosen or not self._time_left():
                    break
                for candidate in chosen:
                    del self._waiting[candidate]
                self._learn(chosen, self.crew.run([TrialRequest(each, fastest) for each in chosen]))
            best = self._best_of(name)
            if best is not None:
                self.outcome.plain[name] = best

    def _best_of(self, schedule: str) -> TriedCandidate | None:
        own = (each for (_, name), each in self._groups.items() if name == schedule)
        return min(own, key=lambda each: each.trial.step, default=None)

    def _confirmed(self) -> list[TriedCandidate]:
        """Return the best, simulated as a whole, in pairs, with fewer layers recomputed, with recomputation in idle
        time and with offloading if that helps."""
        finalists = self._ranked()[: self.top + self.top // 2]
        versions = [version for each in finalists for version in self._versions(each.candidate)]
        mixed = self._mixed([each.candidate for each in (*finalists, *self.outcome.plain.values())])
        versions += [version for candidate in mixed for version in self._versions(candidate)]
        versions += self._offloading()
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
            name = candidate.setting.schedule
            if candidate in mixed and trial.step < self.outcome.plain.get(name, tried).trial.step:
                self.outcome.plain[name] = tried
        return sorted(fastest.values(), key=lambda each: each.trial.step)[: self.top]

    def _mixed(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return those that recompute with only as many layers recomputed as they must."""
        if self.question.given.recompute is not None or self.question.documents:
            return []
        small = [each for each in dict.fromkeys(candidates) if self._ops(each) <= PLACED_OPS]

        def fit(mixed: Sequence[Candidate]) -> list[bool]:
            return [self.fits(trial) for trial in self.crew.run([TrialRequest(each) for each in mixed])]

        return with_fewest_layers(small, self.bounds, fit)

    def _offloading(self) -> list[Candidate]:
        """Return those that recompute to fit and are expected to be fastest with offloading instead: also where
        another of their group, which recomputes nothing, was faster."""
        expected: dict[Candidate, float] = {}
        for candidate, trial in ((each.candidate, each.trial) for each in self.outcome.every):
            sizes, setting = candidate.sizes, candidate.setting
            recomputes = setting.saving.recompute is not None and self.fits(trial)
            if not (self.question.offload and recomputes and self._ops(candidate) <= OFFLOADED_OPS):
                continue
            kept = Saving(None, setting.saving.mlp, setting.saving.loss)
            estimate = self.bounds.estimate(sizes, replace(setting, saving=kept))
            seconds = corrected(estimate, self._ratios[_kind(candidate)])
            if seconds < self._slowest:
                offloading = replace(kept, offload=True, early=True)
                expected[Candidate(sizes, replace(setting, saving=offloading))] = seconds
        order = sorted(expected, key=lambda each: expected[each])
        for candidate in order[OFFLOADED:]:
            if expected[candidate] < self._groups[candidate.group].trial.step:
                self.outcome.open.add(candidate.group)
        return order[:OFFLOADED]

    def _versions(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield the candidate, the same in pairs, and if it recomputes with that in idle time."""
        setting, ops = candidate.setting, self._ops(candidate)
        yield candidate
        if self.question.may_pair(candidate.sizes) and ops <= PLACED_OPS:
            yield replace(candidate, sizes=replace(candidate.sizes, in_pairs=True))
        if setting.saving.recompute is None or ops > PLACED_OPS:
            return
        yield replace(candidate, setting=replace(setting, saving=replace(setting.saving, early=True)))


def corrected(estimate: float, ratios: Sequence[float]) -> float:
    """Return the estimate times the least of the ratios of trials to their estimates. Of one above 1, which further
    trials may lower, only a part counts, the larger the more trials there were."""
    least = min(ratios, default=1.0)
    return estimate * least ** (len(ratios) / (len(ratios) + 1) if least > 1 else 1)


def _kind(candidate: Candidate) -> tuple[str, bool, bool]:
    """Return what candidates have in common whose estimates are wrong alike."""
    return candidate.setting.schedule, candidate.sizes.parts, candidate.sizes.gathered_once


def _steps(one: Saving, other: Saving) -> int:
    """Return the number of choices in which two savings differ; granularities count by their distance."""
    recompute = abs(GRANULARITIES.index(one.recompute) - GRANULARITIES.index(other.recompute))
    return recompute + (one.mlp != other.mlp) + (one.loss != other.loss)
