"""--load of a Hugging Face folder with --use-checkpoint-args: its model, and the flags that extend its context."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.common.errors import CheckpointError, UserError
from helixpipe.costs.huggingface.config import arguments_of
from helixpipe.costs.huggingface.config import config_of as config_of_arguments
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


def resolved(saved: dict[str, Any], flags: str) -> Config:
    words = [*FLAGS.split(), "--load", "saved", *flags.split()]
    return parse_args(words, environ={}, load_checkpoint_args=lambda checkpoint: saved)


KINDS = st.sampled_from(["default", "llama3", "yarn", "linear"])
LENGTHS = st.sampled_from([64, 2048, 4096, 8192, 32768])
UNUSED = {"yarn_original_max_position_embeddings": 4096, "rope_scaling_original_max_position_embeddings": 8192}
"""Fields that release 0.2 saved, also of a model whose context was not extended."""


@settings(deadline=None, max_examples=40)
@given(KINDS, LENGTHS, st.sampled_from([2, 4, 16]), st.sampled_from([3, 8]), st.booleans(), st.booleans())
def test_a_context_is_extended_from_the_length_of_the_model(
    kind: str, length: int, before: int, factor: int, yarn: bool, trained_here: bool
) -> None:
    """The original length comes from the folder or the checkpoint, also when it is read again."""
    rope: dict[str, Any] = {"rope_type": kind, "factor": before, "rope_theta": 10000.0}
    extended = kind in ("llama3", "yarn")
    rope |= (
        {"original_max_position_embeddings": length, "low_freq_factor": 1, "high_freq_factor": 4} if extended else {}
    )
    longest = length * before if extended else length
    saved = arguments_of({**CONFIG, "rope_parameters": rope, "max_position_embeddings": longest}, "here")
    saved = {**(UNUSED if trained_here else {}), **saved}
    more = "--no-use-rope-scaling --position-embedding-type yarn --rotary-scaling-factor"
    plain = "--use-rope-scaling --rotary-scaling-factor 1 --position-embedding-type rope --rope-scaling-factor"
    flags = f"--rotary-seq-len-interpolation-factor 1 {more if yarn else plain} {factor}"
    own = "--yarn-original-max-position-embeddings" if yarn else "--rope-scaling-original-max-position-embeddings"
    assert core.rope_scaling(resolved(saved, f"{flags} {own} 77")).original_length == 77
    if kind == "linear":
        with pytest.raises(UserError, match=rf"interpolated positions.*give {own}"):
            resolved(saved, flags)
        return
    config = resolved(saved, flags)
    scaling = core.rope_scaling(config)
    assert (scaling.original_length, scaling.factor) == (length, factor)
    assert f"{length:,} x {factor} = {length * factor:,} tokens" in (scaling.description or "")
    assert core.rope_scaling(resolved(config.flat(), "")) == scaling  # saved, and resumed
    written = config_of_arguments(config.flat(), "float32")["rope_parameters"]  # and exported
    assert (written["original_max_position_embeddings"], written["factor"]) == (length, factor)


def test_yarn_without_a_factor_is_refused() -> None:
    for flags in ("--position-embedding-type yarn", "--position-embedding-type yarn --rotary-scaling-factor 1"):
        with pytest.raises(UserError, match="yarn with --rotary-scaling-factor 1 extends nothing: give a factor"):
            resolved(arguments_of(CONFIG, "here"), flags)


def test_what_the_checkpoint_overrules_is_told() -> None:
    saved = arguments_of(CONFIG, "here")
    told = "--use-checkpoint-args takes the model from the checkpoint, not"
    (line,) = (line for line in resolved(saved, "--hidden-size 64 --num-layers 2").warnings if told in line)
    assert line == f"{told} --hidden-size 64 (the checkpoint has hidden_size 8)."
    flags = "--num-layers 3 --no-swiglu --add-qkv-bias"
    (line,) = (line for line in resolved(saved, flags).warnings if told in line)
    assert (
        "--num-layers 3 (the checkpoint has num_layers 2)" in line and "--no-swiglu (the checkpoint has swiglu" in line
    )
    assert not any("--use-checkpoint-args" in line for line in resolved(saved, "").warnings)


def test_a_second_launch_goes_on_from_what_the_first_has_saved(tmp_path: Path) -> None:
    folder, save = tmp_path / "model", tmp_path / "saved"
    make(folder)
    loaded: list[str | None] = []

    def launch(*flags: str) -> Config:
        words = [*FLAGS.split(), "--load", str(folder), "--save", str(save), *flags]

        def load(checkpoint: Any) -> Any:
            loaded.append(checkpoint.load)
            return arguments_of(CONFIG, "here")

        return parse_args(words, environ={}, load_checkpoint_args=load)

    assert launch("--finetune").checkpoint.finetune and not launch().warnings
    (save / "iter_0000005").mkdir(parents=True)
    config = launch("--finetune")
    assert config.checkpoint.load == str(save) and not config.checkpoint.finetune
    assert any("the run goes on from them" in line for line in config.warnings)
    assert launch("--overwrite-checkpoints").checkpoint.load == str(folder)
    assert loaded == [*map(str, (folder, folder, save, folder))]


def test_a_name_on_a_hub_is_no_folder() -> None:
    words = [*FLAGS.split(), "--load", "meta-llama/Llama-3-8B"]
    with pytest.raises(UserError, match=r"Llama-3-8B is not there: give a local folder .*download it first"):
        parse_args(words, environ={}, load_checkpoint_args=lambda checkpoint: None)


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
