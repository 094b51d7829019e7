"""The scripts of examples/, and fakes of what they start."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron.pretrain.arguments import parse_args
from megatron.pretrain.config import Config
from megatron.pretrain.launch import saved_arguments
from tests.integration.launching import ROOT

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted([*EXAMPLES.rglob("*.sh"), *EXAMPLES.rglob("*.sbatch")])
SOURCED = ("launch.sh", "node.sh", "published.sh", "slurm/llama3_8b.sh")
STARTED = [name for path in SCRIPTS if (name := str(path.relative_to(EXAMPLES))) not in SOURCED]
BATCH = sorted(EXAMPLES.rglob("*.sbatch"))

# What SLURM and torchrun offer, as far as the scripts use it. `srun` starts a task a node, here all of them on this
# machine, passes SIGUSR1 to them and ends with the greatest of their exit statuses.
FAKES = {
    "python": """
        case "$*" in *--preflight-fastest*) echo weipipe; exit ;; esac
        printf "PREDICT"; printf " %q" "$@"; echo
    """,
    "torchrun": 'echo "${CUDA_DEVICE_MAX_CONNECTIONS:-unset} $SLURM_NODEID$(printf " %q" "$@")"',  # in one write
    "scontrol": """
        if [ "$1" = show ]; then echo 127.0.0.1; echo second; else echo "scontrol $*"; fi
    """,
    "srun": """
        while [[ $1 = --* ]]; do shift; done
        for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do SLURM_NODEID=$node "$@" & tasks+=($!); done
        trap 'again=1; kill -USR1 "${tasks[@]}"' USR1
        trap 'kill -KILL "${tasks[@]}"; exit 143' TERM
        for task in "${tasks[@]}"; do
            again=1
            while [ -n "$again" ]; do again=''; wait "$task" && status=0 || status=$?; done
            [ "$status" -lt "${most:-0}" ] || most=$status
        done
        exit "$most"
    """,
}
JOB = {"SLURM_JOB_ID": "4321", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "node[0-1]"}

PLANNED_AT_ONCE = "--no-recompute-early --recompute-granularity without-attention --loss-chunk-size 0"
"""Instead of searching for what to recompute, where, and whether the loss runs over slices."""


@pytest.fixture
def fakes(tmp_path: Path) -> Path:
    """A folder with the fake commands."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, does in FAKES.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{does}\n")
        (folder / name).chmod(0o755)
    return folder


def environment(fakes: Path, **variables: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PYTEST_"))}
    return {**inherited, "PATH": f"{fakes}:{os.environ['PATH']}", "BIN": str(fakes), **variables}


def run(script: str, fakes: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", EXAMPLES / script],
        cwd=ROOT,
        env=environment(fakes, **variables),
        capture_output=True,
        text=True,
        timeout=280,
    )


def commands(script: str, fakes: Path, **variables: str) -> tuple[list[str], list[str]]:
    """The words of the prediction and of the launch that a dry run prints."""
    done = run(script, fakes, DRY_RUN="1", **variables)
    assert done.returncode == 0, done.stderr
    prediction, _, launch = done.stdout.splitlines()
    return shlex.split(prediction)[1:], shlex.split(launch.partition(":")[2])


def launched(words: list[str], ranks: int) -> Config:
    """The configuration of a launch, its program checked."""
    flags = words[words.index("pretrain_gpt.py") + 1 :]
    return parse_args(flags, environ={"WORLD_SIZE": str(ranks)}, load_checkpoint_args=saved_arguments)
