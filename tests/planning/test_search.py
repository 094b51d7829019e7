"""The search for plans: its bounds hold, few microbatches tell of many, and it finds what trying everything finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixpipe.common.errors import UserError
from helixpipe.costs.models import AUTO, HALVES, Layout
from helixpipe.planning.search.bounds import Bounds
from helixpipe.planning.search.documents import bounds_of, trials_of
from helixpipe.planning.search.explore import Search, corrected
from helixpipe.planning.search.flags import setting_flags, sizes_flags
from helixpipe.planning.search.formulas import value
from helixpipe.planning.search.outcome import SearchResult, TriedCandidate
from helixpipe.planning.search.recomputed_layers import with_fewest_layers
from helixpipe.planning.search.space import Candidate, FixedChoices, ParallelSizes, Question, Saving, Setting
from helixpipe.planning.search.terms import NAMES, AtSize, Terms, compared, smaller, taking_over, terms_of
from helixpipe.planning.search.trial import Trial, Trials
from helixpipe.planning.search.workers import Processes, SerialCrew, TrialRequest
from schedules import CATALOGUE
from tests.planning.search_questions import SMALL, question

PLAIN = "1f1b gpipe interleaved-1f1b seq1f1b weipipe none"


def search(asked: Question, **options: int) -> SearchResult:
    return Search(asked, SerialCrew(asked), **options).run()


@pytest.mark.parametrize("name", [name for name, schedule in CATALOGUE.items() if not schedule.one_rank])
def test_no_step_is_faster_or_smaller_than_the_bounds(name: str) -> None:
    """Of several shapes, with and without recomputation, chunks, and weights in parts."""
    asked = question(schedules=name, gpus=8)
    bounds, trials, seen = Bounds(asked), Trials(asked), 0
    every = ParallelSizes(2, 1, 2, 2, parts=True), ParallelSizes(1, 1, 4, 2), ParallelSizes(1, 2, 2, 2)
    for sizes in every[:1] if CATALOGUE[name].effort > 4 else every:
        (first,) = asked.first_settings(sizes)
        for chunks in asked.chunk_counts(CATALOGUE[name], sizes)[:2]:
            for saving in (Saving(), Saving("full", loss=4096)):
                setting = replace(first, chunks=chunks, saving=saving)
                found = trials.whole(Candidate(sizes, setting))
                if found.refused:
                    continue
                seen += 1
                assert bounds.time(sizes, setting) <= found.step * (1 + 1e-9)
                assert bounds.memory(sizes, saving) <= found.peak
    assert seen


def test_the_bounds_hold_with_offloading_and_slow_collectives() -> None:
    """Chunks that are on the host leave the device, and every rank reduces and updates its own share."""
    asked = question(2, 5.3, "sppo", 1, model=replace(SMALL, seq_length=65536))
    slow = question(schedules="1f1b", gpus=8, sequences=8)
    slow = replace(slow, hardware=replace(slow.hardware, nvlink=1e9))
    cases = (
        (asked, ParallelSizes(1, 1, 2, 1), {"chunks": 16, "saving": Saving(offload=True, mlp=1024, loss=1024)}),
        (slow, ParallelSizes(1, 1, 2, 4), {}),
        (replace(slow, schedules=("chimera",)), ParallelSizes(1, 1, 2, 4), {}),
    )
    for case, sizes, changed in cases:
        setting = replace(next(case.first_settings(sizes)), **changed)
        found, bounds = Trials(case).whole(Candidate(sizes, setting)), Bounds(case)
        assert not found.refused
        assert bounds.time(sizes, setting) <= found.step * (1 + 1e-9)
        assert bounds.memory(sizes, setting.saving) <= found.peak
        assert bounds.memory(sizes, setting.saving, setting) <= found.peak


def test_bounds_of_documents_hold() -> None:
    asked = question(4, schedules="seq1f1b none", sequences=6, documents=(8000, 300, 2000, 4000, 100, 700))
    bounds, trials = bounds_of(asked), trials_of(asked)
    whole = ParallelSizes(1, 1, 2, 2), ParallelSizes(2, 1, 2, 1), ParallelSizes(1, 2, 1, 2)
    for sizes in (*whole, replace(whole[0], parts=True)):
        for setting in asked.first_settings(sizes):
            found = trials.whole(Candidate(sizes, setting))
            assert not found.refused and found.whole
            assert trials.program(Candidate(sizes, setting)).sharded == (2 if sizes.parts else 1)
            assert 0.1 * found.step < bounds.time(sizes, setting) <= found.step
            assert bounds.memory(sizes, setting.saving) <= found.peak
            assert sum(terms_of(trials, Candidate(sizes, setting))) == pytest.approx(found.step, rel=1e-6)


def test_the_bounds_are_not_idle() -> None:
    """What has no bubble and one rank takes what they say."""
    asked, sizes = question(gpus=1, sequences=2), ParallelSizes(1, 1, 1, 1)
    setting = Setting("none", CATALOGUE["none"].options())
    found = Trials(asked).whole(Candidate(sizes, setting))
    assert found.step == pytest.approx(Bounds(asked).time(sizes, setting), rel=1e-6)
    kept = Bounds(asked).memory(sizes, setting.saving)
    assert 0.5 * found.peak < kept < found.peak  # without the head's logits


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "seq1f1b-interleaved", "helix", "weipipe-naive", "hanayo"])
def test_few_microbatches_tell_of_many(name: str) -> None:
    """Steps that repeat themselves are known from few microbatches, also where the number leaves a rest."""
    asked = question(schedules=name, sequences=46 if name in ("1f1b", "gpipe") else 48)
    sizes = ParallelSizes(1, 1, 4, 1)
    (setting,) = asked.first_settings(sizes)
    trials, candidate = Trials(asked), Candidate(sizes, setting)
    few, whole = trials.quick(candidate, 1e9), trials.whole(candidate)
    assert whole.whole and not few.whole and few.ops < whole.ops
    assert few.step == pytest.approx(whole.step, rel=5e-3)
    assert few.peak == pytest.approx(whole.peak, rel=2e-2)
    useless = trials.quick(candidate, whole.step / 2)
    assert useless.bound and whole.step / 2 <= useless.step <= whole.step * (1 + 1e-9)


def test_few_trials_correct_an_estimate_upwards_by_a_part() -> None:
    """Of one, two and three trials that took twice and more a half, two thirds and three quarters count, as a power;
    one that took less than estimated counts whole."""
    assert corrected(10.0, []) == 10.0
    found = [corrected(10.0, ratios) for ratios in ([2.0], [2.0, 3.0], [3.0, 2.0, 4.0])]
    assert found == pytest.approx([10 * 2 ** (1 / 2), 10 * 2 ** (2 / 3), 10 * 2 ** (3 / 4)])
    assert corrected(10.0, [0.8]) == corrected(10.0, [1.5, 0.8]) == pytest.approx(8.0)


def everything(asked: Question) -> float:
    """The least step of all that there is to choose, that fits."""
    trials = Trials(asked)
    found = (
        trials.whole(Candidate(sizes, setting)) for sizes in asked.sizes() for setting in asked.every_setting(sizes)
    )
    return min(each.step for each in found if not each.refused and each.peak <= asked.limit)


@pytest.mark.parametrize(("limit", "sequences"), [(70.0, 8), (3.0, 4)])
def test_as_good_as_trying_everything(limit: float, sequences: int) -> None:
    """Within 2 % of the best of all; with less memory than the fastest needs, too."""
    asked = question(2, limit, "1f1b interleaved-1f1b seq1f1b none", sequences, offload=False)
    best = search(asked, top=3).best
    assert best[0].trial.step <= 1.02 * everything(asked)
    assert all(each.trial.peak <= asked.limit for each in best)
    assert all(one.trial.step <= other.trial.step for one, other in pairwise(best))
    assert len({each.candidate.group for each in best}) == len(best)


def test_flags_say_all_that_was_chosen() -> None:
    """And nothing where it is training's default, but for what training would choose otherwise."""
    schedule, options = CATALOGUE["sppo"], CATALOGUE["sppo"].options()
    plain = setting_flags(schedule, Setting("sppo", options))
    assert plain == ["--pipeline-schedule sppo", "--offload-activations off", "--loss-chunk-size 0"]
    saving = Saving("full", mlp=64, loss=32)
    late = setting_flags(schedule, Setting("sppo", replace(options, sppo_ahead=1), 8, None, saving))
    assert late == [
        "--pipeline-schedule sppo", "--sppo-ahead 1", "--pipe-sp-splits 8", "--recompute-granularity full",
        "--no-recompute-early", "--offload-activations off", "--chunk-size 64", "--loss-chunk-size 32",
    ]  # fmt: skip
    early = setting_flags(schedule, Setting("sppo", options, saving=replace(saving, early=True)))
    assert "--no-recompute-early" not in early and "--recompute-granularity full" in early
    some = setting_flags(schedule, Setting("sppo", options, saving=replace(saving, recomputed_layers=3)))
    assert "--recompute-method block --recompute-num-layers 3" in some


