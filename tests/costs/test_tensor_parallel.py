"""What collectives of tensor-parallel ranks cost beside the kernels that run at the same time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, Chunk, Layout
from helixpipe.costs.piece_kinds import KINDS, work
from helixpipe.costs.sizes import ChunkSizes, Kernel

LLAMA = MODELS["llama3-8b"]
SPLIT = Layout(8, sequence_parallel=True)


def seconds(costs: ModelCosts, kernel: Kernel) -> float:
    """Of a collective or a matrix product that has the GPU to itself."""
    hardware = costs.hardware
    if kernel.kind == "network":
        return hardware.latency + kernel.bytes / hardware.ring_bandwidth(costs.layout.tensor_parallel)
    memory = kernel.bytes / (hardware.memory_bandwidth * hardware.efficiency.memory)
    arithmetic = kernel.flops * (1 + hardware.ramp_tokens / kernel.rows)
    return max(memory, arithmetic / (hardware.flops * hardware.efficiency.matmul))


def collectives(layout: Layout, piece: str, op: str, chunk: Chunk) -> list[Kernel]:
    return [kernel for kernel in work(LLAMA, layout, piece, op, chunk) if kernel.kind == "network"]


@given(
    st.sampled_from(["qkv", "mlp", "head"]),
    st.sampled_from(["h100", "a800", "h20"]),
    st.integers(7, 17).map(lambda power: 2**power),
    st.booleans(),
)
def test_the_sum_of_input_gradients_runs_beside_the_weight_gradient_of_a_whole_backward(
    piece: str, hardware: str, tokens: int, sequence_parallel: bool
) -> None:
    """The longer of both counts, and a tenth of the collective at least. I alone, whose W comes later, waits for it."""
    layout = replace(SPLIT, sequence_parallel=sequence_parallel)
    costs, chunk = ModelCosts(LLAMA, HARDWARE[hardware], layout, tokens), Chunk(tokens)
    (summing, *_) = [each for each in collectives(layout, piece, "I", chunk) if not each.behind]
    (product, *_) = [each for each in work(LLAMA, layout, piece, "W", chunk) if each.kind == "matmul"]
    hidden = min(0.9 * seconds(costs, summing), seconds(costs, product))
    apart = costs.piece_time(piece, "I", chunk) + costs.piece_time(piece, "W", chunk)
    assert apart - costs.piece_time(piece, "B", chunk) == pytest.approx(hidden, rel=1e-6)


def test_the_input_is_gathered_again_beside_the_input_gradient() -> None:
    """Of the column-parallel layers alone: what a row-parallel one's gradient is gathered from is needed at once."""
    chunk = Chunk(8192)
    for piece, expected in (("qkv", [True, False]), ("mlp", [True, False, False]), ("proj", [False])):
        found = collectives(SPLIT, piece, "I", chunk)
        assert [bool(each.behind) for each in found] == expected
    (first, _) = KINDS["mlp"].linears(ChunkSizes(LLAMA, SPLIT, chunk))
    (product,) = collectives(SPLIT, "mlp", "I", chunk)[0].behind
    assert (product.kind, product.flops, product.rows) == ("matmul", 2 * 8192 * first[0] * first[1], 8192)


@pytest.mark.parametrize(("piece", "slices"), [("mlp", {"mlp_chunk": 1024}), ("head", {"loss_chunk": 1024})])
def test_layers_over_slices_hide_nothing(piece: str, slices: dict[str, int]) -> None:
    """They communicate once for all slices, before the first and after the last."""
    layout, chunk = replace(SPLIT, **slices), Chunk(8192)
    assert not any(each.behind for op in "FIWB" for each in collectives(layout, piece, op, chunk))


def test_one_rank_has_no_collectives() -> None:
    assert not any(collectives(Layout(), piece, op, Chunk(8192)) for piece in LLAMA.kinds for op in "FIWB")


def test_a_ring_slows_down_the_attention_that_hides_it() -> None:
    """Fast links: all of it is hidden, and a tenth of its time stays."""
    layout = Layout(context_parallel=4)
    costs = ModelCosts(LLAMA, HARDWARE["h100"], layout, 131072)
    (ring,) = [each for each in work(LLAMA, layout, "attn", "F", Chunk(131072)) if each.kind == "ring"]
    free = replace(costs, hardware=replace(costs.hardware, interference=0.0))
    more = costs.piece_time("attn", "F", Chunk(131072)) - free.piece_time("attn", "F", Chunk(131072))
    alone = costs.hardware.latency + ring.bytes / costs.hardware.peer_bandwidth(1, same_node=True)
    assert more == pytest.approx(0.1 * alone)
