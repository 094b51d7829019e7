"""Costs of experts: weights and their share, floating-point operations, the exchange between expert-parallel ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, Chunk, Layout, ModelShape
from helixpipe.costs.piece_bytes import PieceBytes
from helixpipe.costs.piece_kinds import flops, model_flops, num_parameters, work
from helixpipe.program.costs import Contents, Load, Work
from helixpipe.program.stages import EXPERTS, Piece, Segment
from helixpipe.program.workload import Extent

MIXTRAL, QWEN = MODELS["mixtral-8x7b"], MODELS["qwen3-235b-a22b"]
LAYER = [Piece(EXPERTS, 0)]


def test_presets_have_as_many_parameters_as_published() -> None:
    """46.7 and 235 billion, says each model's card; of Qwen's all experts but 8 of 128 a layer leave 22."""
    assert num_parameters(MIXTRAL) == pytest.approx(46.7e9, rel=1e-3)
    assert num_parameters(QWEN) == pytest.approx(235e9, rel=1e-3)
    assert num_parameters(replace(QWEN, experts=8)) == pytest.approx(22e9, rel=2e-2)


def test_expert_parallel_ranks_share_out_experts_alone() -> None:
    whole = PieceBytes(MIXTRAL, Layout()).parameters(LAYER)
    experts = 8 * 3 * 4096 * 14336
    assert whole == experts + 4096 + 8 * 4096  # and a norm and the router
    for ranks in (2, 4, 8):
        assert (
            PieceBytes(MIXTRAL, Layout(expert_parallel=ranks)).parameters(LAYER) == whole - experts + experts // ranks
        )


@pytest.mark.parametrize("op", ["F", "I", "W"])
def test_a_token_costs_what_its_experts_cost(op: str) -> None:
    """Two experts as wide as a dense MLP: twice its products, and the router's."""
    chunk, layout = Chunk(1024.0), Layout()
    dense = flops(MIXTRAL, layout, "mlp", op, chunk)
    router = {"F": 1, "I": 2, "W": 0}[op] * 2 * 1024 * 4096 * 8
    assert flops(MIXTRAL, layout, EXPERTS, op, chunk) == pytest.approx(2 * dense + router)
    shared = replace(MIXTRAL, shared_ffn=MIXTRAL.ffn)
    assert flops(shared, layout, EXPERTS, op, chunk) == pytest.approx(3 * dense + router)


@pytest.mark.parametrize("op", ["F", "B"])
def test_tokens_travel_there_and_back(op: str) -> None:
    chunk = Chunk(1024.0)
    for ranks in (1, 2, 8):
        kernels = [k for k in work(MIXTRAL, Layout(expert_parallel=ranks), EXPERTS, op, chunk) if k.kind == "experts"]
        sent = 1024 * 2 * 4096 * 2 * (ranks - 1) / ranks
        assert [kernel.bytes for kernel in kernels] == [sent] * (2 if ranks > 1 else 0)


def test_an_exchange_between_nodes_takes_longer_than_within_one() -> None:
    def exchange(ranks: int) -> float:
        costs = ModelCosts(MIXTRAL, HARDWARE["h100"], Layout(expert_parallel=ranks), 8192, 16)
        (first, *_) = (k for k in work(MIXTRAL, costs.layout, EXPERTS, "F", Chunk(8192.0)) if k.kind == "experts")
        return costs._kernel_time(first)

    assert exchange(16) > 3 * exchange(8) > 0


SHARED = replace(QWEN, shared_ffn=8 * QWEN.expert_ffn)


def alone_and_paired(model: ModelShape, **layout: Any) -> tuple[float, float, float]:
    """Seconds of a layer's forward and backward one after the other, of both at once, and of their exchanges."""
    costs = ModelCosts(model, replace(HARDWARE["h100"], interference=0.0), Layout(**layout), 8192, 16)
    pieces, extents = model.pieces[1:6], (Extent(8192.0, 0.0),)
    forward, backward = (Work(kind, pieces, extents, 8192.0) for kind in "FB")
    one, other = costs.op_time(forward), costs.op_time(backward)
    both = costs.op_time(forward._replace(beside=backward)) + costs.op_time(backward._replace(beside=forward))
    exchanges = [k for op in "FB" for k in work(model, costs.layout, EXPERTS, op, Chunk(8192.0)) if k.kind == "experts"]
    return one + other, both, sum(costs._kernel_time(kernel._replace(behind=())) for kernel in exchanges)


def test_pairs_hide_the_exchange() -> None:
    """All four in a layer's forward and backward, as each stands beside something that takes longer."""
    alone, paired, exchange = alone_and_paired(MIXTRAL, expert_parallel=8, overlap_tp_comm="pairs")
    assert alone - exchange == pytest.approx(alone_and_paired(MIXTRAL, overlap_tp_comm="pairs")[0], rel=0.3)
    assert exchange > 0.03 * alone and paired == pytest.approx(alone - exchange, rel=1e-9)
    assert alone_and_paired(MIXTRAL, expert_parallel=8)[1] == pytest.approx(alone)


