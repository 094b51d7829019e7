"""Costs of experts: weights and their share, floating-point operations, the exchange between expert-parallel ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, Chunk, Layout, ModelShape
from helixpipe.costs.piece_bytes import PieceBytes
from helixpipe.costs.piece_kinds import flops, num_parameters, work
from helixpipe.program.costs import Work
from helixpipe.program.stages import EXPERTS, Piece
from helixpipe.program.workload import Extent
from netlab.experts import predicted_seconds

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


def test_over_a_slow_link_pairs_leave_a_third_of_the_exposed_exchange() -> None:
    """Of a step of eight units, the first of which has no backward beside it and the last no forward."""
    shape = replace(MIXTRAL, layers=2, heads=4, groups=4, hidden=256, expert_ffn=1024, experts=4, seq_length=1024)
    computing = 16.0
    seconds = predicted_seconds(shape, 8, computing, 9.6e6, 3e-4, waited=True)
    off, pairs = (1 - computing / seconds[way] for way in ("off", "pairs"))
    assert 0.28 < off < 0.32 and off / 8 < pairs < 0.1


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
