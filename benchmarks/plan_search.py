"""The search of `helixpipe plan` beside trying everything, simulated: a table of docs/planning.md.

    make bench-plan-search ARGS="[--cases 1 7] [--jobs 8] [--output docs/planning.md]"

For each case of benchmarks/data/plan_search.toml the search runs as `plan` does, without offloading, over the schedules
of `SCHEDULES`. Then every other candidate of the same space is tried that could be faster or as fast: all divisions of
the GPUs, options, chunks, stages, divisions of layers and measures for memory, but for those whose lower bounds of time
or memory (tests/planning/test_bounds.py) say that they are slower or do not fit. Of those that recompute the form with
recomputation in idle time is tried, too. All figures come from the cost model (docs/costs.md).
Every case is printed; the page has a row a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import process_time
from typing import NamedTuple

from benchmarks import data
from benchmarks.report import Outcome, Page, markdown
from benchmarks.simulated import Jobs, in_processes
from helixpipe.common.flags import option
from helixpipe.costs.hardware import GIB, find_hardware
from helixpipe.costs.models import Layout, find_model
from helixpipe.costs.verdict import tensor_limit
from helixpipe.planning.search.bounds import Bounds
from helixpipe.planning.search.explore import Search
from helixpipe.planning.search.space import Candidate, Question
from helixpipe.planning.search.trial import Trials
from helixpipe.planning.search.workers import SerialCrew
from schedules import CATALOGUE

SCHEDULES = (
    "none", "1f1b", "interleaved-1f1b", "chimera", "hanayo", "zb1p", "zbv", "seq1f1b", "seq1f1b-interleaved", "wzb1",
)  # fmt: skip
"""Of every kind some, so that everything can be tried: the others' programs take longer to find, or are alike."""

EARLY = 1.05
"""How much slower a candidate that recomputes may be for recomputation in idle time to be tried."""

HEADS = ("model", "GPUs", "tokens", "sequences", "found, s", "best, s", "gap", "tried by the search", "candidates",
         "tried of them", "seconds")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A question. network: Gb/s of a node through one adapter; 0: the hardware's. memory: GiB of tensors that a
    GPU may hold; 0: as many as fit."""

    model: str
    hardware: str
    gpus: int
    seq_length: int
    sequences: int
    network: float = 0
    memory: float = 0

    @property
    def question(self) -> Question:
        hardware = find_hardware(self.hardware)
        if self.network:
            hardware = replace(hardware, network=self.network * 1e9 / 8, adapters=1)
        model = replace(find_model(self.model), seq_length=self.seq_length)
        layout = Layout(sequence_parallel=True)
        limit = tensor_limit(hardware.memory, self.memory * GIB if self.memory else None)
        return Question(
            CATALOGUE, SCHEDULES, model, hardware, self.gpus, self.sequences, layout, limit, offload=False
        )  # fmt: skip


CASES = data.rows("plan_search.toml", "case", Case)


@dataclass(frozen=True)
class Options(Jobs, Page):
    """Cases by their number, from 1."""

    cases: tuple[int, ...] = option(
        tuple(range(1, len(CASES) + 1)), "Numbers of the cases (default: all).", nargs="+", at_least=1,
        at_most=len(CASES),
    )  # fmt: skip


class Compared(NamedTuple):
    """Steps in seconds; the search's trials and its processor time; all candidates, and how many of them were tried."""

    found: float
    best: float
    trials: int
    seconds: float
    candidates: int
    tried: int

    @property
    def gap(self) -> float:
        """The share by which the search's step is longer than the best."""
        return self.found / self.best - 1


def every(question: Question) -> Iterator[Candidate]:
    """Yield all that there is to choose, apart from offloading and recomputation in idle time."""
    for sizes in question.sizes():
        for setting in question.every_setting(sizes):
            yield Candidate(sizes, setting)


def compared(case: Case) -> Compared:
    """Return what the search finds and what there is to find."""
    question = case.question
    begun = process_time()
    outcome = Search(question, SerialCrew(question)).run()
    seconds = process_time() - begun
    found = best = outcome.best[0].trial.step
    bounds, trials, candidates, tried = Bounds(question), Trials(question), 0, 0
    known = {each.candidate for each in outcome.every}
    for candidate in every(question):
        candidates += 1
        candidate = replace(candidate, setting=bounds.settled(candidate.sizes, candidate.setting))
        sizes, setting = candidate.sizes, candidate.setting
        if candidate in known or bounds.memory(sizes, setting.saving, setting) > question.limit:
            continue
        if bounds.time(sizes, setting) >= best:
            continue
        tried += 1
        known.add(candidate)
        trial = trials.quick(candidate, EARLY * best)
        if trial.refused or trial.bound or trial.peak > question.limit or trial.step >= EARLY * best:
            continue
        early = [replace(setting, saving=replace(setting.saving, early=True))] * (setting.saving.recompute is not None)
        for each in (setting, *early):
            whole = trials.whole(replace(candidate, setting=each))
            if not whole.refused and whole.peak <= question.limit:
                best = min(best, whole.step)
    return Compared(found, best, outcome.counts.tried, seconds, candidates, tried)


def run(options: Options) -> Outcome:
    cases = [CASES[number - 1] for number in options.cases]
    results = in_processes(compared, cases, options, str)
    rows = [line(case, result) for case, result in zip(cases, results, strict=True)]
    gaps = [result.gap for result in results]
    tried, candidates, seconds = (
        span([round(getattr(result, each)) for result in results]) for each in ("trials", "candidates", "seconds")
    )
    verdict = (
        f"{len(cases)} cases of {len({case.model for case in cases})} models: the search simulates {tried} of "
        f"{candidates} candidates in {seconds} s. What it finds is at most {100 * max(gaps):.1f} % slower than the "
        f"best there is, {100 * sum(gaps) / len(gaps):.2f} % on average."
    )
    return Outcome("\n".join([*markdown(HEADS, rows, "llrrrrrrrrr"), "", verdict]), {"plan-search": [verdict]})


def span(values: Sequence[int]) -> str:
    least, most = min(values), max(values)
    return str(least) if least == most else f"{least}–{most}"


def line(case: Case, result: Compared) -> tuple[str, ...]:
    network = f", {case.network:g} Gb/s" if case.network else ""
    memory = f", {case.memory:g} GiB" if case.memory else ""
    return (
        case.model, f"{case.gpus} {case.hardware}{network}{memory}", str(case.seq_length), str(case.sequences),
        f"{result.found:.4g}", f"{result.best:.4g}", f"{100 * result.gap:.1f} %",
        str(result.trials), str(result.candidates), str(result.tried), f"{result.seconds:.1f}",
    )  # fmt: skip