ALONE = 1.02
"""The largest ratio allowed of a printed step time to the time that a search of those sizes and that schedule finds."""


@pytest.mark.parametrize(
    ("ops", "schedules", "sequences"),
    [
        (8_000, "sppo", 1),
        pytest.param(3_000, "sppo seq1f1b", 1, marks=pytest.mark.thorough),
        pytest.param(8_000, "sppo 1f1b", 2, marks=pytest.mark.thorough),
        pytest.param(None, "seq1f1b sppo none", 1, marks=pytest.mark.thorough),
        pytest.param(None, "seq1f1b zb1p none", 4, marks=pytest.mark.thorough),
    ],
)
def test_a_row_is_what_its_sizes_give_alone(ops: int | None, schedules: str, sequences: int) -> None:
    """Or it is marked, where a search is short; with all its trials, no row sought alone is faster than the first."""
    asked = question(8, 30, schedules, sequences, model=replace(SMALL, seq_length=131072))
    found = Search(asked, SerialCrew(asked), 4, ops=ops).run()
    for each in found.best:
        sizes = each.candidate.sizes
        given = FixedChoices(sizes.tensor, sizes.context, sizes.ranks)
        alone = replace(asked, schedules=(each.candidate.setting.schedule,), given=given)
        (best,) = Search(alone, SerialCrew(alone), 1).run().best
        assert each.trial.step <= best.trial.step * ALONE or each.candidate.group in found.open
        assert ops is not None or found.best[0].trial.step <= best.trial.step * ALONE
    assert ops is None or found.open


