"""DeepSeek-V2 and DeepSeek-V3 in a config.json of Hugging Face's as this program's flags, and back.

Both have multi-latent attention, dense layers first, then layers with experts and shared ones. V2 takes a softmax over
all experts; V3 sigmoids, of which those chosen are divided by their sum, and chooses by scores with biases. Facts: the
`modeling_deepseek_v*.py` of transformers, and `group_limited_topk` of megatron-core, which ranks a group of experts by
the sum of its best topk / groups scores: V3 by two, V2 by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helixpipe.common.errors import CheckpointError
from helixpipe.costs.huggingface.experts import mixed_by_layer

DEEPSEEK2, DEEPSEEK3 = "deepseek_v2", "deepseek_v3"
DEEPSEEK = (DEEPSEEK2, DEEPSEEK3)

EPSILON = 1e-6
"""Of the norms of latents, whatever rms_norm_eps says."""


def arguments_of_latent(config: Mapping[str, Any], kind: str, where: Path | str) -> dict[str, Any]:
    """Return the flags of attention and experts; none for other families. Raises CheckpointError for what is not
    supported, KeyError for a missing key."""
    if kind not in DEEPSEEK:
        return {}
    _refuse(config, kind, where)
    layers, dense = config["num_hidden_layers"], config.get("first_k_dense_replace", 0)
    groups = _groups(config, kind)
    scale = float(config.get("routed_scaling_factor", 1.0))
    width = config["moe_intermediate_size"]
    return {
        "group_query_attention": False,
        "num_query_groups": 1,
        "kv_channels": config["hidden_size"] // config["num_attention_heads"],
        "multi_latent_attention": True,
        "q_lora_rank": config.get("q_lora_rank"),
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        "num_experts": config["n_routed_experts"],
        "moe_layer_freq": str([0] * dense + [1] * (layers - dense)).replace(" ", "") if dense else "1",
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width * config["n_shared_experts"],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_score_function": "sigmoid" if kind == DEEPSEEK3 else "softmax",
        "moe_router_pre_softmax": kind == DEEPSEEK2,
        "moe_router_enable_expert_bias": kind == DEEPSEEK3,
        "moe_router_num_groups": groups[0] if groups else None,
        "moe_router_group_topk": groups[1] if groups else None,
        "moe_router_topk_scaling_factor": None if scale == 1 else scale,
    }


def _groups(config: Mapping[str, Any], kind: str) -> tuple[int, int] | None:
    """How many groups of experts there are and how many a token may go to; None: it may go to all."""
    limited = kind == DEEPSEEK3 or config.get("topk_method", "greedy") == "group_limited_greedy"
    count, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    return (count, chosen) if limited and count > 1 and chosen < count else None


def _refuse(config: Mapping[str, Any], kind: str, where: Path | str) -> None:
    topk, groups, best = config["num_experts_per_tok"], _groups(config, kind), 2 if kind == DEEPSEEK3 else 1
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind_of_rope = rope.get("rope_type") or rope.get("type") or "default"
    for wrong, what in (
        (
            config["rms_norm_eps"] != EPSILON,
            f"rms_norm_eps {config['rms_norm_eps']:g}: norms of latents have {EPSILON:g}",
        ),
        (not config.get("rope_interleave", True), "rope_interleave false"),
        (kind_of_rope not in ("default", "yarn"), f"rotary embeddings of type {kind_of_rope}"),
        (rope.get("attention_factor") is not None, "attention_factor of rotary embeddings"),
        (not rope.get("truncate", True), "truncate false of rotary embeddings"),
        (bool(rope.get("mscale_all_dim")) and not rope.get("mscale"), "mscale_all_dim without mscale"),
        (config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) != 1, "partial_rotary_factor"),
        (config.get("moe_layer_freq", 1) != 1, f"moe_layer_freq {config.get('moe_layer_freq')}"),
        (not 0 <= config.get("first_k_dense_replace", 0) < config["num_hidden_layers"], "no layer with experts"),
        (groups is not None and topk // groups[1] != best, f"groups of experts that are ranked by {best} of them"),
        (kind == DEEPSEEK3 and not config.get("norm_topk_prob", True), "norm_topk_prob false"),
        (kind == DEEPSEEK2 and config.get("norm_topk_prob", False), "norm_topk_prob true"),
        (config.get("topk_method", "greedy") not in ("greedy", "group_limited_greedy", "noaux_tc"), "topk_method"),
    ):
        if wrong:
            raise CheckpointError(f"{where} holds a model that is not supported ({what}).")


def rotations(arguments: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The flags of rotary embeddings, for multi-latent attention, which has them apart from positions."""
    if kind not in DEEPSEEK:
        return dict(arguments)
    return {**arguments, "rope_type": arguments["position_embedding_type"], "position_embedding_type": "rope"}


