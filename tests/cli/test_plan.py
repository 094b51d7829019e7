"""`helixpipe plan`: the command it prints trains what it planned."""

from __future__ import annotations

import dataclasses
import shlex

import pytest

from helixpipe.costs.models import MODELS
from megatron.training.arguments import parse_args
from megatron.training.plan.costs import model_shape
from schedules.command import USER_ERROR, main
from tests.cli.commands import run, run_json


def test_the_command_trains_what_was_planned(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run_json(
        capsys,
        "plan --model llama3-8b --hardware h100 --gpus 8 --seq-length 8192 --global-batch-size 2 --sppo-ahead 2 "
        "--top 2 --loss-chunk-size 2048 --optimizer-cpu-offload --host-memory 1000",
    )
    assert [plan["step_time"] for plan in printed["plans"]] == sorted(plan["step_time"] for plan in printed["plans"])
    plan = printed["plans"][1]
    words = shlex.split(plan["command"].replace("\\\n", ""))
    assert words[:5] == ["torchrun", "--nproc-per-node", "8", "--nnodes", "1"]
    config = parse_args(words[6:], environ={"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0"})
    shape = dataclasses.replace(MODELS["llama3-8b"], name="the model", seq_length=8192)
    assert dataclasses.replace(model_shape(config), vocab=shape.vocab) == shape
    parallel = config.parallel
    assert plan["tensor_parallel"] == parallel.tensor_model_parallel_size > 1 and parallel.sequence_parallel
    assert plan["pipeline_parallel"] == parallel.pipeline_model_parallel_size > 1
    assert (parallel.data_parallel_size, config.chunks.count()) == (plan["data_parallel"], plan["chunks"])
    assert config.schedule_options.sppo_ahead == 2
    assert (config.model.loss_chunk_size, parallel.host_memory) == (2048, 1000)
    assert config.training.optimizer_cpu_offload and config.training.optimizer_offload_fraction == 1


def test_adam_must_fit_into_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "plan --schedule 1f1b --model weipipe-1024 --gpus 1 --seq-length 4096 --optimizer-cpu-offload --host-memory"
    assert "1f1b, simulated" in run(capsys, f"{flags} 100")
    assert main([*flags.split(), "1"]) == USER_ERROR
    assert "the host's memory is too little: " in capsys.readouterr().err


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(
        capsys, "plan --schedule 1f1b --model weipipe-1024 --gpus 2 --seq-length 4096 --global-batch-size 4 --top 1"
    )
    assert "1f1b, simulated, not measured:" in text and text.count("torchrun") == 1
    assert "--nproc-per-node 2 --nnodes 1 pretrain_gpt.py" in text


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--gpus 8", "plan needs --model."),
        ("--model llama2-7b", "plan needs --gpus."),
        ("--model llama2-7b --gpus 12", "--gpus 12 must be a multiple of the 8 GPUs of a node."),
        ("--model llama2-7b --gpus 0", "--gpus 0 must be at least 1."),
        (
            "--model llama2-7b --gpus 8 --tensor-parallel 4",
            "--tensor-parallel 4 has no place in plan, which is given --gpus and finds the sizes.",
        ),
        ("--model llama2-7b --gpus 8 --helix-folds 1", "--helix-folds is an option of helix, not of sppo."),
    ],
)
def test_what_cannot_be_planned(capsys: pytest.CaptureFixture[str], flags: str, sentence: str) -> None:
    assert main(["plan", *flags.split()]) == USER_ERROR
    assert capsys.readouterr().err == f"helixpipe: {sentence}\n"
