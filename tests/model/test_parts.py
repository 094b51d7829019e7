"""Parts of the model that need no process group: RoPE, core attention, options, initial weights' seeds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from helixpipe.common.errors import UserError
from helixpipe.model import GPTOptions, UnitContext
from helixpipe.model.attention.core_attention import CoreAttention
from helixpipe.model.attention.rotary import Rotary
from helixpipe.model.boundaries import payload_shapes
from helixpipe.model.options import check_supported
from helixpipe.model.randomness import derive_seed, initial_weights
from helixpipe.program.stages import Piece
from tests import fakes
from tests.model.common import make_config, make_options

NO_GROUP = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("percent", "base"), [(1.0, 10000), (0.5, 500)])
def test_rope_equals_megatron_core_at_any_offset(percent: float, base: int, dtype: torch.dtype) -> None:
    config = make_config("llama")
    options = GPTOptions(48, 12, "rope", rotary_percent=percent, rotary_base=base)
    ours = Rotary(config, options)
    theirs = RotaryEmbedding(config.kv_channels, percent, rotary_base=base, use_cpu_initialization=True)
    tensor = torch.randn(5, 2, 4, 8, dtype=torch.float64).to(dtype)
    for offset in (0, 3, 40):  # the last is beyond the table made first
        angles = theirs.get_emb(5, offset)
        expected = apply_rotary_pos_emb(tensor, angles, config, cp_group=NO_GROUP)
        assert torch.equal(ours.rotate(tensor, (range(offset, offset + 5),)), expected)


@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_fused_rope_is_given_the_angles_of_its_tokens(percent: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine's kernel at any offset, on a key that is a view of what the linear layer gave; what spans more
    elements than the kernel can count is rotated in plain torch."""
    config, options = make_config("llama"), GPTOptions(48, 12, "rope", rotary_percent=percent)
    engine, plain = fakes.TransformerEngine(), Rotary(config, options)
    with fakes.installed(**fakes.engine_modules(engine)):
        fused = Rotary(config, options, "transformer-engine")
    key = torch.randn(5, 2, 4, 12)[..., 2:10]
    for offset in (0, 3, 40, 7):  # the third is beyond the table made first
        tokens = (range(offset, offset + 5),)
        assert torch.equal(fused.rotate(key, tokens), plain.rotate(key, tokens))
    assert engine.rotated == [(5, 2, 4, 8)] * 4
    monkeypatch.setattr("helixpipe.model.attention.rotary.FUSED_SPAN", 5 * 2 * 4 * 12)
    assert torch.equal(fused.rotate(key, tokens), plain.rotate(key, tokens))
    fused.rotate(key.contiguous(), tokens)
    assert len(engine.rotated) == 5


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_fused_rope_leaves_nothing_of_the_qkv_layers_output(groups: int) -> None:
    """Heads as in plain torch, of any groups, each with memory of its own; and their gradients."""
    config, options = make_config("llama"), GPTOptions(48, 12, "rope", rotary_percent=0.5)
    with fakes.installed(**fakes.engine_modules(fakes.TransformerEngine())):
        ropes = Rotary(config, options), Rotary(config, options, "transformer-engine")
    mixed = torch.randn(5, 2, 8 * (4 + 2 * groups), dtype=torch.float64, requires_grad=True)
    results = [rope.heads(mixed, groups, 8, (range(3, 6), range(9, 11))) for rope in ropes]
    gradients = [torch.autograd.grad(sum((each**2).sum() for each in heads), mixed)[0] for heads in results]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-12)
    for plain, fused in zip(*results, strict=True):
        assert torch.equal(plain, fused)
        assert all(each.untyped_storage().nbytes() == each.nbytes for each in (plain, fused))


def test_attention_with_grouped_queries_equals_expanded_keys() -> None:
    torch.manual_seed(0)
    config = make_config("llama")
    query = torch.randn(6, 2, 4, 8, dtype=torch.float64, requires_grad=True)
    key, value = torch.randn(2, 6, 2, 2, 8, dtype=torch.float64).unbind()
    output = CoreAttention(config)(query, key, value, training=True)
    keys, values = (tensor.repeat_interleave(2, dim=2) for tensor in (key, value))
    scores = torch.einsum("sbhd,tbhd->bhst", query, keys) / 8**0.5
    scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf"))
    expected = torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), values).flatten(2)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def test_attention_dropout_keeps_the_mean() -> None:
    torch.manual_seed(0)
    attention = CoreAttention(make_config("gpt", attention_dropout=0.25))
    ones = torch.ones(64, 8, 4, 8, dtype=torch.float64)
    torch.testing.assert_close(attention(ones, ones, ones, training=False), ones.flatten(2))
    dropped = attention(ones, ones, ones, training=True)
    assert dropped.var() > 0
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.05)


def test_payload_shapes_with_tensor_and_sequence_parallelism() -> None:
    config = make_config("llama", tp=2, sequence_parallel=True)
    hidden, query, key, attention = (3, 5, 32), (6, 5, 2, 8), (6, 5, 1, 8), (6, 5, 16)
    expected = {
        "embed": (hidden,),
        "norm": (hidden, hidden),
        "qkv": (query, key, key, hidden),
        "attn": (attention, hidden),
        "proj": (hidden,),
        "mlp": (hidden,),
        "head": ((),),
    }
    for kind, shapes in expected.items():
        assert payload_shapes(config, Piece(kind), micro_batch_size=5, length=6) == shapes
    config.attention_output_gate = True
    assert payload_shapes(config, Piece("norm"), 5, 6) == (hidden, hidden)
    assert payload_shapes(config, Piece("qkv"), 5, 6) == ((6, 5, 2, 16), key, key, hidden)


def test_chunk_of_a_sequence() -> None:
    assert torch.arange(9)[UnitContext(0, 0, offset=3, length=2).tokens].tolist() == [3, 4]
    assert torch.arange(4)[UnitContext(0, 0).tokens].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"window_size": (4, 1)}, "--window-size must be LEFT,0"),
        ({"tensor_model_parallel_size": 4}, "--num-query-groups 2 must be a multiple"),
    ],
)
def test_unsupported_settings_are_named(changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(UserError, match=flag):
        check_supported(make_config("llama", **changes), make_options("llama", tied=True))


def test_unknown_position_embedding_lists_the_valid_ones() -> None:
    with pytest.raises(UserError, match="learned_absolute, rope, yarn, none"):
        check_supported(make_config("gpt"), GPTOptions(48, 12, "mrope"))
    with pytest.raises(UserError, match="yarn needs yarn"):
        check_supported(make_config("gpt"), GPTOptions(48, 12, "yarn"))


def test_seeds_are_stable_and_depend_on_every_part() -> None:
    assert derive_seed(1, "weights", "qkv[0]") == 878345507593916224
    seeds = {derive_seed(1, step, microbatch) for step in range(50) for microbatch in range(50)}
    assert len(seeds) == 2500


def test_initial_weights_leave_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    draws = []
    for part in ("qkv[0]", "qkv[1]", "qkv[0]"):
        with initial_weights(7, part, tp_rank=0):
            draws.append(torch.randn(3))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[1])
