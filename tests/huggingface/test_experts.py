"""Experts of Hugging Face's models as flags and back, and what neither family has."""

from __future__ import annotations

from typing import Any

import pytest

from helixpipe.common.errors import CheckpointError
from helixpipe.costs.huggingface.config import arguments_of, check_exportable, config_of
from megatron.pretrain.huggingface.weights import Weights
from tests.huggingface.test_folder import CONFIG

MIXTRAL = {**CONFIG, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3 = {
    **CONFIG,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
}


@pytest.mark.parametrize(
    ("changes", "mixed"),
    [
        ({}, (True, True, True, True)),
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"mlp_only_layers": [0, 3]}, (False, True, True, False)),
        ({"mlp_only_layers": [0, 1, 2, 3]}, (False, False, False, False)),
    ],
)
@pytest.mark.parametrize("normed", [False, True])
def test_layers_with_experts_come_back(changes: dict[str, Any], mixed: tuple[bool, ...], normed: bool) -> None:
    arguments = arguments_of({**QWEN3, **changes, "norm_topk_prob": normed}, "here")
    assert Weights(arguments).mixed == mixed and Weights(arguments).numbered == (len(set(mixed)) > 1)
    if any(mixed):
        assert arguments["moe_router_pre_softmax"] == (not normed) and arguments["moe_ffn_hidden_size"] == 12
        assert arguments_of(config_of(arguments, "float32"), "there") == arguments


def test_mixtrals_come_back() -> None:
    arguments = arguments_of(MIXTRAL, "here")
    assert (arguments["num_experts"], arguments["moe_ffn_hidden_size"], arguments["moe_router_topk"]) == (4, 6, 2)
    assert arguments_of(config_of(arguments, "float32"), "there") == arguments
    names = [name for weight in Weights(arguments) for name in weight.names if ".0.block_sparse_moe.experts.3." in name]
    assert [name.partition(".experts.3.")[2] for name in names] == ["w1.weight", "w3.weight", "w2.weight"]


@pytest.mark.parametrize("changes", [{"sliding_window": 5}, {"router_jitter_noise": 0.1}])
def test_what_is_not_read(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="not supported"):
        arguments_of({**MIXTRAL, **changes}, "here")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"moe_router_score_function": "sigmoid"}, "scores that are no softmax"),
        ({"moe_shared_expert_intermediate_size": 8}, "shared experts"),
        ({"moe_router_topk_scaling_factor": 2.0}, "scaled scores"),
        ({"moe_expert_capacity_factor": 1.0}, "a capacity of experts"),
        ({"moe_layer_freq": "2"}, "experts in some layers"),
        ({"moe_router_pre_softmax": True}, "a softmax over all experts"),
        ({"window_size": "3,0"}, "experts beside a window"),
    ],
)
def test_what_is_not_written(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        check_exportable({**arguments_of(MIXTRAL, "here"), **changes})