def test_shared_experts_hide_a_part_of_the_exchange() -> None:
    """Their products run while tokens, or gradients, are on their way to the experts, or back from them."""
    alone, _, exchange = alone_and_paired(SHARED, expert_parallel=8)
    parts = alone_and_paired(QWEN, expert_parallel=8)[0], alone_and_paired(SHARED)[0] - alone_and_paired(QWEN)[0]
    assert 0 < sum(parts) - alone <= exchange / 2


def test_halves_hide_the_exchange() -> None:
    costs = ModelCosts(MIXTRAL, HARDWARE["h100"], Layout(expert_parallel=8, overlap_tp_comm="auto"), 8192, 16)
    assert costs.with_overlap_chosen().layout.overlap_tp_comm == "halves"
    one = replace(costs, layout=replace(costs.layout, expert_parallel=1))
    assert not one.with_overlap_chosen().layout.halves


def held(**layout: Any) -> ModelCosts:
    return ModelCosts(MIXTRAL, HARDWARE["h100"], Layout(**layout), 8192, data_parallel=8)


EXPERT_WEIGHTS = 8 * 3 * 4096 * 14336
OTHER_WEIGHTS = 4096 + 8 * 4096


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_ranks_with_the_same_experts_share_out_their_state(ranks: int) -> None:
    """Of eight pipelines 8 / EP have the same: each keeps 1/8 of all experts' state, whatever EP is."""
    costs = held(expert_parallel=ranks)
    assert costs.optimizer_bytes(LAYER).device == 12 * (EXPERT_WEIGHTS + OTHER_WEIGHTS) / 8
    parts = replace(costs, shards_weights=True)
    assert parts.kept_parameters(LAYER) == (EXPERT_WEIGHTS + OTHER_WEIGHTS) / 8
    assert costs.kept_parameters(LAYER) == EXPERT_WEIGHTS / ranks + OTHER_WEIGHTS


def test_weights_in_parts_are_gathered_over_the_ranks_with_the_same_experts() -> None:
    """Over eight that have eight experts each has its own, which nobody brings it."""

    def gathered(ranks: int) -> float:
        costs = replace(held(expert_parallel=ranks), shards_weights=True)
        contents = Contents("gathered", (Segment(tuple(LAYER), False),), (), None)
        return costs.transfer_time(Load("gather", (0,), contents, members=8)) - 7 * costs.hardware.latency

    bandwidth = held()._data_parallel_bandwidth
    assert gathered(1) == pytest.approx(2 * (EXPERT_WEIGHTS + OTHER_WEIGHTS) * 7 / 8 / bandwidth)
    assert gathered(2) == pytest.approx(2 * (EXPERT_WEIGHTS / 2 * 3 / 4 + OTHER_WEIGHTS * 7 / 8) / bandwidth)
    assert gathered(8) == pytest.approx(2 * OTHER_WEIGHTS * 7 / 8 / bandwidth)


def test_whole_experts_beside_tensor_parallelism() -> None:
    """Over two tensor-parallel ranks with four experts each, or each split over both: the same products, weights and
    tokens that travel, but nothing gathered for a split expert."""
    chunk = Chunk(1024.0)
    split, whole = (Layout(2, True, expert_parallel=ranks, expert_tensor=parts) for ranks, parts in ((2, 0), (4, 1)))
    for op in "FIW":
        assert flops(MIXTRAL, split, EXPERTS, op, chunk) == pytest.approx(flops(MIXTRAL, whole, EXPERTS, op, chunk))
    assert PieceBytes(MIXTRAL, split).parameters(LAYER) == PieceBytes(MIXTRAL, whole).parameters(LAYER)
    of_split, of_whole = (work(MIXTRAL, layout, EXPERTS, "F", chunk) for layout in (split, whole))
    assert [kernel.bytes for kernel in of_whole if kernel.kind == "experts"] == [512 * 2 * 4096 * 2 * 3 / 4] * 2
    assert sum(kernel.kind == "network" for kernel in of_split) == 2
    assert not any(kernel.kind == "network" for kernel in of_whole)


def test_all_wait_for_the_busiest_rank() -> None:
    """Which has all tokens of two ranks: twice the products, tokens that come, and memory; of the router as before."""
    chunk, even = Chunk(1024.0), Layout(expert_parallel=2)
    uneven = replace(even, expert_load=2.0)
    router = 2 * 1024 * 4096 * 8
    of_experts = flops(MIXTRAL, even, EXPERTS, "F", chunk) - router
    assert flops(MIXTRAL, uneven, EXPERTS, "F", chunk) == pytest.approx(2 * of_experts + router)
    assert model_flops(MIXTRAL, uneven, EXPERTS, chunk) == model_flops(MIXTRAL, even, EXPERTS, chunk)
    sent = [
        [k.bytes for k in work(MIXTRAL, each, EXPERTS, "F", chunk) if k.kind == "experts"] for each in (even, uneven)
    ]
    assert sent[1] == [2 * each for each in sent[0]]
    kept = [PieceBytes(MIXTRAL, each).stash(LAYER, chunk) for each in (even, uneven)]
    inner = 1024 * 2 * 14336 * 2  # a product and the halves it is made of, and the tokens
    assert kept[1] - kept[0] == 3 * inner + 1024 * 2 * 4096 * 2
