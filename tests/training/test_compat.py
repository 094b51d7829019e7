"""Argument lists and flags of Megatron-LM: each is accepted, accepted with a warning, or refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer import TransformerConfig

from benchmarks.data import read
from helixpipe.common.errors import CheckpointError, UserError
from helixpipe.costs.layer_patterns import kinds_of_layers, shape_fields
from megatron.pretrain.arguments import (
    MODEL_SHAPE,
    build_parser,
    overlay_checkpoint_args,
    parse_args,
    split_unavailable,
)
from megatron.pretrain.checkpoint.tensors import check_model
from megatron.pretrain.config import compat
from megatron.pretrain.config.core import optimizer_config
from tests.training.helpers import config
from tests.training.megatron_lists import (
    BEGIN,
    FOLDER,
    GOLDEN,
    PAGE,
    ArgumentList,
    Outcome,
    argument_lists,
    golden_lines,
    outcome,
    table,
    with_table,
)


@pytest.fixture(scope="module")
def outcomes() -> dict[ArgumentList, Outcome]:
    return {each: outcome(each) for each in argument_lists()}


@pytest.mark.thorough
def test_what_becomes_of_megatron_lists_is_on_record(outcomes: dict[ArgumentList, Outcome]) -> None:
    """After an intended change: `python -m tests.training.megatron_lists`."""
    found = golden_lines({each.name: result for each, result in outcomes.items()})
    assert found == GOLDEN.read_text(encoding="utf-8").splitlines()


@pytest.mark.thorough
def test_the_page_has_todays_table(outcomes: dict[ArgumentList, Outcome]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert BEGIN in page and with_table(page, table(outcomes)) == page


@pytest.mark.thorough
def test_readme_has_todays_count(outcomes: dict[ArgumentList, Outcome]) -> None:
    readme = " ".join((PAGE.parents[1] / "README.md").read_text(encoding="utf-8").split())
    accepted = sum(found.refusal is None for found in outcomes.values())
    assert (
        f"Of {len(outcomes)} argument lists of Megatron-LM's own GPT tests and examples {accepted} are accepted"
        in readme
    )


@pytest.mark.thorough
def test_refusals_are_one_sentence_with_a_reason(outcomes: dict[ArgumentList, Outcome]) -> None:
    for result in outcomes.values():
        if result.refusal is not None:
            assert "unknown flag" not in result.refusal and "invalid choice" not in result.refusal
            assert "\n" not in result.refusal and result.refusal.count(". ") == 0 and result.refusal.endswith(".")


def test_every_flag_of_megatron_has_one_answer() -> None:
    """Each option of the releases that tests/training/megatron_lm/flags.txt names: taken, ignored or refused."""
    tables = (compat.REFUSED, compat.REFUSED_FAMILIES), (compat.IGNORED, compat.IGNORED_FAMILIES)
    taken = build_parser().option_strings()
    for name in (FOLDER / "flags.txt").read_text(encoding="utf-8").split():
        flag = f"--{name}"
        found = [flag in taken, *(flag in exact or flag.startswith(tuple(parts)) for exact, parts in tables)]
        understood = any(words[0] == flag for words in compat.READ_AS)
        assert sum(found) == 1 or (understood and not any(found)), flag
        try:
            build_parser().parse_known_args(split_unavailable([flag, "1"])[0])
        except UserError as error:
            assert "unknown flag" not in str(error) and str(error).count(". ") == 0, flag


def test_no_flag_has_two_reasons() -> None:
    table = read(PAGE.parents[1] / "megatron/pretrain/config/megatron_flags.toml")
    flags = [flag for kind in ("refused", "ignored") for each in table[kind].values() for flag in each]
    assert len(flags) == len({*flags})
    assert not {*flags} & {*build_parser().option_strings()}


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ("--recompute-modules [layernorm,mla_up_proj,mlp,moe_act]", ("mlp",)),
        ("--recompute-modules core_attn moe_act", ("core_attn", "mlp")),
        ("--recompute-modules mla_up_proj", None),
        ("--offload-modules expert_fc1 --offload-activations 1", ("mlp",)),
    ],
)
def test_modules_of_megatron_are_those_here(given: str, own: tuple[str, ...] | None) -> None:
    parsed = config(f"--recompute-granularity selective {given}")
    assert own == (parsed.offload.offload_modules if "offload" in given else parsed.recompute.recompute_modules)
    assert any(given.split(" --")[0] in warning for warning in parsed.warnings)


def shown(default: Any) -> str:
    """Return a default as the keys of megatron_defaults.toml have it: empty for all that asks for nothing."""
    if isinstance(default, (list, tuple)):
        return " ".join(map(shown, default))
    if default is None or default is False:
        return ""
    return str(float(default)) if isinstance(default, (int, float)) and default is not True else str(default)


def test_the_defaults_of_megatron_hold_or_the_page_says_why_not() -> None:
    """`tests/training/megatron_defaults.toml` has the defaults of its parser of August 2026."""
    options = build_parser()._option_string_actions
    differ = set()
    for default, names in read(FOLDER.with_name("megatron_defaults.toml")).items():
        for flag in (f"--{name}" for name in names):
            if shown(options[flag].default) != default:
                differ.add(flag)
    rows = [line.split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `--")]
    assert differ == {row[1].strip().strip("`") for row in rows if len(row) == 6}


def test_weight_decay_of_the_norms_of_queries_and_keys_reaches_the_optimizer() -> None:
    for flags in ("--apply-wd-to-qk-layernorm", "--no-weight-decay-cond-type apply_wd_to_qk_layernorm"):
        assert optimizer_config(config(flags)).apply_wd_to_qk_layernorm
    assert not optimizer_config(config("")).apply_wd_to_qk_layernorm


@pytest.mark.parametrize(("flags", "strategy"), [("--use-megatron-fsdp", "optim_grads_params"), ("", None)])
def test_fsdp_alone_shards_weights(flags: str, strategy: str | None) -> None:
    assert config(flags).parallel.data_parallel_sharding_strategy == strategy


def test_values_of_a_list_arrive() -> None:
    chosen = {each.name: each for each in argument_lists()}["gpt3_mcore_tp1_pp4"]
    parsed = parse_args((*chosen.words, "--vocab-size", "50257"), environ={"WORLD_SIZE": "8"})
    assert (parsed.parallel.pipeline_schedule, parsed.parallel.data_parallel_size) == ("1f1b", 2)
    assert (parsed.training.lr, parsed.training.lr_decay_iters) == (0.00015, 320000)
    assert parsed.checkpoint.dist_ckpt_strictness == "log_all"
    assert (parsed.data.split, parsed.data.tokenizer_type) == ("949,50,1", "GPT2BPETokenizer")


@pytest.mark.parametrize(("words", "reading"), compat.READ_AS.items(), ids=map(" ".join, compat.READ_AS))
def test_a_reading_counts_and_is_said(words: tuple[str, ...], reading: compat.Reading) -> None:
    rest, (warning,) = split_unavailable(["--lr", "1", *words])
    assert rest == [*reading.words, "--lr", "1"]
    assert warning == f"understood: {' '.join(words)} as {' '.join(reading.words)} ({reading.why})."
    build_parser().parse(rest)


def test_a_flag_of_ones_own_goes_before_a_reading() -> None:
    given = config("--tokenizer-type ByteLevelTokenizer --tokenizer-library sentencepiece")
    assert given.data.tokenizer_type == "ByteLevelTokenizer"


def test_how_to_recompute_without_what_does_nothing() -> None:
    parsed = config("--recompute-method uniform --recompute-num-layers 2")
    assert parsed.recompute == config("").recompute
    (warning,) = parsed.warnings
    assert warning == ("--recompute-method and --recompute-num-layers do nothing without --recompute-granularity full.")


@pytest.mark.parametrize(
    ("flags", "positions"),
    [
        ("--no-position-embedding", "none"),
        ("--no-position-embedding --position-embedding-type rope", "rope"),
        ("--no-position-embedding --use-rotary-position-embeddings", "rope"),
    ],
)
def test_the_older_spelling_of_no_positions(flags: str, positions: str) -> None:
    assert config(flags).model.position_embedding_type == positions


def test_the_kernels_asked_for_arrive() -> None:
    model = config("--attention-backend fused --transformer-impl transformer_engine").model
    assert (model.attention_backend, model.transformer_impl) == ("fused", "transformer_engine")
    assert model.gradient_accumulation_fusion
    assert not config("--no-gradient-accumulation-fusion").model.gradient_accumulation_fusion


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ("--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-param-gather", "8-bit and 4-bit training"),
        ("--num-experts 8 --moe-enable-deepep", "kernels are for GPUs and not called here"),
        ("--rope-type yarn", "give --position-embedding-type yarn"),
        ("--multi-latent-attention --qk-pos-emb-head-dim 7", "must be even"),
        (
            "--multi-latent-attention --window-size 7,0",
            "--window-size cannot be had with --multi-latent-attention: it attends to all tokens of a document",
        ),
        ("--distribute-saved-activations --recompute-activations", "--sequence-parallel splits what is kept"),
        ("--fim-data --fim-rate 0.5", "fill-in-the-middle"),
        ("--data-impl lazy", "data files are mapped"),
        ("--optimizer muon --muon-momentum 0.9", "the optimizer is adam or sgd"),
        ("--num-experts 8 --moe-router-score-function sqrtsoftplus", "scores are softmax or sigmoid"),
        ("--outer-dp-sharding-strategy optim", "all data-parallel ranks or none"),
        ("--hybrid-context-parallel", "shared by the context-parallel ranks alike"),
    ],
)
def test_what_is_asked_beyond_is_refused_in_one_sentence(extra: str, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        config(extra)
    message = str(caught.value)
    assert message.startswith("--") and reason in message and message.count(". ") == 0 and message.endswith(".")


def test_a_checkpoint_of_another_model_is_refused() -> None:
    overlay_checkpoint_args(config(""), {"qk_l2_norm": False})
    with pytest.raises(CheckpointError, match="the checkpoint's model has qk_l2_norm"):
        overlay_checkpoint_args(config(""), {"qk_l2_norm": True})


@given(
    kinds=st.lists(st.sampled_from(["aux_loss", "seq_aux_loss"]), min_size=1, max_size=2, unique=True),
    rate=st.sampled_from([0.0, 0.01]),
    biases=st.booleans(),
)
def test_the_arguments_of_megatron_lm_describe_a_model(kinds: list[str], rate: float, biases: bool) -> None:
    """Megatron-LM saves a list of one value as that value. With biases in linear layers it saves add_qkv_bias too."""
    rates = [rate] * len(kinds)
    saved = {
        "moe_router_load_balancing_type": kinds[0] if len(kinds) == 1 else kinds,
        "moe_aux_loss_coeff": rates[0] if len(kinds) == 1 else rates,
        "add_bias_linear": biases,
        "add_qkv_bias": biases,
    }
    model = overlay_checkpoint_args(config(""), saved).model
    assert (list(model.moe_router_load_balancing_type), list(model.moe_aux_loss_coeff)) == (kinds, rates)
    assert model.add_bias_linear is model.add_qkv_bias is biases


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("saved", [{"add_bias_linear": True, "add_qkv_bias": each} for each in (False, True)])
def test_a_bias_of_the_qkv_layer_is_one_of_all_linear_layers(saved: dict[str, bool], ours: bool) -> None:
    fields = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "add_qkv_bias": ours}
    options = SimpleNamespace(position_embedding_type="rope", share_embeddings_and_output_weights=True)
    with_biases = SimpleNamespace(config=TransformerConfig(**fields, add_bias_linear=True), gpt=options)
    check_model(saved, with_biases, Path("saved"))
    without = SimpleNamespace(config=TransformerConfig(**fields, add_bias_linear=False), gpt=options)
    if not ours:
        with pytest.raises(CheckpointError, match="--add-qkv-bias True, but the flags say False"):
            check_model(saved, without, Path("saved"))


@pytest.mark.parametrize(
    ("saved", "kept"),
    [
        ({"window_size": (7, 0), "window_attn_skip_freq": [1, 0], "no_rope_freq": 2}, ("(7,0)", "[1,0]", "2")),
        ({"window_size": "7,0", "window_attn_skip_freq": "2", "no_rope_freq": "[0,1]"}, ("7,0", "2", "[0,1]")),
        ({"window_size": None, "no_rope_freq": [0, 0]}, (None, None, "[0,0]")),
    ],
)
def test_a_checkpoint_says_which_layers_have_windows(saved: dict[str, Any], kept: tuple[str | None, ...]) -> None:
    """Megatron-LM's in numbers and lists, this project's in words of its flags; they come to the same."""
    of_model = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8}
    flags = "--micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --use-checkpoint-args --load here"
    flags += " --tokenizer-type NullTokenizer --vocab-size 8"
    args = {**of_model, "position_embedding_type": "rope", **saved}
    model = parse_args(flags.split(), environ={}, load_checkpoint_args=lambda _: args).model
    assert (model.window_size, model.window_attn_skip_freq, model.no_rope_freq) == kept
    shape = shape_fields(*kept, model.num_layers)
    assert shape["window"] == (8 if saved["window_size"] else 0)
    assert kinds_of_layers(2, (), shape["unrotated"])[1][1] == ("qkv.norope" if saved["window_size"] else "qkv")


@given(
    st.sampled_from(MODEL_SHAPE + ("tokenizer_type", "vocab_size")),
    st.sampled_from(["text", "", -3, 0, 10**30, 2.5, float("nan"), True, [], [1, "a"], {"a": 1}, (0.9,)]),
)
def test_whatever_a_checkpoint_says_of_its_model_is_taken_or_refused_in_a_sentence(name: str, value: Any) -> None:
    sound = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8}
    flags = "--micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --use-checkpoint-args --load here"
    try:
        parse_args(flags.split(), environ={}, load_checkpoint_args=lambda _: {**sound, name: value})
    except UserError as error:
        assert "\n" not in str(error) and str(error).endswith("."), str(error)
