"""The number of slices: the best of what is tried, within the memory; token capacity against the sweep; baselines."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.common.errors import UserError
from helixpipe.lowering.lower import lower
from helixpipe.lowering.validate_workload import check_workload
from helixpipe.planning.documents.baselines import concatenated, packed_whole, padded
from helixpipe.planning.documents.chunk_times import ChunkTimes
from helixpipe.planning.documents.document_steps import fits, over_capacity, token_capacity, tokens_in_flight
from helixpipe.planning.documents.packing import Packing, balanced_mesh, pack
from helixpipe.planning.documents.tuning import (
    CLOSE,
    SPREAD_OF_TIME,
    ChunkCapacity,
    PackingOptions,
    Predicted,
    choices,
    estimate,
    make_packing,
    tuned,
)
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.program.stages import even_stages
from helixpipe.simulate.simulator import simulate
from schedules import Shape, build
from tests.planning.packing_costs import MODEL_COSTS
from tests.planning.test_packing import times_of

LENGTHS = [400, 170, 90, 60] + [3 + 11 * number % 40 for number in range(30)]


def test_no_candidate_is_better():
    times = times_of(pair=0.01)
    found = tuned(LENGTHS, times, 3)
    every = {choice: make_packing(LENGTHS, times, choice, PackingOptions()) for choice in choices(LENGTHS, 3)}
    tried, least = [each.choice for each in found.tried], estimate(found.packing, 3)
    assert tried == [choice for choice in every if choice in tried] and 1 < len(tried) < len(every)
    assert all(estimate(packing, 3) > CLOSE * least for choice, packing in every.items() if choice not in tried)
    assert estimate(found.packing, 3) == min(estimate(packing, 3) for packing in every.values())
    assert found.packing in every.values() and found.packing.mesh.slices not in (1, 32)  # neither end is best


def test_simulated_ones_decide():
    times = times_of(pair=0.01)
    asked: list[Packing] = []

    def predict(packing: Packing) -> float:
        asked.append(packing)
        return inf if len(asked) < 3 else 100.0 - len(asked)

    found = tuned(LENGTHS, times, 3, predict=predict)
    estimates = [estimate(packing, 3) for packing in asked]
    assert len(asked) == 3 and estimates == sorted(estimates)  # the likeliest first, until one of three fits
    assert found.packing is asked[2]


def test_what_does_not_fit_is_left_out():
    times = times_of(pair=0.01)
    best = tuned(LENGTHS, times, 3).packing
    limit = tokens_in_flight(best.workload, 3)[0] - 1
    found = tuned(LENGTHS, times, 3, fits=lambda packing: fits(packing.workload, [limit] * 3))
    assert tokens_in_flight(found.packing.workload, 3)[0] <= limit
    assert estimate(found.packing, 3) >= 0.99 * estimate(best, 3)  # more room for tokens is nearly always better
    assert found.packing.mesh.tokens == max(found.packing.mesh.lengths) < best.mesh.tokens
    with pytest.raises(UserError, match=r"none of 1, 2, 3, .* slices of the longest document, 400 tokens"):
        tuned(LENGTHS, times, 3, fits=lambda packing: False)


def test_choices():
    assert choices([4000] * 3, 4, alignment=8, least=1000) == [
        ChunkCapacity(1),
        ChunkCapacity(2),
        ChunkCapacity(3),
        ChunkCapacity(4),
    ]
    assert choices([10] * 640, 4, least=100)[:3] == [ChunkCapacity(1, 64), ChunkCapacity(1, 32), ChunkCapacity(1, 16)]
    given_one = tuned(LENGTHS, times_of(), 2, PackingOptions(infinipipe_chunks="5"))
    assert given_one.packing.mesh.slices == 5 and len(given_one.tried) == 1
    for wrong in ("0", "x", "1.5"):
        with pytest.raises(UserError, match=f"--infinipipe-chunks {wrong}"):
            tuned(LENGTHS, times_of(), 2, PackingOptions(infinipipe_chunks=wrong))


@given(st.lists(st.integers(1, 64), min_size=1, max_size=32), st.integers(1, 8))
def test_documents_that_are_all_short_share_chunks(lengths: list[int], ranks: int) -> None:
    """Also where there are fewer chunks than ranks then: a chunk of a few tokens takes about as long as one of many."""
    times = times_of(once=2048.0)
    least = min(
        estimate(make_packing(lengths, times, ChunkCapacity(1, documents), PackingOptions()), ranks)
        for documents in (1, 2, 4, 8, 16, 32)
    )
    assert estimate(tuned(lengths, times, ranks, least=2048).packing, ranks) <= CLOSE * least


def test_the_estimate_is_1f1b_with_free_messages():
    times = times_of(once=0.0, pair=0.0)
    lengths = [12] * 8
    packing = make_packing(lengths, times, ChunkCapacity(2), PackingOptions(infinipipe_packing="none"))
    each = 12.0  # F + B of half a document on all of 3 ranks together
    assert estimate(packing, 3) == pytest.approx((16 + 2) * each / 3)


def test_fixed_chunks_have_no_limit_of_time():
    times = times_of(pair=0.01)
    fixed = make_packing(LENGTHS, times, ChunkCapacity(8), PackingOptions(infinipipe_split="fixed"))
    assert set(fixed.chunk_tokens) - {50} and max(fixed.chunk_tokens) == 50
    assert fixed.mesh.time == inf and max(map(max, fixed.chunk_times)) > times.of_slice(50) * 2


@pytest.mark.parametrize("granularity", [None, "full"])
def test_capacity_is_near_the_sweep(granularity):
    """With as much memory as the sweep says a step needs, a rank can hold about what it holds in it."""
    ranks, recompute = 2, RecomputeOptions(granularity, recompute_early=False)
    lengths = [16000, 9000] + [500 + 131 * number % 3000 for number in range(16)]
    times = ChunkTimes(MODEL_COSTS, even_stages(4, 1), 2.0)
    packing = make_packing(lengths, times, ChunkCapacity(4), PackingOptions(), alignment=64)
    shape = Shape(ranks, len(packing.workload), 4, costs=MODEL_COSTS, recompute=recompute, ragged=packing.workload)
    simulation = simulate(lower(build("seq1f1b", shape), MODEL_COSTS), MODEL_COSTS)
    stages = shape.even_stages(ranks)
    for rank, need in enumerate(simulation.device_needs):
        own = tokens_in_flight(packing.workload, ranks)[rank]
        held = token_capacity(MODEL_COSTS, stages, need, max(packing.chunk_tokens), 2.0)[rank]
        assert 0.7 * own < held <= 1.05 * own
    assert token_capacity(MODEL_COSTS, stages, None, 100, 2.0) == [inf, inf]


def test_predicted_is_the_simulation():
    lengths = [9000, 5000] + [700] * 9
    times = ChunkTimes(MODEL_COSTS, even_stages(4, 1), 2.0)
    packing = make_packing(lengths, times, ChunkCapacity(3), PackingOptions())
    shape = Shape(2, len(packing.workload), 4, costs=MODEL_COSTS, ragged=packing.workload)
    simulation = simulate(lower(build("seq1f1b", shape), MODEL_COSTS), MODEL_COSTS)
    predict = Predicted(MODEL_COSTS, even_stages(4, 2), max(simulation.device_needs))
    assert predict(packing) == simulation.makespan
    assert replace(predict, limit=None)(packing) == pytest.approx(simulation.makespan, rel=1e-9)
    assert replace(predict, limit=0.999 * max(simulation.device_needs))(packing) == inf


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), alignment=st.sampled_from([1, 4]))
@settings(max_examples=60)
def test_baselines_have_every_token(lengths, alignment):
    times, longest = times_of(), max(lengths)
    whole = packed_whole(lengths, times, alignment=alignment)
    isolated, mixed = (concatenated(lengths, times, longest, isolated=each) for each in (True, False))
    for packing in (padded(lengths, times), whole, isolated, mixed):
        check_workload(packing.workload)
        assert packing.tokens == sum(lengths) and packing.workload.most_chunks == 1
    assert all(tokens % alignment == 0 for tokens in whole.chunk_tokens)
    assert max(whole.chunk_tokens) <= -(-longest // alignment) * alignment
    placed = {part.document: part.length for row in whole.workload.microbatches for part in row[0]}
    assert [placed[document] for document in range(len(lengths))] == lengths
    assert set(isolated.chunk_tokens) == set(mixed.chunk_tokens) == {longest}
    assert isolated.time <= mixed.time + 1e-9  # what does not see the others has less to do


def test_whole_documents_fit_best():
    packing = packed_whole([10, 6, 5, 4, 3, 2], times_of())
    assert sorted(packing.chunk_tokens, reverse=True) == [10, 10, 10]


def test_what_has_to_be_recomputed_counts():
    times = times_of(pair=0.01)
    best = tuned(LENGTHS, times, 3).packing
    kept = [0.5 * tokens_in_flight(best.workload, 3)[0]] * 3
    assert over_capacity(best.workload, kept) == pytest.approx(0.5)
    assert over_capacity(best.workload, [1e9] * 3) == 0.0
    found = tuned(LENGTHS, times, 3, recomputed=lambda packing: float(packing == best))
    assert found.packing != best  # others are less than a third slower
    told = tuned(LENGTHS, times, 3, predict=lambda packing: 1.0, recomputed=lambda packing: float(packing != best))
    assert told.packing == best


@pytest.mark.parametrize("pair", [0.002, 0.005])
def test_even_in_time_and_in_tokens(pair: float) -> None:
    """As even in tokens as the published spread of time allows."""
    times, choice = times_of(pair=pair), ChunkCapacity(6)
    both, mesh = (
        make_packing(LENGTHS, times, choice, PackingOptions(infinipipe_split=each)) for each in ("both", "mesh")
    )
    assert both.tokens == mesh.tokens == sum(LENGTHS)
    assert both.spread_of_tokens < mesh.spread_of_tokens
    assert mesh.spread_of_time < both.spread_of_time <= SPREAD_OF_TIME
    further = pack(LENGTHS, times, balanced_mesh(LENGTHS, times, 6, even=1.0))
    assert further.spread_of_tokens < both.spread_of_tokens and further.spread_of_time > SPREAD_OF_TIME
    assert max(further.mesh.lengths) - min(further.mesh.lengths) == 1
    assert sum(both.mesh.lengths) == max(LENGTHS) and min(both.mesh.lengths) > 0


def test_where_times_cannot_be_so_even_they_are_as_even_as_they_can():
    times = times_of(pair=0.01)
    both, mesh = (
        make_packing(LENGTHS, times, ChunkCapacity(3), PackingOptions(infinipipe_split=each))
        for each in ("both", "mesh")
    )
    assert both.spread_of_time == mesh.spread_of_time > SPREAD_OF_TIME
