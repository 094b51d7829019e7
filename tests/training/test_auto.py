"""`--pipeline-schedule auto`: what is found is as if its flags had been given, and goes on from a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from helixpipe.common.errors import UserError
from megatron.pretrain.arguments import parse_and_plan, parse_args
from megatron.pretrain.config import CheckpointConfig, Config
from megatron.pretrain.plan.programs import full_batch

ENVIRON = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
MODEL = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 8192 --max-position-embeddings 8192 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 1 --lr 1e-4 --bf16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 1000 --pipeline-model-parallel-size 2"
)
AUTO = f"{MODEL} --pipeline-schedule auto"


def parsed(words: str, saved: dict[str, Any] | None = None) -> Config:
    def load(options: CheckpointConfig) -> dict[str, Any] | None:
        return saved

    return parse_args(words.split(), environ=ENVIRON, load_checkpoint_args=load)


def test_what_is_found_is_as_if_given(capsys: pytest.CaptureFixture[str]) -> None:
    config, plans = parse_and_plan(f"{AUTO} --hardware h100".split(), environ=ENVIRON)
    found, why = config.parallel.auto_schedule, config.parallel.auto_schedule_why
    assert found is not None and why is not None and " s a step on paper" in why and " % longer (most of it: " in why
    assert config.parallel.pipeline_schedule == found.split()[1] != "auto"
    given, others = parse_and_plan(f"{MODEL} --hardware h100 {found}".split(), environ=ENVIRON)
    size = full_batch(config)
    assert plans.plan(size).program == others.plan(size).program
    flags = config.replace("parallel", auto_schedule=None, auto_schedule_why=None)
    assert flags.flat() == given.flat()
    _, slower = parse_and_plan(f"{MODEL} --hardware h100 --pipeline-schedule 1f1b".split(), environ=ENVIRON)
    assert plans.plan(size).simulation.makespan < slower.plan(size).simulation.makespan


def test_flags_that_are_given_hold() -> None:
    config = parsed(f"{AUTO} --hardware h100 --pipe-sp-splits 2 --recompute-granularity full --memory-limit 70")
    assert config.chunks.count() == 2 and config.recompute.granularity == "full"
    assert "--pipe-sp-splits 2" in (config.parallel.auto_schedule or "")
    assert config.parallel.memory_limit == 70


def test_a_checkpoint_keeps_what_was_chosen() -> None:
    """Unless it was for other sizes, or flags ask for a new search."""
    flags = f"{AUTO} --hardware h100 --load somewhere --pipe-sp-splits 1"
    saved = parsed(f"{MODEL} --pipeline-schedule gpipe").flat()
    saved["auto_schedule"] = "--pipeline-schedule gpipe --loss-chunk-size 0"
    config = parsed(flags, saved)
    assert config.parallel.pipeline_schedule == "gpipe" and config.parallel.auto_schedule == saved["auto_schedule"]
    assert "kept from the checkpoint" in (config.parallel.auto_schedule_why or "")
    for words, other in ((flags, {**saved, "global_batch_size": 8}), (f"{flags} --search-schedule-anew", saved)):
        again = parsed(words, other)
        assert again.parallel.pipeline_schedule != "gpipe"
        assert "a step on paper" in (again.parallel.auto_schedule_why or "")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("", "--pipeline-schedule auto needs --hardware, whose costs and memory it plans with, and no --cost-profile."),
        (
            "--hardware h100 --helix-folds 2",
            "--helix-folds says what --pipeline-schedule auto finds; leave one of them",
        ),
        ("--hardware h100 --offload-activations 0.5", "--offload-activations says what --pipeline-schedule auto finds"),
        ("--hardware h100 --decoder-first-pipeline-num-layers 1", "--pipeline-schedule auto plans with equally many"),
        ("--hardware h100 --memory-limit 0.6", "--pipeline-schedule auto: with --tensor-model-parallel-size 1 and "),
        ("--hardware h100 --memory-limit 0.01", "--pipeline-schedule auto: no schedule takes --tensor-model-parallel"),
    ],
)
def test_what_cannot_be_searched(flags: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        parsed(f"{AUTO} {flags}")
    assert str(error.value).startswith(sentence)
