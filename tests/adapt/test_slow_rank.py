"""Training with a rank that becomes slow: another order from then on, and the same losses to the digit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helixpipe.adapt.live import load
from tests.training.helpers import BASE

ROOT = Path(__file__).resolve().parents[2]
RANKS, SLOW, FIRST, LAST = 3, 1, 22, 36
FLAGS = (
    f"--num-layers 3 --micro-batch-size 1 --global-batch-size 6 --pipeline-model-parallel-size {RANKS} "
    f"--log-interval 1 --eval-interval 0 --eval-iters 0 --train-samples {6 * LAST} --memory-limit 10"
)


def losses(mode: str, seconds: float, folder: Path) -> tuple[list[str], str]:
    """The loss and norm of each iteration, and all that was printed."""
    folder.mkdir(exist_ok=True)
    program = str(ROOT / "tests/resilience/faulty.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", program]
    done = subprocess.run(
        [*command, *BASE.split(), *FLAGS.split(), "--replan", mode, "--watch-dir", str(folder)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "FAULT": f"slow {SLOW} {FIRST} {LAST} {seconds}"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return re.findall(r"lm loss: (\S+) .* grad norm: (\S+) ", done.stdout), done.stdout


@pytest.mark.thorough
def test_another_order_trains_to_the_same_digits(tmp_path: Path) -> None:
    changed, printed = losses("auto", 0.03, tmp_path)
    assert load(tmp_path).steps == LAST
    assert re.search(rf"rank {SLOW} is at 0\.\d+ of its speed", printed)
    assert "losses equal to the digit" in printed and "from iteration" in printed
    unchanged, _ = losses("off", 0.0, tmp_path / "off")
    assert len(changed) == LAST and changed == unchanged
