"""What ops over two halves of their tokens cost: what is hidden of tensor-parallel collectives, and what is not."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixpipe.costs.halves import consecutive, halves_of
from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import AUTO, HALVES, MODELS, OFF, Chunk, Layout
from helixpipe.costs.piece_kinds import work
from helixpipe.lowering.bound import stage_work
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.program.costs import Work
from helixpipe.program.stages import Piece, Stage, model_pieces
from helixpipe.program.workload import Extent

LLAMA = MODELS["llama3-8b"]
LAYERS = model_pieces(8)[1:-1]
TOKENS = 8192


def costs(overlap: str = HALVES, hardware: str = "h100", tokens: int = TOKENS, **changes: float) -> ModelCosts:
    layout = Layout(8, sequence_parallel=True, overlap_tp_comm=overlap)
    return ModelCosts(LLAMA, replace(HARDWARE[hardware], **changes), layout, tokens)


def seconds(model: ModelCosts, op: str, pieces: tuple[Piece, ...] = LAYERS) -> float:
    return model.op_time(Work(op, pieces, (Extent(model.seq_length, 0.0),), float(model.seq_length)))


@given(
    st.floats(1, 1e6), st.floats(0, 1e6), st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 1000)), max_size=4)
)
def test_halves_of_a_chunk_have_its_tokens_and_pairs(
    tokens: float, earlier: float, slices: list[tuple[int, int]]
) -> None:
    chunk = Chunk(tokens, earlier, stored=True)
    if len(slices) > 1:
        parts = tuple(Extent(*each) for each in slices)
        chunk = Chunk(sum(part.tokens for part in parts), sum(part.earlier for part in parts), slices=parts)
    halves = halves_of(chunk)
    assert halves[0].tokens == pytest.approx(halves[1].tokens)
    assert sum(half.tokens for half in halves) == pytest.approx(chunk.tokens)
    assert sum(half.pairs for half in halves) == pytest.approx(chunk.pairs)
    assert all(half.stored == chunk.stored for half in halves)


def test_pieces_that_follow_one_another_are_one_run() -> None:
    chain = model_pieces(2)[1:-1]
    assert consecutive(chain) == [tuple(piece.kind for piece in chain)]
    without = [piece for piece in chain if piece.role != "attn"]
    assert consecutive(without) == [("norm", "qkv"), ("proj", "mlp", "norm", "qkv"), ("proj", "mlp")]
    assert consecutive([]) == []
    assert consecutive(chain[:5], {Piece("norm", 0), Piece("attn", 0)}) == [("norm", "qkv"), ("attn", "proj", "mlp")]


@pytest.mark.parametrize("kind", ["F", "B", "R"])
def test_recomputed_segments_run_one_after_another(kind: str) -> None:
    """Each begins and ends with a collective that nothing runs beside."""
    halved, extents = costs(), (Extent(TOKENS, 0.0),)
    stage = RecomputeOptions("full").stages((Stage(LAYERS),))
    work = stage_work(kind, stage, 0, extents, float(TOKENS))
    assert work.pieces == LAYERS and len(work.starts) == 8
    each = seconds(halved, kind, LAYERS[:5])
    assert halved.op_time(work) == pytest.approx(8 * each) and 8 * each > 1.05 * seconds(halved, kind)
    plain = stage_work(kind, (Stage(LAYERS),), 0, extents, float(TOKENS))
    assert plain.starts == ()


@pytest.mark.parametrize("op", ["F", "I", "B", "W", "R"])
@pytest.mark.parametrize("hardware", ["h100", "a800", "h20"])
def test_an_op_takes_no_less_than_its_kernels_and_no_less_than_its_collectives(op: str, hardware: str) -> None:
    """The kernels of one rank alone are those of an infinitely fast network."""
    halved = costs(hardware=hardware)
    kernels = seconds(costs(hardware=hardware, nvlink=1e30, latency=0.0), op)
    sent = sum(
        halved._kernel_time(kernel._replace(behind=()))
        for piece in LAYERS
        for kernel in work(LLAMA, replace(halved.layout, overlap_tp_comm=OFF), piece.kind, op, Chunk(TOKENS))
        if kernel.kind == "network"
    )
    assert seconds(halved, op) >= max(kernels, sent) * (1 - 1e-9)
    exposed = seconds(halved, op) - kernels
    if op == "W":
        assert exposed == pytest.approx(0, abs=1e-12)
    elif op != "R":
        assert 0.1 * sent <= exposed <= 0.5 * sent


def test_what_halves_gain_over_the_overlap_of_the_backward() -> None:
    """Where collectives take as long as products, a quarter of the forward; where they take little, next to nothing."""
    gain = {op: seconds(costs(OFF), op) / seconds(costs(), op) for op in "FB"}
    assert gain["F"] > 1.25 and gain["B"] > 1.1
    slow = {op: seconds(costs(OFF, nvlink=1e14), op) / seconds(costs(nvlink=1e14), op) for op in "FB"}
    assert all(0.93 < ratio < 1.03 for ratio in slow.values())


def test_short_chunks_run_whole_in_less_time() -> None:
    """Each half begins every product and every collective anew."""
    assert seconds(costs(tokens=128), "F") > seconds(costs(OFF, tokens=128), "F")


def test_many_layers_take_as_long_as_each_beside_others() -> None:
    """Only what a run begins and ends with has nothing beside it."""
    halved = costs()
    times = [seconds(halved, "F", model_pieces(count)[1:-1]) for count in (1, 2, 3, 4)]
    steps = [later - earlier for earlier, later in pairwise(times)]
    assert steps[1] == pytest.approx(steps[2], rel=1e-9) and steps[0] == pytest.approx(steps[1], rel=0.05)
    assert times[0] > steps[2]


def test_pieces_done_for_both_halves_take_as_long_as_whole() -> None:
    """Attention round a ring, and an MLP over slices."""
    for layout, piece in (
        (Layout(2, True, context_parallel=2, overlap_tp_comm=HALVES), Piece("attn", 3)),
        (Layout(2, True, mlp_chunk=1024, overlap_tp_comm=HALVES), Piece("mlp", 3)),
    ):
        halved = ModelCosts(LLAMA, HARDWARE["h100"], layout, TOKENS)
        whole = replace(halved, layout=replace(layout, overlap_tp_comm=OFF))
        for op in "FI":
            joined = seconds(halved, op, (piece,)) - seconds(whole, op, (piece,))
            assert joined == pytest.approx(
                2 * TOKENS / layout.context_parallel / 2 * 4096 * 2 / (3350e9 * 0.75), rel=1e-6
            )


def over_context(how: str, overlap: str = HALVES, ranks: int = 4, tp: int = 1, **changes: float) -> ModelCosts:
    layout = Layout(tp, tp > 1, context_parallel=ranks, cp_comm_type=how, overlap_tp_comm=overlap)
    return ModelCosts(LLAMA, replace(HARDWARE["h100"], **changes), layout, 32768)


@pytest.mark.parametrize("op", ["F", "I", "B"])
@pytest.mark.parametrize("tp", [1, 2])
def test_swaps_are_hidden_behind_the_other_half(tp: int, op: str) -> None:
    """All but a part of the first, which has a short step beside it."""
    halved, off = over_context("a2a", tp=tp), over_context("a2a", OFF, tp=tp)
    kernels = {
        kind: sum(
            off._kernel_time(kernel._replace(behind=()))
            for piece in LAYERS
            for kernel in work(LLAMA, off.layout, piece.kind, op, Chunk(32768))
            if (kernel.kind == "all-to-all") == (kind == "swaps") and kernel.kind != "network"
        )
        for kind in ("swaps", "others")
    }
    fast = seconds(over_context("a2a", tp=tp, nvlink=1e30, network=1e30, latency=0.0), op)
    assert fast == pytest.approx(kernels["others"], rel=0.02)  # halves are joined
    exposed = seconds(halved, op) - fast
    assert 0.1 * kernels["swaps"] <= exposed <= 0.5 * (seconds(off, op) - kernels["others"])


def test_a_swap_of_half_the_tokens_moves_half_the_bytes() -> None:
    """Where nothing else takes time, halves take as long as whole chunks."""
    slow = {"network": 1e6, "nvlink": 1e6, "latency": 0.0, "interference": 0.0}
    for op in "FB":
        whole = seconds(over_context("a2a", OFF, **slow), op)
        assert seconds(over_context("a2a", **slow), op) == pytest.approx(whole, rel=1e-3)


def test_a_ring_alone_has_no_halves() -> None:
    """It hides what it sends behind its own attention; beside tensor-parallel collectives it is done for both."""
    assert not over_context("p2p").layout.halves and over_context("p2p", tp=2).layout.halves
    assert seconds(over_context("p2p"), "B") == seconds(over_context("p2p", OFF), "B")
    assert over_context("a2a", AUTO, network=1e30, nvlink=1e30).with_overlap_chosen().layout.overlap_tp_comm == OFF


def test_one_rank_has_no_halves() -> None:
    alone = ModelCosts(LLAMA, HARDWARE["h100"], Layout(overlap_tp_comm=HALVES), TOKENS)
    assert not alone.layout.halves
    assert seconds(alone, "F") == seconds(replace(alone, layout=Layout()), "F")
