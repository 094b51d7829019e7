"""The shape of a model from the training program's flags, as a run or a Hugging Face folder has them, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from helixpipe.common.flags import words_of
from helixpipe.costs.layer_patterns import mixed_layers, parse_frequency, pattern_values, shape_fields
from helixpipe.costs.model_config import ModelConfig
from helixpipe.costs.models import ModelShape, Others

_SAME_SHAPE: Mapping[str, Mapping[Any, Any]] = {
    "position_embedding_type": {"yarn": "rope"},
    "softmax_type": {"off-by-one": "vanilla"},
}
"""Values of a flag that have the shape of another of its values."""

_OPEN = frozenset({*_SAME_SHAPE, "max_position_embeddings", "attention_dropout", "hidden_dropout"})
"""Fields that a shape alone does not settle: `ModelShape.others` may say more."""

_PLANNED = frozenset({"chunk_size", "loss_chunk_size", "cuda_graphs", "attention_backend"})
"""Fields of `ModelConfig` that a plan chooses."""


def shape_of_flags(flags: Mapping[str, Any], name: str, vocab: int, vocab_multiple: int = 128) -> ModelShape:
    """Return the model. flags: values by field, of which None are not given. vocab: before it is padded to a multiple
    of vocab_multiple. Raises UserError for patterns of layers that are none. `values_of_shape` is the way back."""
    heads, hidden = flags["num_attention_heads"] or 1, flags["hidden_size"] or 1
    positions = flags["position_embedding_type"]
    windows = flags["window_size"], flags["window_attn_skip_freq"], flags["no_rope_freq"], flags["num_layers"]
    shape = ModelShape(
        name=name,
        layers=flags["num_layers"] or 1,
        hidden=hidden,
        heads=heads,
        groups=flags["num_query_groups"] if flags["group_query_attention"] else heads,
        ffn=flags["ffn_hidden_size"] or 4 * hidden,
        gated=flags["swiglu"],
        vocab=vocab,
        tied=not flags["untie_embeddings_and_output_weights"],
        norm=flags["normalization"],
        positions=_SAME_SHAPE["position_embedding_type"].get(positions, positions),
        bias=flags["add_bias_linear"],
        seq_length=flags["seq_length"] or 1,
        head_channels=0 if flags["kv_channels"] == hidden // heads else flags["kv_channels"] or 0,
        qkv_bias=flags["add_qkv_bias"],
        qk_norm=flags["qk_layernorm"],
        output_gate=flags.get("attention_output_gate", False),
        sinks=flags.get("softmax_type") == "learnable",
        centered=flags["apply_layernorm_1p"],
        vocab_multiple=vocab_multiple,
        further=flags.get("mtp_num_layers") or 0,
        **shape_fields(*windows),
        **_expert_fields(flags),
        **_latent_fields(flags),
    )
    return dataclasses.replace(shape, others=_others(flags, values_of_shape(shape)))


def _others(flags: Mapping[str, Any], said: Mapping[str, Any]) -> Others:
    """Return the flags that a shape leaves out. said: by the shape."""
    others: dict[str, Any] = {}
    for field in dataclasses.fields(ModelConfig):
        value, settled = flags.get(field.name), field.name in said and field.name not in _OPEN
        if value is None or settled or field.name in _PLANNED or not field.metadata.get("cli", True):
            continue
        value = tuple(value) if isinstance(value, list) else value
        if value != said.get(field.name, field.default):
            others[field.name] = value
    return tuple(sorted(others.items()))


def model_flags(shape: ModelShape) -> list[str]:
    """Return training's flags for a model, of one word or more each: every field that is not at its default."""
    return words_of(ModelConfig(**values_of_shape(shape)))


def values_of_shape(shape: ModelShape) -> dict[str, Any]:
    """Return the values of `ModelConfig` that a shape says, by field; what is left out has its default."""
    values = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "kv_channels": shape.head_channels or None,
        "group_query_attention": shape.groups != shape.heads,
        "num_query_groups": shape.groups if shape.groups != shape.heads else 1,
        "seq_length": shape.seq_length,
        "max_position_embeddings": shape.seq_length,
        "position_embedding_type": shape.positions,
        "normalization": shape.norm,
        "apply_layernorm_1p": shape.centered,
        "qk_layernorm": shape.qk_norm,
        "attention_output_gate": shape.output_gate,
        "softmax_type": "learnable" if shape.sinks else "vanilla",
        "swiglu": shape.gated,
        "add_bias_linear": shape.bias,
        "add_qkv_bias": shape.qkv_bias,
        "mtp_num_layers": shape.further or None,
        "untie_embeddings_and_output_weights": not shape.tied,
        "make_vocab_size_divisible_by": shape.vocab_multiple,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **pattern_values(shape.layers, shape.window, shape.windowed, shape.unrotated),
    }
    if shape.experts:
        mixed = [shape.mixed[layer % len(shape.mixed)] for layer in range(shape.layers)]
        values |= {
            "num_experts": shape.experts,
            "moe_layer_freq": str(mixed).replace(" ", "") if 0 in mixed else "1",
            "moe_ffn_hidden_size": shape.expert_ffn,
            "moe_shared_expert_intermediate_size": shape.shared_ffn or None,
            "moe_router_topk": shape.topk,
            "moe_token_dispatcher_type": "alltoall",
        }
    if shape.kv_rank:
        values |= {
            "multi_latent_attention": True,
            "q_lora_rank": shape.q_rank or None,
            "kv_lora_rank": shape.kv_rank,
            "qk_head_dim": shape.own_channels,
            "qk_pos_emb_head_dim": shape.shared_channels,
            "v_head_dim": shape.value_channels,
        }
    for name, value in shape.others:
        if name == "max_position_embeddings":
            values[name] = max(value, shape.seq_length)
        elif name not in _SAME_SHAPE or _SAME_SHAPE[name].get(value) == values[name]:
            values[name] = value
    return values


def _latent_fields(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `ModelShape` that the flags of multi-latent attention say."""
    if not flags.get("multi_latent_attention"):
        return {}
    return {
        "kv_rank": flags["kv_lora_rank"],
        "q_rank": flags["q_lora_rank"] or 0,
        "own_channels": flags["qk_head_dim"],
        "shared_channels": flags["qk_pos_emb_head_dim"],
        "value_channels": flags["v_head_dim"],
    }


def _expert_fields(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `ModelShape` that the flags of experts say."""
    if flags.get("num_experts") is None:
        return {}
    return {
        "experts": flags["num_experts"],
        "mixed": mixed_layers(parse_frequency("--moe-layer-freq", flags["moe_layer_freq"]) or 1),
        "topk": flags["moe_router_topk"],
        "expert_ffn": flags["moe_ffn_hidden_size"] or flags["ffn_hidden_size"],
        "shared_ffn": flags["moe_shared_expert_intermediate_size"] or 0,
    }
