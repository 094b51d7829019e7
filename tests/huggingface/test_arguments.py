"""--load of a Hugging Face folder with --use-checkpoint-args: its model, and the flags that extend its context."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helixpipe.common.errors import CheckpointError, UserError
from helixpipe.costs.huggingface.config import arguments_of
from megatron.pretrain.arguments import parse_args
from megatron.pretrain.checkpoint.from_huggingface import other_positions
from megatron.pretrain.checkpoint.saved_arguments import read_arguments
from megatron.pretrain.checkpoint.tensors import check_model
from megatron.pretrain.config import Config, core
from tests.huggingface.families import configuration
from tests.huggingface.test_experts import MIXTRAL
from tests.huggingface.test_folder import CONFIG, make

FLAGS = (
    "--use-checkpoint-args --seq-length 64 --micro-batch-size 2 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--train-iters 10"
)


def config_of(folder: Path, flags: str = "") -> Config:
    make(folder)
    rope = {"rope_type": "llama3", "factor": 2, "low_freq_factor": 1, "high_freq_factor": 3, "rope_theta": 500.0}
    changed = {**CONFIG, "rope_parameters": {**rope, "original_max_position_embeddings": 32}, "head_dim": 6}
    (folder / "config.json").write_text(json.dumps(changed))
    words = [*FLAGS.split(), "--load", str(folder), *flags.split()]
    return parse_args(words, environ={}, load_checkpoint_args=lambda checkpoint: read_arguments(checkpoint.load or ""))


def test_the_folder_describes_the_model(tmp_path: Path) -> None:
    config = config_of(tmp_path / "model")
    model = config.model
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.kv_channels) == (2, 8, 6, 6)
    assert (model.num_attention_heads, model.num_query_groups, model.group_query_attention) == (4, 2, True)
    assert (model.normalization, model.swiglu, model.add_bias_linear) == ("RMSNorm", True, False)
    assert model.untie_embeddings_and_output_weights and config.data.vocab_size == 10
    assert (model.use_rope_scaling, model.rope_scaling_factor, model.rotary_base) == (True, 2.0, 500)
    assert model.rope_scaling_original_max_position_embeddings == 32


def test_what_extends_the_context_is_the_command_lines(tmp_path: Path) -> None:
    longer = "--no-use-rope-scaling --position-embedding-type yarn --rotary-scaling-factor 4 --rotary-base 9000"
    model = config_of(
        tmp_path / "model", f"{longer} --max-position-embeddings 128 --seq-length 128 --hidden-size 32"
    ).model
    assert (model.position_embedding_type, model.rotary_scaling_factor, model.use_rope_scaling) == ("yarn", 4, False)
    assert (model.rotary_base, model.max_position_embeddings, model.seq_length) == (9000, 128, 128)
    assert model.hidden_size == 8


def test_a_longer_sequence_asks_for_longer_positions(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--max-position-embeddings 64 must be at least --seq-length 128"):
        config_of(tmp_path / "model", "--seq-length 128")


def test_what_differs_without_the_folders_flags_is_told() -> None:
    plain = arguments_of(CONFIG, "here")
    config = configuration(plain, 1)
    model = SimpleNamespace(config=core.transformer_config(config), gpt=core.gpt_options(config))
    check_model(plain, model, Path("here"))
    for changes, words in (
        ({"model_type": "qwen2"}, "--add-qkv-bias True, but the flags say False"),
        ({"model_type": "qwen3"}, "--qk-layernorm True, but the flags say False"),
        ({"rms_norm_eps": 1e-6}, "--norm-epsilon 1e-06, but the flags say 1e-05"),
    ):
        with pytest.raises(CheckpointError, match=words):
            check_model(arguments_of({**CONFIG, **changes}, "here"), model, Path("here"))
    assert other_positions(plain, config.flat()) == []
    longer = arguments_of({**CONFIG, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}, "here")
    assert other_positions(longer, config.flat()) == [
        "rotary_base 500000 (here 10000)",
        "rotary_seq_len_interpolation_factor 2.0 (here None)",
    ]


def model_of(arguments: dict[str, Any]) -> Any:
    config = configuration(arguments, 1)
    return SimpleNamespace(config=core.transformer_config(config), gpt=core.gpt_options(config))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"squared_relu": True}, "--squared-relu True, but the flags say False"),
        ({"rotary_interleaved": True}, "--rotary-interleaved True, but the flags say False"),
        ({"moe_router_score_function": "sigmoid"}, "--moe-router-score-function sigmoid, but the flags say softmax"),
        ({"moe_router_pre_softmax": True}, "--moe-router-pre-softmax True, but the flags say False"),
        ({"moe_router_topk_scaling_factor": 2.5}, "--moe-router-topk-scaling-factor 2.5, but the flags say None"),
    ],
)
def test_what_no_tensor_shows_is_compared(changes: dict[str, Any], words: str) -> None:
    plain = arguments_of(MIXTRAL, "here")
    check_model(plain, model_of(plain), Path("here"))
    with pytest.raises(CheckpointError, match=words):
        check_model({**plain, **changes}, model_of(plain), Path("here"))


def test_a_router_may_have_had_no_factor() -> None:
    """Where the arguments name it; those of older checkpoints do not."""
    plain = arguments_of(MIXTRAL, "here")
    model = model_of({**plain, "moe_router_topk_scaling_factor": 2.5})
    with pytest.raises(CheckpointError, match="--moe-router-topk-scaling-factor None, but the flags say"):
        check_model(plain, model, Path("here"))
    check_model({k: v for k, v in plain.items() if not k.startswith("moe_router")}, model, Path("here"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--position-embedding-type yarn", "--use-rope-scaling needs --position-embedding-type rope, not yarn"),
        ("--rotary-scaling-factor 2", "--rotary-scaling-factor needs --position-embedding-type yarn, not rope"),
        ("--rope-scaling-low-freq-factor 3", "must be less than --rope-scaling-high-freq-factor 3"),
        (
            "--no-use-rope-scaling --position-embedding-type none --rotary-interleaved",
            "--rotary-interleaved needs --position-embedding-type rope or yarn, not none",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, flags: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        config_of(tmp_path / "model", flags)