def check_latent(arguments: Mapping[str, Any]) -> None:
    """Raise CheckpointError for multi-latent attention, with its experts, that neither family has."""
    given = arguments.get
    sigmoid, groups = given("moe_router_score_function") == "sigmoid", given("moe_router_group_topk")
    width, shared = given("moe_ffn_hidden_size") or 1, given("moe_shared_expert_intermediate_size") or 0
    mixed = mixed_by_layer(arguments)
    for wrong, what in (
        (not given("num_experts"), "multi-latent attention without experts"),
        (not given("qk_layernorm"), "latents without --qk-layernorm"),
        (given("norm_epsilon") != EPSILON, f"norm_epsilon {given('norm_epsilon')}"),
        (sorted(mixed) != list(mixed), "dense layers after some with experts"),
        (not shared or shared % width, f"shared experts of width {shared} beside others of {width}"),
        (given("moe_shared_expert_gate"), "a gate of shared experts"),
        (sigmoid != bool(given("moe_router_enable_expert_bias")), "biases of experts, or sigmoids, alone"),
        (not sigmoid and not given("moe_router_pre_softmax"), "a softmax over the chosen experts"),
        (groups and given("moe_router_topk", 0) // groups != (2 if sigmoid else 1), "groups of experts"),
        (given("moe_expert_capacity_factor") is not None, "a capacity of experts"),
        (given("rope_type") == "yarn" and _one_scale(arguments), "one of mscale and mscale_all_dim"),
    ):
        if wrong:
            raise CheckpointError(
                f"the checkpoint's model has {what}, as no family of Hugging Face's written here has."
            )


def _one_scale(arguments: Mapping[str, Any]) -> bool:
    scales = arguments["mscale"], arguments["mscale_all_dim"]
    return scales != (1.0, 0.0) and not all(scales)


def latent_entries(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a config.json for these flags; none without multi-latent attention."""
    if not arguments.get("multi_latent_attention"):
        return {}
    groups, width = arguments.get("moe_router_num_groups"), arguments["moe_ffn_hidden_size"]
    sigmoid = arguments["moe_router_score_function"] == "sigmoid"
    entries = {
        "head_dim": arguments["qk_pos_emb_head_dim"],
        "q_lora_rank": arguments.get("q_lora_rank"),
        "kv_lora_rank": arguments["kv_lora_rank"],
        "qk_nope_head_dim": arguments["qk_head_dim"],
        "qk_rope_head_dim": arguments["qk_pos_emb_head_dim"],
        "v_head_dim": arguments["v_head_dim"],
        "n_routed_experts": arguments["num_experts"],
        "n_shared_experts": arguments["moe_shared_expert_intermediate_size"] // width,
        "moe_intermediate_size": width,
        "num_experts_per_tok": arguments["moe_router_topk"],
        "routed_scaling_factor": arguments.get("moe_router_topk_scaling_factor") or 1.0,
        "first_k_dense_replace": mixed_by_layer(arguments).index(True),
        "norm_topk_prob": sigmoid,
        "n_group": groups or 1,
        "topk_group": arguments.get("moe_router_group_topk") or 1,
    }
    if sigmoid:
        return {**entries, "num_nextn_predict_layers": 0, "rope_interleave": True}
    return {**entries, "topk_method": "group_limited_greedy" if groups else "greedy"}
