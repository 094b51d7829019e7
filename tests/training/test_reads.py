"""Around the pipeline, too, no step makes the host wait for the device: its batch, its tokens and its sums."""

from __future__ import annotations

import pytest

from tests.distributed import run_ranks
from tests.selection import graded
from tests.training.steps import Run, read_in_a_step

RUNS = [
    Run("gpt", "--pipeline-schedule 1f1b", pp=4),
    Run("gpt", "--pipeline-schedule chimera --use-distributed-optimizer", pp=2),
    Run("llama", "--calculate-per-token-loss --pipeline-schedule helix", pp=4),
    Run("llama", "--bf16 --pipeline-schedule zb1p --sequence-parallel", tp=2, pp=2, batch=4),
    Run("llama", "--fp16 --pipeline-schedule seq1f1b --pipe-sp-splits 2", pp=2),
]


@pytest.mark.parametrize("runs", graded((RUNS[2:4], RUNS), (RUNS[2:4],)), ids=("few", "all"))
def test_a_training_step_reads_no_number_of_a_tensor(runs: list[Run]) -> None:
    for found in run_ranks(read_in_a_step, 4, runs):
        assert found == list(map(str, runs))
