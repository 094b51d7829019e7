"""A rank is killed at any point of a step: the others go on without its replica, or with all ranks again when what it
had in memory is gone, from the last step that was done, with the losses of an undisturbed run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.forked import Forked, run_forked
from tests.integration.launching import MOCK, Launch, Result
from tests.selection import graded

FLAGS = f"{MOCK} --pipeline-model-parallel-size 2 --train-iters 7 --in-memory-checkpoint-interval 1"
STEP = 4
CASES = [
    f"{rank} {point}, {how}{', shared' * shared}"
    for rank, point in ((0, "F"), (3, "B"), (1, "sum"), (2, "update"), (1, "snapshot"), (0, "agree"), (3, "copy"))
    for how in ("without it", "with all")
    for shared in (False, True)
]
CORE = ("2 update, without it, shared",)
SHARED = " --use-distributed-optimizer"


def folder_of(result: Result) -> Path:
    (path,) = re.findall(r"snapshots in host memory: .* in (\S+)/0$", result.output, re.MULTILINE)
    return Path(path)


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, float]:
    result = run_forked(Launch("undisturbed", FLAGS, ranks=4)).done()
    assert not any(folder_of(result).glob("*")), "memory is given back"
    return result.loss_values()


@pytest.fixture
def memory() -> Iterator[list[Path]]:
    folders: list[Path] = []
    yield folders
    for folder in folders:
        shutil.rmtree(folder)


@pytest.mark.parametrize("case", graded(CASES, CORE))
def test_losses_are_those_of_an_undisturbed_run(case: str, undisturbed: dict[int, float], memory: list[Path]) -> None:
    victim, how, *shared = case.split(", ")
    flags = FLAGS + SHARED * bool(shared)
    first = Forked(Launch(case, flags, ranks=4, script="tests/integration/dying.py"), DIES=f"{victim} {STEP}").wait()
    assert first.status != 0
    memory.append(folder := folder_of(first))
    lost, replicas = int(victim.split()[0]), 2
    if how == "with all":
        shutil.rmtree(folder / str(lost))
        second = run_forked(Launch(f"{case} again", flags, ranks=4)).done()
    else:  # those that are left, as ranks of this host
        left = [rank for rank in range(4) if rank % replicas != lost % replicas]
        for rank in (0, 1):
            (folder / str(left[rank])).rename(folder / f"left-{rank}")
        for rank in range(4):
            shutil.rmtree(folder / str(rank), ignore_errors=True)
        for rank in (0, 1):
            (folder / f"left-{rank}").rename(folder / str(rank))
        second = run_forked(Launch(f"{case} again", flags, ranks=2)).done()
    (start,) = map(int, re.findall(r"going on from the snapshots of iteration (\d+) in memory", second.output))
    before, after = first.loss_values(), second.loss_values()
    # Of what replicas share out, the neighbour's copy of the last step may have been on its way.
    assert max(before) - len(shared) <= start <= STEP
    assert sorted(after) == list(range(start + 1, 8))
    for values in (before, after):
        assert values == pytest.approx({step: undisturbed[step] for step in values}, rel=1e-6)


@pytest.mark.thorough
def test_where_there_is_no_other_replica_a_neighbour_has_what_was_lost(memory: list[Path]) -> None:
    """No disk is read: there are no checkpoints. Losses are equal to the digit."""
    undisturbed = run_forked(Launch("undisturbed", FLAGS)).done()
    script = "tests/integration/dying.py"
    first = Forked(Launch("one replica", FLAGS, script=script), DIES=f"1 sum {STEP}").wait()
    memory.append(folder := folder_of(first))
    shutil.rmtree(folder / "1")
    second = run_forked(Launch("one replica again", FLAGS)).done()
    # The copy of the last step was on its way.
    (start,) = map(int, re.findall(r"going on from the snapshots of iteration (\d+) in memory", second.output))
    assert start >= STEP - 2
    expected = undisturbed.losses()
    assert second.losses() == {step: expected[step] for step in range(start + 1, 8)}
    assert first.losses() == {step: expected[step] for step in first.losses()}
