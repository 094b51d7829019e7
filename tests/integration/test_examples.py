"""The scripts of examples/: their output and the commands they would launch, and minimal.py. tests/slurm runs them."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from helixpipe.costs.hardware import find_hardware
from helixpipe.program.stages import model_pieces
from helixpipe.simulate.simulator import simulate
from megatron.pretrain.plan.costs import model_shape, training_costs
from megatron.pretrain.plan.programs import full_batch
from netlab.hosts import Lab, unavailable
from tests.integration.example_scripts import (
    BATCH,
    EXAMPLES,
    PLANNED_AT_ONCE,
    SCRIPTS,
    commands,
    environment,
    fakes,
    launched,
    run,
)
from tests.integration.launching import ROOT
from tools.preflight import planned

__all__ = ["fakes"]  # a fixture

# A model that a CPU trains in no time, in place of any script's own: of a flag given twice the last counts.
ON_A_CPU = (
    "--tensor-model-parallel-size 1 --context-parallel-size 1 --no-sequence-parallel --no-bf16 --global-batch-size 8 "
    "--eval-iters 0 --num-workers 0"
)
SMALL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2 "
    f"--vocab-size 100 --seq-length 32 --max-position-embeddings 32 {ON_A_CPU}"
)

# ------------------------------------------------------------------------------------------------------- all scripts


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_scripts_are_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    if (shellcheck := shutil.which("shellcheck")) is not None:
        subprocess.run([shellcheck, "--severity=warning", "--external-sources", script], check=True)


# --------------------------------------------------------------------------------------------------- published setups


@pytest.mark.parametrize(
    ("turn", "schedule", "hardware"),
    [
        (0, "1f1b", "h20"),
        pytest.param(1, "1f1b", "a800", marks=pytest.mark.thorough),
        pytest.param(2, "helix", "h20", marks=pytest.mark.thorough),
        (3, "helix", "a800"),
    ],
)
def test_every_published_setup(turn: int, schedule: str, hardware: str, fakes: Path) -> None:
    """Model, batch and hardware are the published ones, and the program can run. What takes long to find is left out.
    Nodes take turns: each setup is met under one of the four at least."""
    from helixpipe.costs.models import MODELS

    models, lengths = ("1.3b", "3b", "7b"), (32, 64, 96, 128)
    for (i, model), (j, tokens) in product(enumerate(models), enumerate(lengths)):
        nodes = (2, 4, 8)[(i + j + turn) % 3]
        variables = {"MODEL": model, "SEQ": f"{tokens}k", "NODES": str(nodes), "HARDWARE": hardware}
        _, launch = commands("helixpipe/train.sh", fakes, SCHEDULE=schedule, EXTRA=PLANNED_AT_ONCE, **variables)
        config = launched(launch, 8 * nodes)
        shape, preset = model_shape(config), MODELS[f"helix-{model}"]
        assert (shape.layers, shape.hidden, shape.heads, shape.ffn) == (
            *(preset.layers, preset.hidden, preset.heads, preset.ffn),
        )
        assert (config.model.seq_length, training_costs(config).hardware.name) == (1024 * tokens, hardware)
        assert (config.parallel.pipeline_schedule, config.parallel.hardware) == (schedule, hardware)
        assert (config.parallel.pipeline_model_parallel_size, config.training.global_batch_size) == (nodes, 2 * nodes)
        assert config.parallel.tensor_model_parallel_size == 8
        assert config.parallel.sequence_parallel and not config.recompute.recompute_early


def test_the_prediction_is_the_simulators(fakes: Path) -> None:
    variables = {"MODEL": "1.3b", "SEQ": "32k", "NODES": "2", "EXTRA": "--chunk-size 8192"}
    done = run("helixpipe/train.sh", fakes, DRY_RUN="1", **variables, BIN=str(ROOT / ".venv/bin"))
    assert done.returncode == 0, done.stderr
    assert "Simulated, not measured" in done.stdout and "MLP over slices of 8192 tokens" in done.stdout
    assert "fits, with" in done.stdout and "--pipeline-schedule helix" in done.stdout


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [
        ("MODEL", "2b", "1.3b, 3b or 7b"),
        ("SEQ", "32768", "32k"),
        ("NODES", "two", "2, 4 or 8"),
        ("DATA", "x", "TOKENIZER"),
    ],
)
def test_wrong_variables_are_refused_in_one_line(name: str, value: str, valid: str, fakes: Path) -> None:
    done = run("helixpipe/train.sh", fakes, **{name: value})
    assert done.returncode != 0 and valid in done.stderr and done.stderr.count("\n") == 1 and done.stdout == ""


@pytest.mark.parametrize("script", ["helixpipe/train.sh", "weipipe/train.sh", "two_hosts.sh"])
def test_launching_needs_the_first_nodes_address(script: str, fakes: Path) -> None:
    done = run(script, fakes)
    assert done.returncode != 0 and "MASTER_ADDR" in done.stderr


# ---------------------------------------------------------------------------------------------------------- minimal.py


@pytest.mark.thorough
def test_minimal_trains_as_one_process_would() -> None:
    """It is what its 60 lines promise: a timeline of its cells, then the losses that plain autograd gets."""
    script = EXAMPLES / "minimal.py"
    assert len(script.read_text().splitlines()) <= 60
    done = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    first, second, *losses = done.stdout.splitlines()
    assert first == "rank 0 |F0F1    B0--F2B1---F3B2--  B3--|" and second.startswith("rank 1 |  F0B0--F1B1--")
    minimal: Any = runpy.run_path(str(script))
    pieces = model_pieces(2)
    toy, expected = minimal["Toy"](pieces), []
    for _ in range(5):
        loss = sum(toy.run(pieces, (), batch, None)[0] for batch in minimal["DATA"]) / 4
        loss.backward()
        torch.optim.SGD(toy.parameters(), lr=1).step()
        toy.zero_grad()
        expected.append(loss.item())
    assert [line.split(":")[0] for line in losses] == [f"step {number}" for number in range(5)]
    assert [float(line.split()[-1]) for line in losses] == pytest.approx(expected, abs=2e-5)
    assert expected[-1] < 0.8 * expected[0]


# --------------------------------------------------------------------------------------------------------------- SLURM


@pytest.mark.parametrize("script", BATCH, ids=lambda path: path.stem)
def test_batch_scripts_ask_for_what_resuming_needs(script: Path) -> None:
    options = dict(re.findall(r"^#SBATCH (--[\w-]+)(?:=(\S+))?$", script.read_text(), re.MULTILINE))
    assert options["--ntasks-per-node"] == "1" and options["--output"] == "logs/%x-%j.out"
    assert "--requeue" in options and options["--open-mode"] == "append"
    assert re.fullmatch(r"B:TERM@\d+", options["--signal"])


def test_tensor_parallelism_takes_one_hardware_queue(fakes: Path) -> None:
    (fakes / "python").write_text('#!/usr/bin/env bash\necho "${CUDA_DEVICE_MAX_CONNECTIONS:-unset}"\n')
    for size, queues in ((8, "1"), (1, "unset")):
        command = ["bash", EXAMPLES / "node.sh", "pretrain_gpt.py", "--tensor-model-parallel-size", str(size)]
        done = subprocess.run(command, env=environment(fakes), capture_output=True, text=True, check=True)
        assert done.stdout.split() == [queues]


def test_continued_training_names_what_it_misses(fakes: Path) -> None:
    for name, others in (("HF", {}), ("DATA", {"HF": "folder"})):
        done = run("slurm/continue_hf_h100.sbatch", fakes, **others)
        assert done.returncode != 0 and f"set {name} to" in done.stderr and done.stdout == ""


def test_the_script_for_h100_leaves_a_quarter_of_the_memory(fakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "32")
    _, launch = commands("slurm/continue_hf_h100.sbatch", fakes)
    config, plans = planned(launch[launch.index("pretrain_gpt.py") + 1 :])
    simulation = simulate(plans.plan(full_batch(config)).lowered, training_costs(config))
    assert max(simulation.device_needs) < 0.75 * find_hardware("h100").memory


# ----------------------------------------------------------------------------------------------------------- two hosts


@pytest.mark.netlab
def test_two_hosts_lose_one_and_resume(tmp_path: Path) -> None:
    """The script on two hosts joined by a network: one is killed, the other ends, and a relaunch goes on to the losses
    of an undisturbed run."""
    if reason := unavailable():
        pytest.skip(reason)

    def start(lab: Lab, name: str) -> list[tuple[subprocess.Popen[str], Path]]:
        hosts = []
        for host in range(2):
            log = tmp_path / f"{name}-{host}.txt"
            variables = {"MASTER_ADDR": lab.address(0), "NODE_RANK": str(host), "INTERFACE": "eth0", "SEQ": "32"}
            variables |= {"RUN": str(tmp_path / name.partition("-")[0]), "PREFLIGHT": "--preflight-seconds 1"}
            variables |= {"EXTRA": f"{SMALL} --train-iters 12 --save-interval 2 --attention-dropout 0"}
            variables |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
            with log.open("w") as output:
                script = ["bash", str(EXAMPLES / "two_hosts.sh")]
                options = {"cwd": ROOT, "env": {**os.environ, **variables}, "stdout": output}
                hosts.append((lab.start(host, script, **options, stderr=subprocess.STDOUT), log))
        return hosts

    def losses(hosts: list[tuple[subprocess.Popen[str], Path]]) -> dict[str, str]:
        return dict(re.findall(r" iteration +(\d+)/.*?lm loss: (\S+)", hosts[1][1].read_text()))

    with Lab(2, rate=1e9) as lab:
        broken = start(lab, "broken-1")
        while "successfully saved checkpoint from iteration       2" not in broken[0][1].read_text():
            assert broken[0][0].poll() is None, broken[0][1].read_text()
            time.sleep(0.02)
        lab.kill(1)
        assert broken[0][0].wait(60) not in (0, 75), "the other host ends by itself"
        assert not lab.processes(0)
        resumed, whole = start(lab, "broken-2"), None
        assert [host.wait(240) for host, _ in resumed] == [0, 0], resumed[0][1].read_text()
        whole = start(lab, "whole-1")
        assert [host.wait(240) for host, _ in whole] == [0, 0]
    assert "successfully loaded checkpoint" in resumed[0][1].read_text()
    expected = losses(whole)
    assert len(expected) == 12 and {**losses(broken), **losses(resumed)} == expected
    assert losses(broken).items() <= expected.items() and 0 < len(losses(resumed)) < 12
