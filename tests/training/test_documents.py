"""The command line about documents, and which ranks have to know where they end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helixpipe.common.errors import UserError
from helixpipe.planning.catalogue import Shape
from helixpipe.program.stages import Stage
from megatron.pretrain.arguments import split_unavailable
from megatron.pretrain.plan.pipeline import places_tokens
from megatron.pretrain.step.microbatches import BatchSchedule, run_length
from schedules import build
from tests.training.helpers import config

DOCUMENTS = "--variable-seq-lengths --micro-batch-size 1"


def test_steps_of_so_many_documents() -> None:
    found = config(f"{DOCUMENTS} --global-batch-size 7", world=3)
    assert (found.training.micro_batch_size, found.training.global_batch_size) == (1, 7)
    assert found.training.calculate_per_token_loss is True and found.data.long_documents == "truncate"
    schedule = BatchSchedule.from_config(found)
    assert schedule.at(0) == schedule.final() == (3, 7)
    assert run_length(found, schedule) == (10, 70)
    by_samples = config(f"{DOCUMENTS} --global-batch-size 7", length="--train-samples 30")
    assert run_length(by_samples, BatchSchedule.from_config(by_samples)) == (4, 28)


def test_steps_of_so_many_tokens() -> None:
    found = config(f"{DOCUMENTS} --max-tokens 32", world=2)
    assert found.training.global_batch_size == 2  # the learning rate's unit
    assert run_length(found, BatchSchedule.from_config(found)).iterations == 10


def test_the_loss_of_samples_of_equal_length_is_as_it_was() -> None:
    assert config().training.calculate_per_token_loss is False
    assert config("--no-calculate-per-token-loss").training.calculate_per_token_loss is False
    assert config("--calculate-per-token-loss").training.calculate_per_token_loss is True


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--max-tokens 64", "--max-tokens 64 is of steps of documents: it needs --variable-seq-lengths"),
        ("--variable-seq-lengths --max-tokens 64", "--micro-batch-size 2 does not go with --variable-seq-lengths"),
        (DOCUMENTS, "needs either --global-batch-size, documents a step, or --max-tokens"),
        (f"{DOCUMENTS} --global-batch-size 4 --max-tokens 64", "needs either --global-batch-size"),
        (f"{DOCUMENTS} --max-tokens 31", "--max-tokens 31 must be at least --seq-length 32, the longest document"),
        (
            f"{DOCUMENTS} --global-batch-size 4 --no-calculate-per-token-loss",
            "--no-calculate-per-token-loss does not go",
        ),
        (f"{DOCUMENTS} --global-batch-size 4 --rampup-batch-size 2 2 8", "--rampup-batch-size does not go with"),
        (f"{DOCUMENTS} --global-batch-size 4 --ddp-average-in-collective", "--ddp-average-in-collective cannot be"),
        ("--long-documents drop", "--long-documents"),
        ("--sft", "--sft reads conversations from .jsonl files, so --mock-data does not go with it"),
        ("--sft-tokenizer-prompt-format nemotron-nano-v2", "valid are default and identity"),
    ],
)
def test_what_does_not_go_together_is_told(flags: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        config(flags)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_documents_for_every_rank_and_steps_of_tokens_by_iterations() -> None:
    with pytest.raises(UserError, match="--global-batch-size 3 gives some of 4 data-parallel ranks no document"):
        config(f"{DOCUMENTS} --global-batch-size 3", world=4)
    with pytest.raises(UserError, match="--train-samples does not go with --max-tokens"):
        config(f"{DOCUMENTS} --max-tokens 64", length="--train-samples 30")


def test_a_tokenizer_for_conversations_is_one_of_hugging_face() -> None:
    words, (warning,) = split_unavailable(["--tokenizer-type", "SFTTokenizer", "--tokenizer-model", "somewhere"])
    assert words == ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "somewhere"]
    assert "SFTTokenizer as --tokenizer-type HuggingFaceTokenizer" in warning


@pytest.mark.parametrize("schedule", ["1f1b", "helix", "chimera", "wzb2", "weipipe"])
def test_whoever_runs_attention_needs_the_boundaries(schedule: str) -> None:
    """Also a rank in the middle, and one that has none of the weights it runs with."""
    program = build(schedule, Shape(4, 8, 8))
    assert all(places_tokens(program, rank) for rank in range(4))


def test_a_rank_without_layers_needs_none() -> None:
    program = build("1f1b", Shape(2, 2, 2))
    embed, *layers = program.stages[0].pieces
    assert embed.kind == "embed"
    stages = (Stage((embed,)), Stage((*layers, *program.stages[1].pieces)))
    moved = replace(program, stages=stages)
    assert [places_tokens(moved, rank) for rank in range(2)] == [False, True]
