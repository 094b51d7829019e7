"""DeepSeek's models as flags and back, and what of them is not read or not written."""

from __future__ import annotations

from typing import Any

import pytest

from helixpipe.common.errors import CheckpointError
from helixpipe.costs.huggingface.config import arguments_of, check_exportable, config_of
from megatron.pretrain.huggingface.weights import Weights
from tests.huggingface.test_folder import CONFIG

LITE = {
    **CONFIG,
    "model_type": "deepseek_v2",
    "num_hidden_layers": 3,
    "num_key_value_heads": CONFIG["num_attention_heads"],
    "rms_norm_eps": 1e-6,
    "q_lora_rank": None,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 3,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 5,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
V3 = {**LITE, "model_type": "deepseek_v3", "q_lora_rank": 7, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    "config",
    [
        LITE,
        {**LITE, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2},
        {**LITE, "first_k_dense_replace": 0, "routed_scaling_factor": 16.0},
        V3,
        {**V3, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}, "n_group": 1, "topk_group": 1},
        {**V3, "rope_parameters": YARN},
    ],
)
def test_models_come_back(config: dict[str, Any]) -> None:
    arguments = arguments_of(config, "here")
    check_exportable(arguments)
    assert arguments_of(config_of(arguments, "float32"), "there") == arguments
    assert Weights(arguments).mixed == (not config["first_k_dense_replace"], True, True)
    assert arguments["rope_type"] == ("yarn" if "rope_parameters" in config else "rope")


def test_what_the_flags_are() -> None:
    arguments = arguments_of({**V3, "routed_scaling_factor": 2.5}, "here")
    assert (arguments["moe_router_num_groups"], arguments["moe_router_group_topk"]) == (4, 2)
    assert arguments["moe_router_enable_expert_bias"] and arguments["moe_router_score_function"] == "sigmoid"
    assert arguments["moe_shared_expert_intermediate_size"] == 10 and arguments["moe_layer_freq"] == "[0,1,1]"
    assert arguments["moe_router_topk_scaling_factor"] == 2.5
    lite = arguments_of({**LITE, "n_group": 4, "topk_group": 2}, "here")  # its method is greedy
    assert lite["moe_router_num_groups"] is None and lite["moe_router_pre_softmax"] and lite["q_lora_rank"] is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"topk_group": 3}, "ranked by 2 of them"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"first_k_dense_replace": 3}, "no layer with experts"),
        ({"rope_parameters": {**YARN, "mscale_all_dim": 1.0}}, "mscale_all_dim without mscale"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rotary embeddings of type linear"),
    ],
)
def test_what_is_not_read(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        arguments_of({**V3, **changes}, "here")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": None}, "without experts"),
        ({"qk_layernorm": False}, "latents without --qk-layernorm"),
        ({"moe_layer_freq": "[1,0,1]"}, "dense layers after some with experts"),
        ({"moe_shared_expert_intermediate_size": 7}, "shared experts of width 7 beside others of 5"),
        ({"moe_router_enable_expert_bias": False}, "biases of experts, or sigmoids, alone"),
        ({"norm_epsilon": 1e-5}, "norm_epsilon"),
        ({"moe_router_group_topk": 4}, "groups of experts"),
        ({"mtp_num_layers": 1}, "predicts further tokens"),
    ],
)
def test_what_is_not_written(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        check_exportable({**arguments_of(V3, "here"), **changes})