def test_what_is_given_is_not_searched() -> None:
    given = FixedChoices(tensor=2, context=1, ranks=2, parts=False, chunks=2, mlp=0, loss=2048)
    (best,) = search(question(schedules="seq1f1b", given=given), top=1).best
    assert best.candidate.sizes == ParallelSizes(2, 1, 2, 1)
    assert (best.candidate.setting.chunks, best.candidate.setting.saving) == (2, Saving(None, 0, 2048))


def test_sizes_divide_gpus_model_and_batch() -> None:
    every = list(question(4, sequences=2, schedules="1f1b").sizes())
    assert {(each.tensor, each.context, each.ranks, each.data) for each in every if not each.parts} == {
        (1, 1, 2, 2), (1, 1, 4, 1), (1, 2, 1, 2), (1, 2, 2, 1), (1, 4, 1, 1), (2, 1, 1, 2), (2, 1, 2, 1), (2, 2, 1, 1),
        (4, 1, 1, 1),
    }  # fmt: skip
    assert all(each.data * each.context > 1 for each in every if each.parts)


def test_less_memory_is_paid_for_with_time() -> None:
    """What fits into less saves more, and is slower."""
    (free,) = search(question(1, schedules="none", sequences=2), top=1).best
    tight = question(1, 6.0, "none", 2, offload=False)
    (best,) = search(tight, top=1).best
    assert best.trial.peak <= tight.limit < free.trial.peak and best.trial.step > free.trial.step
    assert best.candidate.setting.saving != free.candidate.setting.saving
    nothing = search(question(1, 0.2, "none", 2), top=1)
    assert not nothing.best and nothing.counts.by_memory + nothing.counts.tried > 0


