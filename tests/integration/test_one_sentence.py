"""Two ranks that fail print one sentence and nothing before it, by whichever program they are started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from helixpipe.common.ports import free_port
from tests.integration.launching import MOCK, MODEL, ROOT

P2 = "--pipeline-model-parallel-size 2 --train-iters 100"
FAILURES = {
    "data": (f"{MODEL} {P2} --tokenizer-type ByteLevelTokenizer --data-path no/prefix", "no/prefix.idx does not exist"),
    "checkpoint": (f"{MOCK} {P2} --load no/such --exit-on-missing-checkpoint", "--load no/such is not there"),
    "loss": (f"{MOCK} {P2} --lr 1e30", "the loss is "),
    "flag": (f"{MOCK} {P2} --lr fast", "--lr: 'fast' is not a number."),
}
CHECKPOINT = f"{MOCK} --pipeline-model-parallel-size 2 --load no/such"
TOOLS = {
    "generate": ("tools/generate.py", f"{CHECKPOINT} --max-new-tokens 1 --prompt 1", "no/such"),
    "evaluate": ("tools/evaluate.py", f"{CHECKPOINT} --text README.md --context 32", "no/such"),
    "preflight": ("tools/preflight.py", FAILURES["flag"][0], "--lr: 'fast' is not a number."),
}
TRAINING = "pretrain_gpt.py"


def environment(**more: object) -> dict[str, str]:
    """Return the environment of a fresh terminal."""
    names = ("RANK", "WORLD_SIZE", "TORCH_CPP_LOG_LEVEL", "CUDA_VISIBLE_DEVICES")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return {**kept, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in more.items()}}


def printed(commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]]) -> list[str]:
    """Run the commands at once; returns all their lines on standard error, once each has failed."""
    running = [
        subprocess.Popen(words, cwd=ROOT, env=each, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for words, each in zip(commands, environments, strict=True)
    ]
    try:
        lines = [line for process in running for line in process.communicate(timeout=240)[1].splitlines()]
    finally:
        for process in running:
            process.kill()
    assert all(process.returncode for process in running), lines
    return lines


def by_themselves(script: str, flags: str) -> list[str]:
    """Two ranks without a launcher, as srun starts them: rank 0 holds the store, and takes it along when it ends."""
    meeting = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [environment(RANK=rank, LOCAL_RANK=rank, **meeting) for rank in range(2)]
    return printed([[sys.executable, script, *flags.split()]] * 2, ranks)


def by_torchrun(script: str, flags: str) -> list[str]:
    """Leave out what torchrun itself says after its ranks."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    lines = printed([[sys.executable, *torchrun, script, *flags.split()]], [environment()])
    return lines[: next(number for number, line in enumerate(lines) if "torch/distributed/elastic" in line)]


def by_helixpipe(script: str, flags: str) -> list[str]:
    command = str(Path(sys.executable).parent / "helixpipe")
    return printed([[command, "train", "--ranks", "2", *flags.split()]], [environment()])


DOORS = {"helixpipe train": by_helixpipe, "no launcher": by_themselves, "torchrun": by_torchrun}


@pytest.mark.parametrize(
    ("door", "failure"),
    [
        pytest.param(*pair, marks=[] if pair == ("helixpipe train", "data") else pytest.mark.thorough)
        for pair in product(DOORS, FAILURES)
    ],
)
def test_training_that_fails(door: str, failure: str) -> None:
    flags, words = FAILURES[failure]
    (line,) = DOORS[door](TRAINING, flags)
    assert line.startswith("helixpipe: ") and words in line


@pytest.mark.thorough
@pytest.mark.parametrize("door", ["no launcher", "torchrun"])
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_that_fails(tool: str, door: str) -> None:
    script, flags, words = TOOLS[tool]
    (line,) = DOORS[door](script, flags)
    assert words in line
