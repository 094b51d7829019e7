"""The shape of a model from the training program's flags, as a run or a Hugging Face folder has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from helixpipe.costs.layer_patterns import mixed_layers, parse_frequency, shape_fields
from helixpipe.costs.models import ModelShape


def shape_of_flags(flags: Mapping[str, Any], name: str, vocab: int, vocab_multiple: int = 128) -> ModelShape:
    """Return the model. flags: values by field, of which None are not given. vocab: before it is padded to a multiple
    of vocab_multiple. Raises UserError for patterns of layers that are none."""
    heads, hidden = flags["num_attention_heads"] or 1, flags["hidden_size"] or 1
    positions = flags["position_embedding_type"]
    windows = flags["window_size"], flags["window_attn_skip_freq"], flags["no_rope_freq"], flags["num_layers"]
    return ModelShape(
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
        positions="rope" if positions == "yarn" else positions,
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
