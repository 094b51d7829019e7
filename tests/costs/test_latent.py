"""Costs of multi-latent attention: what torch keeps and counts, presets, and what they cannot be had with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helixpipe.common.errors import UserError
from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, Chunk, Layout
from helixpipe.costs.piece_bytes import PieceBytes
from helixpipe.costs.piece_kinds import KINDS, flops, num_parameters
from helixpipe.program.stages import LATENT, Piece
from tests.costs import latent
from tests.distributed import run_ranks

V3, LITE = MODELS["deepseek-v3"], MODELS["deepseek-v2-lite"]


def test_counts_equal_torch() -> None:
    (found,) = run_ranks(latent.compare, 1)
    wrong = [f"{what}: torch {theirs}, ours {ours:g}" for what, theirs, ours in found if theirs != ours]
    assert len(found) == 34 and not wrong, wrong


def test_presets_have_as_many_parameters_as_published() -> None:
    """671 billion, of which 37 are used for a token (DeepSeek-V3, section 4.2); 15.7 (DeepSeek-V2, appendix B)."""
    assert num_parameters(replace(V3, further=0)) == pytest.approx(671e9, rel=1e-3)
    assert num_parameters(replace(V3, further=0, experts=8)) == pytest.approx(37e9, rel=2e-2)
    assert num_parameters(LITE) == pytest.approx(15.7e9, rel=1e-3)


def test_pieces_have_weights_where_some_are_counted() -> None:
    gated = replace(MODELS["llama3-8b"], sinks=True, window=512, windowed=(1, 0))
    for model in (V3, LITE, MODELS["llama3-8b"], gated):
        for piece in model.pieces:
            assert piece.has_weights == (KINDS[piece.kind].weights(model, 1, 1) > 0), piece


def test_chunks_keep_latents() -> None:
    """576 elements of a token in each layer, in place of 128 heads' keys of 192 channels and values of 128."""
    assert PieceBytes(V3, Layout()).keys_values([Piece(LATENT, 0)], 1000) == 1000 * 576 * 2


def test_every_chunk_makes_keys_and_values_of_all_that_it_sees() -> None:
    """Attention does as many products however a sequence is cut; what it makes of latents it makes for each chunk."""
    made = 2 * 512 * 128 * 256  # of a token
    whole = flops(V3, Layout(), LATENT, "F", Chunk(4000.0))
    halves = sum(flops(V3, Layout(), LATENT, "F", Chunk(2000.0, earlier, True)) for earlier in (0.0, 2000.0))
    assert halves - whole == pytest.approx(2000 * made)
    backward = flops(V3, Layout(), LATENT, "B", Chunk(4000.0))
    assert backward == pytest.approx(3 * 4000 * made + 2 * (3 * 192 + 2 * 128) * 128 * 4000**2 / 2)


@pytest.mark.parametrize(
    ("layout", "words"),
    [(Layout(context_parallel=2), "--context-parallel 2"), (Layout(2, overlap_tp_comm="halves"), "halves")],
)
def test_what_cannot_be_had(layout: Layout, words: str) -> None:
    with pytest.raises(UserError, match=f"{words} cannot be had with deepseek-v3, which has multi-latent attention"):
        ModelCosts(V3, HARDWARE["h100"], layout, 4096)
