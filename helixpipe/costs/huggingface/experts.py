"""Experts in a config.json of Hugging Face's as this program's flags, and back: Mixtral's and Qwen3's.

Both take a softmax over all experts, of which a token goes to the best. Mixtral's scores, and with `norm_topk_prob`
Qwen3's, are divided by their sum, which is a softmax over the best alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helixpipe.common.errors import CheckpointError
from helixpipe.costs.layer_patterns import mixed_layers, parse_frequency

MIXTRAL, QWEN3 = "mixtral", "qwen3_moe"


def arguments_of_experts(config: Mapping[str, Any], kind: str, where: Path | str) -> dict[str, Any]:
    """Return the flags of experts; none for a model without. Raises CheckpointError for what is not supported, KeyError
    for a missing key."""
    if kind not in (MIXTRAL, QWEN3):
        return {"num_experts": None}
    if config.get("sliding_window") and (kind == MIXTRAL or config.get("use_sliding_window")):
        raise CheckpointError(f"{where} holds a model that is not supported (experts beside sliding_window).")
    if config.get("router_jitter_noise"):
        raise CheckpointError(f"{where} holds a model that is not supported (router_jitter_noise).")
    layers, pattern = config["num_hidden_layers"], "1"
    if kind == QWEN3:
        step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
        mixed = [int((layer + 1) % step == 0 and layer not in dense) for layer in range(layers)]
        if 1 not in mixed:
            return {"num_experts": None}
        pattern = "1" if 0 not in mixed else str(mixed).replace(" ", "")
    return {
        "num_experts": config["num_experts" if "num_experts" in config else "num_local_experts"],
        "moe_layer_freq": pattern,
        "moe_ffn_hidden_size": config["intermediate_size" if kind == MIXTRAL else "moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": None,
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": kind == QWEN3 and not config.get("norm_topk_prob", False),
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_topk_scaling_factor": None,
    }


def mixed_of(arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """Return 1 for layers with experts and 0 for others, layer after layer and again from the first; empty: none has
    any."""
    if not arguments.get("num_experts"):
        return ()
    return mixed_layers(parse_frequency("--moe-layer-freq", str(arguments.get("moe_layer_freq") or 1)) or 1)


def mixed_by_layer(arguments: Mapping[str, Any]) -> tuple[bool, ...]:
    """Whether each layer has experts."""
    pattern = mixed_of(arguments)
    return tuple(bool(pattern and pattern[n % len(pattern)]) for n in range(arguments["num_layers"]))


def check_experts(arguments: Mapping[str, Any]) -> None:
    """Raise CheckpointError for experts that neither family has."""
    if not arguments.get("num_experts"):
        return
    mixtral = not arguments.get("qk_layernorm")
    for wrong, what in (
        (arguments.get("moe_router_score_function", "softmax") != "softmax", "scores that are no softmax"),
        (arguments.get("moe_shared_expert_intermediate_size"), "shared experts"),
        (arguments.get("moe_router_num_groups"), "groups of experts"),
        ((arguments.get("moe_router_topk_scaling_factor") or 1.0) != 1, "scaled scores"),
        (arguments.get("moe_expert_capacity_factor") is not None, "a capacity of experts"),
        (arguments.get("add_qkv_bias"), "experts beside add_qkv_bias"),
        (arguments.get("window_size"), "experts beside a window"),
        (mixtral and 0 in mixed_of(arguments), "experts in some layers, without qk_layernorm"),
        (mixtral and arguments.get("moe_router_pre_softmax"), "a softmax over all experts, without qk_layernorm"),
    ):
        if wrong:
            raise CheckpointError(
                f"the checkpoint's model has {what}, as no family of Hugging Face's written here has."
            )


def expert_entries(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a config.json for these flags."""
    if not arguments.get("num_experts") or arguments.get("multi_latent_attention"):
        return {}
    entries = {"num_experts_per_tok": arguments["moe_router_topk"]}
    if not arguments.get("qk_layernorm"):
        width = arguments["moe_ffn_hidden_size"]
        return {**entries, "num_local_experts": arguments["num_experts"], "intermediate_size": width}
    dense = [layer for layer, mixed in enumerate(mixed_by_layer(arguments)) if not mixed]
    return {
        **entries,
        "num_experts": arguments["num_experts"],
        "moe_intermediate_size": arguments["moe_ffn_hidden_size"],
        "norm_topk_prob": not arguments.get("moe_router_pre_softmax"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }
