"""Training on a program in a JSON file is training under the schedule it was written from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helixpipe.common.errors import UserError
from helixpipe.program.files import save_program
from helixpipe.program.program import Program
from helixpipe.program.workload import uniform
from megatron.pretrain.plan.programs import make_program
from tests.distributed import run_ranks
from tests.lowering.offloads import offloading_program
from tests.training.steps import Run, figures_of_runs

SCHEDULES = ["helix", "seq1f1b --chunk-lengths 6,8,2 --recompute-granularity selective"]


def program(flags: str) -> Program:
    config = Run("llama", f"--pipeline-schedule {flags}", pp=2).config(0, 2)
    return make_program(config, config.training.global_batch_size or 1)


@pytest.mark.thorough
def test_the_losses_are_those_of_the_schedule(tmp_path: Path) -> None:
    """Wherever activations are between forward and backward."""
    runs = []
    for number, flags in enumerate(SCHEDULES):
        path = tmp_path / f"{number}.json"
        save_program(program(flags), path)
        runs += [Run("llama", f"--pipeline-schedule {each}", pp=2, steps=2) for each in (flags, path)]
    offloading = tmp_path / "offloading.json"
    save_program(offloading_program(program(SCHEDULES[-1]), 0), offloading)
    runs.append(Run("llama", f"--pipeline-schedule {offloading}", pp=2, steps=2))
    for found in run_ranks(figures_of_runs, 2, runs, timeout=300.0):
        assert found[0] == found[1]
        assert found[2] == found[3] == found[4]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--pipe-sp-splits 3", "says itself how long its chunks are, and it is not"),
        ("--num-layers 8", "layers, but the run has 8."),
        ("--recompute-granularity full", "says itself what is recomputed"),
        ("--seq-length 32 --max-position-embeddings 32", "do not add up to the sequence's 32 tokens"),
    ],
)
def test_flags_that_disagree_with_the_file(tmp_path: Path, flags: str, says: str) -> None:
    path = tmp_path / "x.json"
    save_program(program(SCHEDULES[1]), path)
    with pytest.raises(UserError, match=says) as caught:
        Run("llama", f"--pipeline-schedule {path} {flags}", pp=2).config(0, 2)
    assert path.name in str(caught.value)


def test_a_file_that_says_no_lengths_is_cut_as_the_schedule(tmp_path: Path) -> None:
    """So that chunks take equally long, as `helixpipe simulate` cuts it."""
    path, length = tmp_path / "x.json", "--seq-length 8192 --max-position-embeddings 8192"
    schedule = program(f"seq1f1b --pipe-sp-splits 3 {length}")
    save_program(replace(schedule, workload=uniform(len(schedule.workload), 3)), path)
    assert schedule.chunk_lengths is not None and len(set(schedule.chunk_lengths)) == 3
    assert program(f"{path} {length}") == schedule
