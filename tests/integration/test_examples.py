"""examples/helixpipe: what its scripts print and launch, without launching it."""

from __future__ import annotations

import os
import shlex
import subprocess
from itertools import product
from pathlib import Path

import pytest

from helixpipe.cli_model import ModelOptions, Plan, make_plan
from helixpipe.cli_options import ShapeOptions
from helixpipe.cli_parser import parsers
from helixpipe.flags import dataclass_from_namespace
from megatron.training.arguments import parse_args
from megatron.training.config import Config
from schedules import SCHEDULES

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/helixpipe"


def run(script: str, tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script with these variables; `helixpipe` and what SLURM offers print what they are given."""
    for name, does in (
        ("helixpipe", 'printf "PREDICT"; printf " %q" "$@"; echo'),
        ("scontrol", "echo first; echo second"),
        ("srun", 'while [[ $1 = --* ]]; do shift; done; exec "$@"'),
    ):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "BIN": str(tmp_path),
        **variables,
    }
    return subprocess.run([FOLDER / script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


def commands(script: str, tmp_path: Path, **variables: str) -> tuple[list[str], list[str]]:
    """The arguments of `helixpipe` and the words of the launch that a dry run prints."""
    done = run(script, tmp_path, DRY_RUN="1", **variables)
    assert done.returncode == 0, done.stderr
    prediction, _, launch = done.stdout.splitlines()
    return shlex.split(prediction)[1:], shlex.split(launch.partition(":")[2])


def predicted(words: list[str]) -> Plan:
    parser, _ = parsers({schedule.name: schedule.options for schedule in SCHEDULES.values()})
    namespace = parser.parse_args(words)
    size = dataclass_from_namespace(ShapeOptions, namespace)
    plan = make_plan(dataclass_from_namespace(ModelOptions, namespace), size.ranks, size.microbatches, size.layers)
    assert plan is not None
    return plan


def launched(words: list[str], nodes: int) -> Config:
    """The configuration of a launch, its program checked."""
    assert words[words.index("--nnodes") + 1] == str(nodes)
    return parse_args(words[words.index("pretrain_gpt.py") + 1 :], environ={"WORLD_SIZE": str(8 * nodes)})


@pytest.mark.parametrize(
    ("turn", "schedule", "hardware"),
    [(turn, *pair) for turn, pair in enumerate(product(("1f1b", "helix"), ("h20", "a800")))],
)
def test_every_published_setup(turn: int, schedule: str, hardware: str, tmp_path: Path) -> None:
    """Simulator and training get the same model, batch and hardware, and the program can run. Recomputation inside the
    backwards leaves out what takes long to find. Nodes take turns: each setup is met under one of the four at least."""
    extra = "--no-recompute-early"
    models, lengths = ("1.3b", "3b", "7b"), (32, 64, 96, 128)
    for (i, model), (j, tokens) in product(enumerate(models), enumerate(lengths)):
        nodes = (2, 4, 8)[(i + j + turn) % 3]
        variables = {"MODEL": model, "SEQ": f"{tokens}k", "NODES": str(nodes), "HARDWARE": hardware}
        prediction, launch = commands("train.sh", tmp_path, SCHEDULE=schedule, EXTRA=extra, **variables)
        plan, config = predicted(prediction), launched(launch, nodes)
        shape = plan.costs.model
        assert prediction[:2] == ["simulate", schedule] and extra in prediction
        assert (shape.name, plan.costs.hardware.name) == (f"helix-{model}", hardware)
        assert (plan.ranks, plan.gpus, plan.sequences) == (nodes, 8 * nodes, 2 * nodes)
        assert (config.model.num_layers, config.model.hidden_size) == (shape.layers, shape.hidden)
        assert (config.model.num_attention_heads, config.model.ffn_hidden_size) == (shape.heads, shape.ffn)
        assert config.model.seq_length == plan.costs.seq_length == 1024 * tokens
        assert (config.parallel.pipeline_schedule, config.parallel.hardware) == (schedule, hardware)
        assert (config.parallel.pipeline_model_parallel_size, config.training.global_batch_size) == (nodes, 2 * nodes)
        assert config.parallel.tensor_model_parallel_size == plan.costs.layout.tensor_parallel == 8
        assert config.parallel.sequence_parallel and not config.recompute.recompute_early


def test_the_prediction_is_the_simulators(tmp_path: Path) -> None:
    variables = {
        "MODEL": "1.3b",
        "SEQ": "32k",
        "NODES": "2",
        "EXTRA": "--chunk-size 8192",
        "BIN": str(ROOT / ".venv/bin"),
    }
    done = run("train.sh", tmp_path, DRY_RUN="1", **variables)
    assert done.returncode == 0, done.stderr
    assert "Simulated, not measured" in done.stdout and "MLP over slices of 8192 tokens" in done.stdout
    assert "fits, with" in done.stdout and "--pipeline-schedule helix" in done.stdout


def test_slurm_launches_on_all_nodes_of_the_job(tmp_path: Path) -> None:
    job = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "node[0-3]"}
    _, launch = commands("slurm.sh", tmp_path, **job, DATA="data/mine", TOKENIZER="folder")
    assert launch[launch.index("--rdzv-endpoint") + 1] == "first:29500"
    data = launched(launch, 4).data
    assert (data.data_path, data.tokenizer_model, data.mock_data) == (("data/mine",), "folder", False)


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [
        ("MODEL", "2b", "1.3b, 3b or 7b"),
        ("SEQ", "32768", "32k"),
        ("NODES", "two", "2, 4 or 8"),
        ("DATA", "x", "TOKENIZER"),
    ],
)
def test_wrong_variables_are_refused_in_one_line(name: str, value: str, valid: str, tmp_path: Path) -> None:
    done = run("train.sh", tmp_path, **{name: value})
    assert done.returncode != 0 and valid in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""


def test_launching_needs_the_first_nodes_address(tmp_path: Path) -> None:
    done = run("train.sh", tmp_path)
    assert done.returncode != 0 and "MASTER_ADDR" in done.stderr
