"""A step is planned with the vocabulary that the model then has, whatever the tokenizer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixpipe.common.errors import UserError
from megatron.pretrain.arguments import parse_and_plan
from megatron.pretrain.config import CheckpointConfig, core
from megatron.pretrain.config.vocabulary import padded_vocabulary
from megatron.pretrain.data.tokenizer import tokenizer_of
from megatron.pretrain.data.tokenizer_flags import LIBRARIES
from megatron.pretrain.plan.costs import training_costs
from megatron.pretrain.plan.programs import full_batch
from tests.huggingface.test_folder import make
from tests.integration.forked import run_forked
from tests.integration.launching import MODEL, Launch
from tests.selection import graded
from tests.training.helpers import config as parsed
from tests.training.tokenizers import FLAGS, every_package, huggingface_folder
from tools.preflight import planned

__all__ = ["every_package"]  # a fixture

ONE = f"{MODEL} --mock-data --train-iters 2"


@pytest.mark.usefixtures("every_package")
@pytest.mark.parametrize("kind", LIBRARIES)
def test_the_planned_vocabulary_is_the_models(kind: str, tmp_path: Path) -> None:
    flags = f"{ONE} --tokenizer-type {kind} {FLAGS[kind](tmp_path)} --make-vocab-size-divisible-by 1"
    config, plans = parse_and_plan(flags.split(), environ={})
    tokens = tokenizer_of(config.data).vocab_size
    costs: Any = plans.costs
    assert core.gpt_options(config).vocab_size == costs.model.padded_vocab(1) == tokens
    assert tokens not in (128, 512 if kind != "ByteLevelTokenizer" else 0, 50257)
    config, plans = parse_and_plan(
        f"{flags} --make-vocab-size-divisible-by 24 --tensor-model-parallel-size 2".split(),
        environ={"WORLD_SIZE": "2"},
    )
    costs = plans.costs
    assert core.gpt_options(config).vocab_size == costs.model.padded_vocab(2) == -(-tokens // 48) * 48


@given(
    tokens=st.integers(1, 200_000),
    multiple=st.integers(1, 300),
    tp=st.sampled_from([1, 2, 3, 8]),
    saved=st.none() | st.integers(1, 200_000) | st.just("many"),
)
def test_rows_hold_all_tokens_and_are_divided_evenly(tokens: int, multiple: int, tp: int, saved: Any) -> None:
    given_flags = parsed().replace("data", vocab_size=None, padded_vocab_size=None)
    given_flags = given_flags.replace("model", make_vocab_size_divisible_by=multiple)
    given_flags = given_flags.replace("parallel", tensor_model_parallel_size=tp)
    rows = padded_vocabulary(given_flags, lambda: tokens, lambda: saved)
    assert rows >= tokens and rows % tp == 0
    if isinstance(saved, int) and saved >= tokens and saved % tp == 0:
        assert rows == saved
    else:
        assert rows - tokens < multiple * tp and rows % (multiple * tp) == 0


def test_a_tokenizer_is_read_only_where_no_flag_says_its_size(tmp_path: Path) -> None:
    """So that a plan can be made where the tokenizer is not."""
    absent = f"{ONE} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path / 'none'}"
    for size in ("--vocab-size 500 --make-vocab-size-divisible-by 8", "--padded-vocab-size 504"):
        assert parse_and_plan(f"{absent} {size}".split(), environ={})[0].padded_vocabulary == 504
    with pytest.raises(UserError, match="--tokenizer-type HuggingFaceTokenizer cannot be loaded from"):
        parse_and_plan(absent.split(), environ={})


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    huggingface_folder(tmp_path / "hf", words=300)
    flags = f"{ONE} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path / 'hf'} --padded-vocab-size"
    tokenizer_of(parse_and_plan(f"{flags} 300".split(), environ={})[0].data)
    with pytest.raises(UserError, match=r"HuggingFaceTokenizer has 300 tokens, more than the model's 299: leave --vo"):
        tokenizer_of(parse_and_plan(f"{flags} 299".split(), environ={})[0].data)


def test_a_checkpoint_keeps_its_rows_and_is_read_once() -> None:
    read = []

    def saved(checkpoint: CheckpointConfig) -> dict[str, int]:
        read.append(checkpoint.load)
        return {"padded_vocab_size": 640}

    flags = f"{ONE} --tokenizer-type ByteLevelTokenizer --load somewhere --pipeline-schedule auto --hardware h100"
    config, plans = parse_and_plan(flags.split(), environ={}, load_checkpoint_args=saved)
    costs: Any = plans.costs
    assert config.padded_vocabulary == costs.model.padded_vocab(1) == 640 and read == ["somewhere"]


def test_the_preflight_knows_a_folder_that_is_loaded(tmp_path: Path) -> None:
    """Its model and its vocabulary, as training does."""
    make(tmp_path / "model", vocab_size=14)
    huggingface_folder(tmp_path / "model", words=10)
    flags = "--micro-batch-size 1 --lr 1 --train-iters 1 --mock-data --use-checkpoint-args --load"
    config, plans = planned([*flags.split(), str(tmp_path / "model")])
    costs: Any = plans.costs
    assert (config.model.num_layers, config.model.seq_length, config.data.tokenizer_model) == (
        2,
        64,
        str(tmp_path / "model"),
    )
    assert config.padded_vocabulary == costs.model.padded_vocab(1) == 14


PARALLEL = "--pipeline-model-parallel-size 2"
WIDE = f"{ONE} --hidden-size 64 --tokenizer-type ByteLevelTokenizer {PARALLEL}"
LIMITED = {
    "adapipe": "--pipeline-schedule adapipe --memory-limit 0.01",
    "what is offloaded": "--pipeline-schedule 1f1b --offload-activations auto --memory-limit 0.01",
    "documents": "--pipeline-schedule infinipipe --variable-seq-lengths --memory-limit 0.01",
}
"""Less than GPT-2's vocabulary alone would take: 50304 rows of 64 channels, with gradients and Adam's state."""


@pytest.mark.parametrize("name", graded(list(LIMITED), ("adapipe",)))
def test_a_step_that_fits_is_not_refused(name: str, tmp_path: Path) -> None:
    flags = f"{WIDE} {LIMITED[name]}"
    with pytest.raises(UserError, match=r"memory|GiB"):
        parse_and_plan(f"{flags} --padded-vocab-size 50304".split(), environ={"WORLD_SIZE": "2"})
    assert len(run_forked(Launch(name, flags)).done().losses()) == 2


@pytest.mark.parametrize("flags", graded([PARALLEL, "--tensor-model-parallel-size 2"], (PARALLEL,)))
def test_planned_bytes_are_those_of_the_model_that_trains(flags: str, tmp_path: Path) -> None:
    """Of a tokenizer in files: what the preflight plans has the parameters that the training program counts."""
    huggingface_folder(tmp_path / "hf", words=700)
    words = (
        f"{ONE} --untie-embeddings-and-output-weights --make-vocab-size-divisible-by 8 --log-arguments {flags} "
        f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path / 'hf'}"
    )
    config, plans = parse_and_plan(words.split(), environ={"WORLD_SIZE": "2"})
    costs, program = training_costs(config), plans.program(full_batch(config))
    planned = [costs.bytes.parameters(program.pieces_of_rank(rank)) for rank in range(program.num_ranks)]
    output = run_forked(Launch(flags, words)).done().output
    counted = {
        (int(tp), int(pp)): int(number) for tp, pp, number in re.findall(r"parallel rank \((\d), (\d)\): (\d+)", output)
    }
    assert len(counted) == 2
    assert counted == {(tp, pp): planned[pp] for tp, pp in counted}
    assert "vocabulary 704" in output
