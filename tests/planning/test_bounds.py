"""Bounds of the search for plans: no plan is faster or smaller, and most are hardly slower."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.models import MODELS
from helixpipe.planning.search.bounds import Bounds
from helixpipe.planning.search.space import Candidate, ParallelSizes, Question, Saving
from helixpipe.planning.search.trial import Trials
from schedules import CATALOGUE
from tests.planning.search_questions import SMALL, question

LONG_SEARCHES = ("v-half", "v-min", "adapipe", "helix")
"""Schedules whose programs take long to make; the test of every schedule has them."""

BIG_HEAD = replace(MODELS["weipipe-1024"], layers=11, seq_length=8192, vocab=128256, tied=False)


@cache
def _asked(sequences: int, network: float, big_head: bool) -> Question:
    asked = question(schedules=" ".join(name for name in CATALOGUE if name not in LONG_SEARCHES), gpus=8)
    return replace(
        asked,
        sequences=sequences,
        hardware=replace(asked.hardware, network=network),
        model=BIG_HEAD if big_head else SMALL,
    )


@cache
def _candidates(sequences: int, network: float, big_head: bool) -> tuple[Candidate, ...]:
    """Every division of the GPUs and every schedule, with all numbers of stages and chunks, before what is saved."""
    asked = _asked(sequences, network, big_head)
    return tuple(
        Candidate(sizes, start)
        for sizes in asked.sizes()
        for starts in asked.starts(sizes)
        for start in starts
        if start.chunks <= 8
    )


SAVINGS = (
    *(Saving(), Saving("without-attention"), Saving("full"), Saving("full", recomputed_layers=1), Saving(loss=4096)),
    Saving("full", loss=4096),
)


@settings(max_examples=60)
@given(
    st.sampled_from((8, 16, 24)), st.sampled_from((1e9, 2e11)), st.booleans(), st.integers(0), st.sampled_from(SAVINGS),
    st.booleans(),
)  # fmt: skip
def test_no_plan_is_faster_or_smaller(
    sequences: int, network: float, big_head: bool, which: int, saving: Saving, evenly: bool
) -> None:
    """Random plans on fast and slow networks, with heads that are nothing beside the layers and heads that are not."""
    asked = _asked(sequences, network, big_head)
    candidates = _candidates(sequences, network, big_head)
    sizes, setting = candidates[which % len(candidates)].sizes, candidates[which % len(candidates)].setting
    if evenly and False in asked.divisions(CATALOGUE[setting.schedule], sizes, setting.virtual_stages):
        setting = setting.evenly
    setting = replace(setting, saving=saving)
    found = Trials(asked).whole(Candidate(sizes, setting))
    bounds = Bounds(asked)
    assert found.refused or bounds.time(sizes, setting) <= found.step * (1 + 1e-9)
    assert found.refused or bounds.memory(sizes, saving, setting) <= found.peak
    assert found.refused or bounds.memory(sizes, saving) <= found.peak


def test_a_tied_weight_counts_once_where_both_ends_are_on_one_rank() -> None:
    """`zbv` has them on the first rank: nothing is summed, so only gradients and optimizer come after its work."""
    asked = _asked(8, 2e11, False)
    assert asked.model.tied
    sizes = ParallelSizes(1, 4, 2, 1)
    setting = next(start.evenly for starts in asked.starts(sizes, "zbv") for start in starts if start.chunks == 1)
    found, bounds = Trials(asked).whole(Candidate(sizes, setting)), Bounds(asked)
    assert 0.99 * found.step < bounds.time(sizes, setting) <= found.step * (1 + 1e-9)


@settings(max_examples=40)
@given(st.sampled_from((1e10, 2e11)), st.booleans(), st.integers(0), st.sampled_from(SAVINGS))
def test_few_microbatches_promise_no_less(network: float, big_head: bool, which: int, saving: Saving) -> None:
    """Of random plans with weights in parts or several stages a rank: what a step of 96 sequences is taken to need, by
    its first microbatches, is not less than its bound."""
    asked = _asked(96, network, big_head)
    candidates = [each for each in _candidates(96, network, big_head) if _in_parts_or_interleaved(each)]
    chosen = candidates[which % len(candidates)]
    candidate = replace(chosen, setting=replace(chosen.setting, saving=saving))
    found, bound = Trials(asked).quick(candidate, inf), Bounds(asked).time(candidate.sizes, candidate.setting)
    assert found.refused or bound <= found.step * (1 + 1e-9)


def _in_parts_or_interleaved(candidate: Candidate) -> bool:
    return candidate.sizes.parts or (candidate.setting.virtual_stages or 1) > 1


def test_idle_time_that_later_microbatches_fill_is_not_saved_by_each() -> None:
    """With five stages of 5 to 7 layers a rank the first ten microbatches fill up what the warm-up left idle: the later
    of these make the step longer by less than their work, all others by all of it."""
    model = replace(MODELS["qwen3-32b"], seq_length=4096)
    asked = question(gpus=16, sequences=64, hardware=HARDWARE["h100"], model=model)
    sizes = ParallelSizes(2, 2, 2, 2)
    starts = (start for starts in asked.starts(sizes, "interleaved-1f1b") for start in starts)
    setting = next(start for start in starts if start.virtual_stages == 5)
    trials, candidate = Trials(asked), Candidate(sizes, setting)
    few, whole = trials.quick(candidate, inf), trials.whole(candidate)
    assert whole.whole and not few.whole
    assert Bounds(asked).time(sizes, setting) <= few.step == pytest.approx(whole.step, rel=5e-3)


@pytest.mark.parametrize(("name", "most"), [("1f1b", 1.02), ("gpipe", 1.02), ("interleaved-1f1b", 1.15)])
@pytest.mark.parametrize("balanced", [False, True])
def test_a_pipeline_takes_hardly_longer_than_its_bound(name: str, most: float, balanced: bool) -> None:
    """Warm-up and cool-down are in it, and a head as heavy as layers."""
    asked = replace(_asked(16, 2e11, True), model=replace(BIG_HEAD, layers=16))
    sizes = ParallelSizes(1, 1, 4, 2)
    setting = replace(next(iter(asked.starts(sizes, name)))[0], balanced=balanced)
    found = Trials(asked).whole(Candidate(sizes, setting))
    assert found.step <= most * Bounds(asked).time(sizes, setting)


def test_a_slow_link_is_counted() -> None:
    """Where messages take longer than ops, a pipeline takes hardly longer than its busiest link."""
    asked = question(gpus=8, sequences=64)
    asked = replace(asked, hardware=replace(asked.hardware, gpus_per_node=1, network=1e9, adapters=1))
    sizes = ParallelSizes(1, 1, 4, 2)
    setting = next(iter(asked.starts(sizes, "gpipe")))[0]
    found, bound = Trials(asked).whole(Candidate(sizes, setting)), Bounds(asked).time(sizes, setting)
    assert bound <= found.step <= 1.45 * bound


@pytest.mark.parametrize("name", ["1f1b", "zb1p"])
def test_estimates_count_the_way_there_and_back(name: str) -> None:
    """Where a rank has memory for p microbatches and messages take longer than ops, a step takes nearly twice its
    bound: as many begin in the time that one is away."""
    asked = question(gpus=4, sequences=64)
    asked = replace(asked, hardware=replace(asked.hardware, gpus_per_node=1, network=1e9, adapters=1))
    sizes = ParallelSizes(1, 1, 4, 1)
    setting = next(iter(asked.starts(sizes, name)))[0]
    found, bounds = Trials(asked).whole(Candidate(sizes, setting)), Bounds(asked)
    assert bounds.time(sizes, setting) < 0.6 * found.step
    assert bounds.estimate(sizes, setting) == pytest.approx(found.step, rel=0.05)


@pytest.mark.parametrize("gathered_once", [False, True])
def test_gathers_and_scatters_are_counted_where_they_take_longest(gathered_once: bool) -> None:
    """Of weights in parts over a slow network, where the last rank's ops share a gather with each neighbour."""
    asked = question(gpus=8, sequences=64, model=replace(SMALL, layers=2, seq_length=2048))
    asked = replace(asked, hardware=replace(asked.hardware, nvlink=1e9, network=1e9))
    sizes = ParallelSizes(1, 1, 2, 4, parts=True, gathered_once=gathered_once)
    setting = next(iter(asked.starts(sizes, "1f1b")))[0]
    found, bound = Trials(asked).whole(Candidate(sizes, setting)), Bounds(asked).time(sizes, setting)
    assert bound <= found.step <= 1.5 * bound


