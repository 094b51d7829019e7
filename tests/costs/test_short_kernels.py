"""What short chunks, small heads, keys and values of chunks, and eager functions cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helixpipe.costs.attention_kernels import attention_share
from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, Chunk, Layout
from helixpipe.costs.piece_bytes import PieceBytes
from helixpipe.costs.piece_kinds import work
from helixpipe.program.costs import Work
from helixpipe.program.stages import Piece
from helixpipe.program.workload import Extent

SEVEN = MODELS["llama2-7b"]
COSTS = ModelCosts(SEVEN, HARDWARE["a100-80"], Layout(), seq_length=4096)


def test_half_of_the_tokens_take_more_than_half_of_the_time() -> None:
    """n rows take as long as n + 128 would: 4224 of 2176."""
    fast = replace(COSTS, hardware=replace(COSTS.hardware, memory_bandwidth=1e30))
    whole, half = (fast.piece_time("proj", "F", Chunk(tokens)) for tokens in (4096, 2048))
    assert whole / half == pytest.approx(4224 / 2176)
    even = replace(fast, hardware=replace(fast.hardware, ramp_tokens=0))
    whole, half = (even.piece_time("proj", "F", Chunk(tokens)) for tokens in (4096, 2048))
    assert whole / half == pytest.approx(2)


@pytest.mark.parametrize(
    ("channels", "share"), [(128, 1.0), (256, 1.0), (96, 0.961), (80, 0.8), (64, 0.89), (32, 0.73)]
)
def test_small_heads_reach_less(channels: int, share: float) -> None:
    assert attention_share(channels) == pytest.approx(share, abs=0.005)


def test_attention_takes_longer_with_small_heads() -> None:
    """As many FLOPs in heads of 64 channels as in those of 128."""
    small = replace(COSTS, model=replace(SEVEN, heads=64, groups=64))
    chunk = Chunk(4096)
    ratio = small.piece_time("attn", "F", chunk) / COSTS.piece_time("attn", "F", chunk)
    assert ratio == pytest.approx(1 / attention_share(64))


def moved(op: str, chunk: Chunk, **layout: int) -> float:
    """Elements of keys that an op on them moves beside the attention itself."""
    kernels = work(SEVEN, Layout(**layout), "attn", op, chunk)
    return sum(kernel.bytes for kernel in kernels if kernel.kind == "memory") / 2 / SEVEN.kv_hidden


@pytest.mark.parametrize(("op", "elements"), [("F", 2 * 2 * 1024), ("I", 2 * 3 * 1024 + 2 * 3 * 3072), ("W", 0)])
def test_keys_and_values_of_chunks_are_stored_and_their_gradients_summed(op: str, elements: int) -> None:
    assert moved(op, Chunk(1024, 3072, stored=True)) == elements
    assert moved(op, Chunk(1024, 3072)) == 0


def test_another_engine_adds_them_in_more_passes_and_keeps_them_twice() -> None:
    chunk = Chunk(1024, 3072, stored=True)
    assert moved("I", chunk, kv_passes=10) - moved("I", chunk) == 2 * 7 * 3072
    pieces = (Piece("attn", 0),)
    once, twice = (PieceBytes(SEVEN, Layout(kv_copies=count)) for count in (1, 2))
    assert twice.keys_values(pieces, 4096) == 2 * once.keys_values(pieces, 4096)
    assert twice.key_value_gradients(pieces, 4096) == once.key_value_gradients(pieces, 4096)


def test_values_of_their_own_let_the_rest_of_qkv_go() -> None:
    pieces, chunk = (Piece("qkv", 0), Piece("attn", 0)), Chunk(4096)
    views, own = (PieceBytes(SEVEN, Layout(views_of_qkv=views)).stash(pieces, chunk) for views in (True, False))
    assert views - own == 2 * 4096 * 4096 * 2  # queries and keys before their rotation


def test_halves_have_keys_and_values_of_their_own() -> None:
    """Without RoPE, whole sequences keep copies of queries beside the QKV layer's output."""
    model, pieces = replace(MODELS["llama3-8b"], positions="learned"), (Piece("qkv", 0), Piece("attn", 0))
    off, halves = (
        PieceBytes(model, Layout(2, True, overlap_tp_comm=way)).stash(pieces, Chunk(4096)) for way in ("off", "halves")
    )
    assert off - halves == 4096 * 4096 // 2 * 2


def test_an_op_has_its_overhead_and_recomputation_none() -> None:
    slower = replace(COSTS, op_overhead=0.125)
    pieces, extents = (Piece("mlp", 0),), (Extent(4096, 0),)
    for kind, overhead in (("F", 0.125), ("B", 0.125), ("I", 0.125), ("W", 0.125), ("R", 0.0)):
        asked = Work(kind, pieces, extents, 4096)
        assert slower.op_time(asked) == pytest.approx(COSTS.op_time(asked) + overhead)


def test_eager_norms_rotations_and_activations_move_more() -> None:
    """A norm 18 times its input and not twice; rotation 24 times and not 9; a gated activation 7 and not 3. Ours goes
    over queries and keys 7 times, and copies values."""
    chunk, hidden = Chunk(4096), 4096 * 4096

    def elements(piece: str, eager: bool, views: bool = True) -> float:
        kernels = work(SEVEN, Layout(eager=eager, views_of_qkv=views), piece, "F", chunk)
        return sum(kernel.bytes for kernel in kernels if kernel.kind == "memory") / 2

    assert elements("norm", True) == 18 * hidden and elements("norm", False) == 2 * hidden
    assert elements("qkv", True) - elements("qkv", False) == 15 * 2 * hidden
    assert elements("qkv", False) == 9 * 2 * hidden and elements("qkv", False, views=False) == (7 * 2 + 2) * hidden
    assert elements("mlp", True) - elements("mlp", False) == 16 * hidden + 4 * 4096 * SEVEN.ffn