def test_offloading_is_tried_where_another_of_the_group_recomputes_nothing() -> None:
    """As the one with weights in parts does, which fits and is faster."""
    asked = question(schedules="zb2p")
    looking = Search(asked, SerialCrew(asked), top=1)
    sizes = ParallelSizes(1, 2, 2, 1)
    setting = Setting("zb2p", CATALOGUE["zb2p"].options(), saving=Saving("full", loss=4096))
    recomputing = TriedCandidate(Candidate(sizes, setting), Trial(9e9, (1.0,)))
    parts = TriedCandidate(Candidate(replace(sizes, parts=True), replace(setting, saving=Saving())), Trial(8e9, (1.0,)))
    looking.outcome.every = [parts, recomputing]
    looking._groups = {parts.candidate.group: parts}
    saving = Saving(loss=4096, offload=True, early=True)
    assert looking._offloading() == [Candidate(sizes, replace(setting, saving=saving))]
    looking.question = replace(asked, offload=False)
    assert looking._offloading() == []


@given(st.sampled_from(("full", "without-attention")), st.sampled_from((2, 4)), st.integers(1, 9))
def test_the_fewest_layers_that_fit_are_recomputed(granularity: str, ranks: int, least: int) -> None:
    """Of each stage, whatever must be recomputed; nothing is proposed where all layers must, or a layer is all."""
    asked = question(4)
    own = Candidate(ParallelSizes(1, 1, ranks, 4 // ranks), Setting("1f1b", None, saving=Saving(granularity)))
    nothing = replace(own, setting=replace(own.setting, saving=Saving()))
    alone = replace(own, sizes=ParallelSizes(1, 1, 8, 1))
    tried: list[int] = []

    def fit(mixed: Sequence[Candidate]) -> list[bool]:
        layers = [each.setting.saving.recomputed_layers for each in mixed]
        tried.extend(layers)
        return [each >= least for each in layers]

    found = with_fewest_layers([own, nothing, alone], Bounds(asked), fit)
    ways = [Saving(way, recomputed_layers=least) for way in dict.fromkeys((granularity, "full"))]
    assert [each.setting.saving for each in found] == ways * (least < asked.model.layers // ranks)
    assert len(tried) <= 2 * len(ways) and all(each.sizes == own.sizes for each in found)


def test_no_more_is_recomputed_than_has_to_be() -> None:
    """With room for more than what all layers recomputing leave, some keep their activations, which is faster."""
    asked = question(4, 6.0, "1f1b", 8, offload=False, given=FixedChoices(1, 1, 2, mlp=0, loss=2048))
    in_all = replace(asked, given=replace(asked.given, recompute="without-attention"))
    outcome, (full,) = search(asked, top=1), search(in_all, top=1).best
    (best,) = outcome.best
    saving = best.candidate.setting.saving
    assert saving.recompute == "without-attention" and 0 < saving.recomputed_layers < 4
    assert full.trial.peak < best.trial.peak <= asked.limit and best.trial.step < 0.97 * full.trial.step
    assert outcome.plain["1f1b"].trial.step <= best.trial.step  # what is compared with may do so, too


def test_a_search_with_little_to_simulate_ends_soon() -> None:
    asked = question(schedules=PLAIN)
    short, long = search(asked, top=6, ops=1000), search(asked, top=6)
    assert short.counts.tried < long.counts.tried and short.counts.left > 0
    assert short.best and long.best[0].trial.step <= short.best[0].trial.step


def test_every_schedule_is_looked_at() -> None:
    """However little the search may simulate; and no candidate of the first round is tried twice."""
    asked = question(schedules="1f1b gpipe seq1f1b wzb1 wzb2 weipipe helix adapipe sppo zb1p none", sequences=4)
    outcome = search(asked, ops=10)
    tried = [each.candidate for each in outcome.every]
    assert {each.setting.schedule for each in tried} == set(asked.schedules)


def test_a_time_limit_ends_the_search() -> None:
    asked = question(schedules=PLAIN)
    short = Search(asked, SerialCrew(asked), 3, seconds=1e-6).run()
    assert not short.interrupted and short.counts.tried == 0 and not short.best
    long = Search(asked, SerialCrew(asked), 3, ops=3000, seconds=1e6).run()
    assert long.best == search(asked, top=3, ops=3000).best


def test_what_megatron_has_is_found_too() -> None:
    """The best of 1F1B and of its interleaved form is among what is tried, though something else is printed."""
    asked = question(schedules=PLAIN)
    outcome = search(asked, top=1)
    for name in ("1f1b", "interleaved-1f1b"):
        alone = search(replace(asked, schedules=(name,)), top=1).best[0].trial.step
        assert outcome.plain[name].candidate.setting.schedule == name
        assert outcome.best[0].trial.step <= outcome.plain[name].trial.step <= 1.02 * alone


def test_interrupted_it_gives_what_it_has() -> None:
    asked = question(schedules=PLAIN)
    alone, rounds = SerialCrew(asked), []

    class Impatient(SerialCrew):
        def run(self, jobs: list[TrialRequest]) -> list[object]:  # type: ignore[override]
            rounds.append(len(jobs))
            if len(rounds) == 2:
                raise KeyboardInterrupt
            return alone.run(jobs)

    outcome = Search(asked, Impatient(asked), 3).run()
    assert outcome.interrupted and outcome.best and len(rounds) == 2


def test_processes_find_the_same() -> None:
    asked = question(2, schedules="1f1b gpipe seq1f1b", sequences=4)
    crew = Processes(asked, 2)
    try:
        beside = Search(asked, crew, 3).run()
    finally:
        crew.close()
    assert beside.best == search(asked, top=3).best


def test_a_process_that_is_gone_is_told() -> None:
    crew = Processes(question(2, schedules="1f1b", sequences=4), 1)
    try:
        (process,) = crew._processes
        process.kill()
        process.join()
        with pytest.raises(UserError, match=r"a process of the search has ended .*: try fewer --jobs"):
            Search(question(2, schedules="1f1b", sequences=4), crew, 3).run()
    finally:
        crew.close()


def test_terms_add_up_to_the_step() -> None:
    asked, sizes = question(8, sequences=8), ParallelSizes(2, 1, 2, 2)
    trials = Trials(asked)
    for saving in (Saving(), Saving("full")):
        candidate = Candidate(sizes, Setting("1f1b", CATALOGUE["1f1b"].options(), saving=saving))
        terms = terms_of(trials, candidate)
        assert terms.step == pytest.approx(trials.whole(candidate).step, rel=1e-6)
        assert min(terms) >= 0 and min(terms.computing, terms.inside, terms.bubble, terms.gradients) > 0
        assert (terms.recomputing > 0) == (saving.recompute is not None)
    slow = replace(asked, hardware=replace(asked.hardware, latency=1e-2))
    assert terms_of(Trials(slow), candidate).messages > 10 * terms.messages


def test_why_one_is_slower_and_what_takes_over() -> None:
    fast = Terms(4.0, 0.0, 1.0, 0.1, 0.5, 0.2, 0.1)
    slow = fast._replace(bubble=1.5, inside=0.5)
    difference = compared(fast, slow)
    assert difference.longer == pytest.approx(0.5)
    assert difference.terms[:2] == ((NAMES["bubble"], 1.0), (NAMES["inside"], -0.5))
    candidate = Candidate(ParallelSizes(1, 1, 1, 1), Setting("none", None))
    over = taking_over([AtSize(8, None, None), AtSize(16, candidate, fast), AtSize(32, candidate, slow)])
    assert over == {
        "recomputation and cuts": None, "TP and CP collectives": 16, "messages": None, "bubble": 32,
        "DP reduction": None, "optimizer": None,
    }  # fmt: skip
    assert [each.gpus for each in smaller(question(16))] == [4, 8, 16]


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("(p-1)(F+B)/k", 9.0), ("3(p-1)(F-A)p/L", 13.5), ("2(p-1)max(F,B)/v", 3.0), ("min(p-r, m)", 4.0),
        ("m, or 3m/16", 8.0), ("at most p", 4.0), ("the limit", None), ("(p-1)x", None), ("1f1b's", None),
    ],
)  # fmt: skip
def test_formulas_of_the_catalogue(formula: str, expected: float | None) -> None:
    names = {"p": 4, "k": 2, "v": 4, "m": 8, "L": 4, "F": 2, "B": 4, "A": 0.5, "r": 0}
    names["B"] = 4 if "max" not in formula else 2
    found = value(formula, names)
    assert found == (None if expected is None else pytest.approx(expected))


def test_the_best_are_tried_in_pairs_too() -> None:
    """Where that is the run's to choose and weights are whole; the faster is what counts, and its flags say so."""
    layout = Layout(sequence_parallel=True, overlap_tp_comm=AUTO)
    asked = question(8, schedules="seq1f1b", sequences=4, layout=layout, given=FixedChoices(tensor=4, ranks=2))
    found = search(asked, top=1)
    tried = [each for each in found.every if each.candidate.sizes.in_pairs]
    (best,) = found.best
    assert tried and all(asked.costs(each.candidate.sizes).layout.pairs for each in tried)
    whole = [each.trial.step for each in found.every if each.trial.whole]
    assert best.trial.step == min(whole)
    assert "--overlap-tp-comm pairs" in sizes_flags(asked, tried[0].candidate.sizes)
    assert not asked.may_pair(ParallelSizes(4, 1, 2, 2, parts=True)) and not asked.may_pair(ParallelSizes(1, 1, 8, 1))
    assert asked.may_pair(ParallelSizes(1, 2, 2, 2))
    assert not replace(asked, layout=replace(layout, overlap_tp_comm=HALVES)).may_pair(ParallelSizes(4, 1, 2, 1))


MIXED = replace(SMALL, experts=6, mixed=(1,), topk=2, expert_ffn=SMALL.ffn)


def test_experts_are_shared_out_over_as_many_ranks_as_can_have_equally_many() -> None:
    """Of 6 experts, over ranks that share the other weights, in parts too, not beside documents of all lengths; or,
    whole beside tensor parallelism, over its ranks too."""
    asked = question(8, model=MIXED)
    found = {(each.data * each.context, each.parts, each.experts) for each in asked.sizes() if each.ranks == 1}
    assert {experts for holders, _, experts in found if holders == 4} == {1, 2}
    assert {experts for holders, parts, experts in found if parts and holders == 4} == {1, 2}
    whole = {(each.tensor, each.experts) for each in asked.sizes() if each.expert_tensor}
    assert whole == {(2, 2), (4, 2), (8, 2)}
    split = replace(asked, given=FixedChoices(2, experts=2, expert_tensor=1)).sizes()
    assert {(each.tensor, each.expert_tensor) for each in split} == {(2, 1)}
    assert {each.experts for each in question(8).sizes()} == {1}
    assert {each.experts for each in replace(asked, documents=(64, 64)).sizes()} == {1}
    assert {each.experts for each in replace(asked, given=FixedChoices(experts=2)).sizes()} == {2}


def test_a_plan_with_experts_holds_to_the_bounds_and_says_their_ranks() -> None:
    wide = replace(MIXED, expert_ffn=16 * SMALL.ffn)  # whose gradients take longer to sum than tokens to travel
    asked = question(8, schedules="1f1b", model=wide, given=FixedChoices(1, 1, 4, parts=False))
    best = search(asked).best[0].candidate
    assert best.sizes.experts > 1
    assert f"--expert-model-parallel-size {best.sizes.experts}" in sizes_flags(asked, best.sizes)
    bounds, trials = Bounds(asked), Trials(asked)
    for sizes in (
        ParallelSizes(1, 1, 4, 2),
        ParallelSizes(1, 1, 4, 2, experts=2),
        ParallelSizes(1, 1, 4, 2, experts=2, parts=True),
        ParallelSizes(2, 1, 4, 1, experts=2, expert_tensor=1),
    ):
        (setting,) = asked.first_settings(sizes)
        found = trials.whole(Candidate(sizes, setting))
        assert bounds.time(sizes, setting) <= found.step * (1 + 1e-9)
        assert bounds.memory(sizes, setting.saving) <= found.peak
