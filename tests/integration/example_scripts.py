"""The scripts of examples/, what they print in a dry run, and a Python that only prints what it was asked for."""

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
STARTED = [
    name if name != "slurm.sh" else "slurm.sh helixpipe"
    for path in SCRIPTS
    if (name := str(path.relative_to(EXAMPLES))) not in SOURCED
]
BATCH = sorted(EXAMPLES.rglob("*.sbatch"))

PYTHON = """\
#!/usr/bin/env bash
case "$*" in
    *tools/torchrun.py*) echo "started $*" ;;
    *--preflight-fastest*) echo weipipe ;;
    *) printf "PREDICT"; printf " %q" "$@"; echo ;;
esac
"""

PLANNED_AT_ONCE = "--no-recompute-early --recompute-granularity without-attention --loss-chunk-size 0"
"""Instead of searching for what to recompute, where, and whether the loss runs over slices."""


@pytest.fixture
def fakes(tmp_path: Path) -> Path:
    """A folder with that Python: what is predicted and what is launched, without either."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python").write_text(PYTHON)
    (folder / "python").chmod(0o755)
    return folder


def environment(fakes: Path, **variables: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PYTEST_"))}
    return {**inherited, "BIN": str(fakes), **variables}


def run(script: str, fakes: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", *f"{EXAMPLES}/{script}".split()],
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