def test_most_plans_take_hardly_longer_than_their_bounds() -> None:
    """Half of the plans, those with gathers and scatters of weights among them, take at most 15 % longer."""
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for network in (1e10, 2e11):
        asked = _asked(16, network, False)
        bounds, trials = Bounds(asked), Trials(asked)
        for sizes, setting in [(each.sizes, each.setting) for each in _candidates(16, network, False)[::37]]:
            found = trials.whole(Candidate(sizes, setting))
            if not found.refused:
                ratios[sizes.parts].append(found.step / bounds.time(sizes, setting))
    assert median(ratios[False]) < 1.15 and median(ratios[True]) < 1.15
    assert min(len(each) for each in ratios.values()) > 10


def test_ranks_share_what_a_schedule_divides_itself() -> None:
    """With one microbatch a rank of adapipe keeps its layers' part of it, and reduces its own gradients."""
    asked = question(gpus=8, sequences=2, model=replace(SMALL, layers=32, seq_length=8192))
    asked = replace(asked, hardware=replace(asked.hardware, nvlink=1e9, network=1e9))
    sizes = ParallelSizes(1, 1, 4, 2)
    setting = next(iter(asked.starts(sizes, "adapipe")))[0]
    found, bounds = Trials(asked).whole(Candidate(sizes, setting)), Bounds(asked)
    assert not found.refused
    assert found.step / 3 < bounds.time(sizes, setting) <= found.step
    assert found.peak / 3 < bounds.memory(sizes, setting.saving, setting) <= found.peak
