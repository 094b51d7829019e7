"""Sequences in chunks under every schedule: what is made for whole microbatches runs them chunk by chunk."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.common.errors import ScheduleError
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.lower import lower
from helixpipe.lowering.validate import validate
from helixpipe.program.chunked import in_chunks
from helixpipe.program.program import Program, forward_only
from helixpipe.program.text import parse_rows
from helixpipe.program.workload import Workload, uniform
from helixpipe.simulate.simulator import simulate
from schedules import CATALOGUE, Shape, build
from schedules.zero_bubble import ZeroBubbleOptions, in_flight
from tests.lowering.ragged import equal_chains, random_chains
from tests.lowering.rendezvous import Machine

COSTS = PieceTimes({"qkv": 1.0, "attn": 0.5, "mlp": 2.0}, message=0.1)
LINEAR = PieceTimes({"mlp": 1.0})
WHOLE = [name for name, schedule in CATALOGUE.items() if not schedule.chunks and not schedule.units]
OTHERS = [name for name, schedule in CATALOGUE.items() if not schedule.chunks]


@settings(max_examples=60)
@given(
    name=st.sampled_from(OTHERS),
    p=st.integers(1, 4),
    m=st.integers(1, 8),
    lengths=st.none() | st.lists(st.integers(1, 9), min_size=2, max_size=5).map(tuple),
    most=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)
def test_any_chunks_can_be_run(
    name: str, p: int, m: int, lengths: tuple[int, ...] | None, most: int, seed: int
) -> None:
    """Of all microbatches alike, or of each its own; messages need no buffer."""
    rng = Random(seed)
    shape = Shape(p, m, 2 * p, most, costs=COSTS)
    if lengths is not None:
        shape = Shape(p, m, 2 * p, len(lengths), chunk_lengths=lengths, costs=COSTS)
    elif rng.random() < 0.5 and CATALOGUE[name].ragged:
        shape = Shape(p, m, 2 * p, ragged=random_chains(rng, m, most), costs=COSTS)
    try:
        program = build(name, shape)
    except ScheduleError:
        return  # as of whole microbatches: see `test_chunks_ask_for_nothing_more`
    assert program.workload == shape.workload
    validate(forward_only(program))
    lowered = lower(program, COSTS)
    assert Machine(lowered, rng, blocking=rng.random() < 0.5).run()
    simulation = simulate(lowered, COSTS)
    assert simulation.makespan >= max(simulation.busy) * (1 - 1e-9)


@pytest.mark.parametrize("name", OTHERS)
def test_chunks_ask_for_nothing_more(name: str) -> None:
    for p in (1, 2, 4):
        for m in (1, p, 2 * p):
            found = []
            for chunks in (1, 2, 3):
                try:
                    found.append(build(name, Shape(p, m, 2 * p, chunks)).num_chunks == chunks)
                except ScheduleError:
                    found.append(False)
            assert found[1] >= found[0] and found[2] >= found[0]


@pytest.mark.parametrize("name", WHOLE)
def test_chunk_by_chunk_is_no_slower_where_chunks_take_their_share_of_the_time(name: str) -> None:
    """And keeps no more: what comes first of an op can only be there sooner."""
    p = 1 if CATALOGUE[name].one_rank else 4
    for m in (8, 16):
        whole, cut = (
            simulate(lower(build(name, Shape(p, m, 16, chunks, costs=LINEAR)), LINEAR), LINEAR) for chunks in (1, 4)
        )
        assert cut.makespan <= whole.makespan * (1 + 1e-9)
        assert max(cut.peak_activation) <= max(whole.peak_activation) * (1 + 1e-9)


@pytest.mark.parametrize("name", ["zb1p", "zb2p", "zbv", "v-half", "v-min", "zb-interleaved", "hanayo", "chimera"])
def test_chunks_shorten_the_bubble_and_keep_less(name: str) -> None:
    """Chunks take the places of microbatches: the bubble is that of units a quarter as long."""
    whole, cut = (
        simulate(lower(build(name, Shape(4, 16, 8, chunks, costs=LINEAR)), LINEAR), LINEAR) for chunks in (1, 4)
    )
    assert cut.bubble_time <= 0.6 * whole.bubble_time
    assert max(cut.peak_activation) < max(whole.peak_activation)


def test_memory_of_zero_bubble_over_chunks() -> None:
    """p units and k - 1 for the first gradient; long chunks count for what they are."""
    assert in_flight(Shape(4, 8, 8), 4) == 4
    assert in_flight(Shape(4, 8, 8, 4), 4) == 7 / 4
    assert in_flight(Shape(4, 8, 8, 2, chunk_lengths=(3, 1)), 2.5) == (3 + 1 + 3 + 1) / 4
    assert in_flight(Shape(4, 1, 8, 4), 4) == 1
    for name, most in (("zb1p", 4), ("zb2p", 8), ("zbv", 4), ("v-half", 3), ("v-min", 3)):
        shape = Shape(4, 12, 8, 4, costs=LINEAR)
        found = simulate(lower(build(name, shape), LINEAR), LINEAR)
        assert max(found.peak_activation) <= 2 * (most + 3) / 4 + 1e-9
    asked = build("zbv", Shape(4, 12, 8, 4, costs=LINEAR), ZeroBubbleOptions(3))
    assert 2 * 7 / 4 < max(simulate(lower(asked, LINEAR), LINEAR).peak_activation) <= 6


def test_the_places_of_chunks() -> None:
    """All F of a microbatch, then its backwards from the last; of the head, which looks at no other token, in turn."""
    stages = build("helix", Shape(1, 2, 1)).stages
    assert [stage.has_attention for stage in stages] == [False, True, False, False]
    rows = parse_rows([["0F0", "1F0", "2F0", "3F0", "3B0", "2B0", "1R0", "1B0", "0I0", "0W0"]])
    program = in_chunks(Program("mine", stages, rows, uniform(1)), uniform(1, 2))
    assert " ".join(map(str, program.ranks[0])) == (
        "0F0 0F0.1 1F0 1F0.1 2F0 2F0.1 3F0.1 3B0.1 3F0 3B0 2B0.1 2B0 1R0.1 1B0.1 1R0 1B0 0I0.1 0W0.1 0I0 0W0"
    )


def test_chunks_that_lie_on_one_rank_attend_to_each_other() -> None:
    """Of a microbatch, under schedules that have several of its stages, or its attention, on several ranks."""
    for name in ("helix", "weipipe", "chimera"):
        program = build(name, Shape(2, 4, 4, 3, chunk_lengths=(3, 2, 2)))
        for stage, placed in enumerate(program.stages):
            if placed.has_attention:
                for microbatch in range(4):
                    homes = {
                        rank
                        for rank, ops in enumerate(program.ranks)
                        if any((op.stage, op.microbatch) == (stage, microbatch) for op in ops)
                    }
                    assert len(homes) == 1


def test_weights_pass_a_rank_once_for_all_chunks() -> None:
    """WeiPipe's messages are as many as of whole sequences."""
    for name in ("weipipe-naive", "weipipe", "wzb1", "wzb2"):
        counts = {
            sum(each.kind in ("weights", "weight_gradients") for each in lower(program, COSTS).graph.transfers)
            for program in (build(name, Shape(4, 8, 8, chunks)) for chunks in (1, 3))
        }
        assert len(counts) == 1


def test_whole_microbatches_of_a_workload() -> None:
    workload = equal_chains((3, 1))
    assert [len(chunks) for chunks in workload.whole.microbatches] == [1, 1]
    assert [sum(workload.whole.tokens(number)) for number in (0, 1)] == [sum(workload.tokens(n)) for n in (0, 1)]
    assert uniform(2, 3, (2, 2, 1)).whole == uniform(2, 1, (5,))
    rows = Workload((((*uniform(1, 1, (4,)).chunks(0)[0],), (*_second(2),)),))
    assert len(rows.whole.chunks(0)[0]) == 2, "documents stay apart"


def _second(tokens: int) -> tuple:
    (chunk,) = uniform(2, 1, (tokens,)).chunks(1)
    return chunk
