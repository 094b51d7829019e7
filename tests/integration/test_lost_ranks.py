"""A rank is killed at any point of a step: the others go on without its replica, or with all ranks again when what it
had in memory is gone, from the last step that was done, with the losses of an undisturbed run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helixpipe.common.groups_channel import JOIN, LEAVE, STAYS, WAITS
from tests.distributed import store_of_a_launch
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
SHARED = " --use-distributed-optimizer"


def folder_of(result: Result) -> Path:
    path, *_ = re.findall(r"snapshots in host memory: .* in (\S+)/\d$", result.output, re.MULTILINE)
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


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
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


# ------------------------------------------------------------------------------------------ those that live stay as is


class Launcher:
    """Stands for `helixpipe train` to forked ranks that say what they do on a socket."""

    def __init__(self, folder: Path):
        self.path = folder / "launcher"
        self._listener = socket.create_server(str(self.path), family=socket.AF_UNIX)
        self._ranks: dict[int, Any] = {}

    def meet(self, count: int) -> None:
        for _ in range(count):
            connection = self._listener.accept()[0]
            connection.settimeout(60.0)
            channel = connection.makefile("rw")
            self._ranks[int(channel.readline())] = channel

    def regroup(self, ranks: list[int]) -> None:
        """Have these ranks, which are in a group, leave it, and all that are not lost make the next."""
        for rank in ranks:
            self._tell(rank, LEAVE)
        for rank in ranks:
            while self._ranks[rank].readline().strip() != WAITS:
                pass
        self._store = store_of_a_launch()
        members = [rank for rank in ranks if {rank % 2, rank % 2 + 2} <= set(ranks)]  # whose replica is whole
        size = {"WORLD_SIZE": str(len(members)), "LOCAL_WORLD_SIZE": str(len(members))}
        for place, rank in enumerate(members):
            self._tell(rank, json.dumps({**size, "RANK": str(place), "MASTER_PORT": str(self._store.port)}))

    def answers(self, rank: int, words: str) -> str:
        if words:
            self._tell(rank, words)
        return str(self._ranks[rank].readline()).strip()

    def _tell(self, rank: int, words: str) -> None:
        self._ranks[rank].write(f"{words}\n")
        self._ranks[rank].flush()


STAYING = [case for case in CASES if "without it" in case]


@pytest.mark.parametrize("case", graded(STAYING, ("1 sum, without it, shared",)))
def test_others_go_on_in_their_processes(
    case: str, undisturbed: dict[int, float], memory: list[Path], tmp_path: Path
) -> None:
    """No step is lost that was done: what the lost ranks had is still in the host's memory."""
    victim, _, *shared = case.split(", ")
    launcher, flags, lost = Launcher(tmp_path), FLAGS + SHARED * bool(shared), int(victim.split()[0])
    launch = Launch(case, flags, ranks=4, script="tests/integration/dying.py")
    job = Forked(launch, DIES=f"{victim} {STEP}", STAYS=str(launcher.path))
    try:
        launcher.meet(4)
        assert job.wait_for_rank(lost) == -signal.SIGKILL
        others = [rank for rank in range(4) if rank != lost]
        launcher.regroup(others)
        waits = (lost + 2) % 4
        assert [job.wait_for_rank(rank) for rank in others if rank != waits] == [0, 0]
        os.kill(job.rank(waits), signal.SIGKILL)
        result = job.wait()
    finally:
        job.end()
    memory.append(folder_of(result))
    assert "Traceback" not in result.output, result.output
    done = [int(step) for step in re.findall(r"iteration +(\d+)/", result.output)]
    (start,) = map(int, re.findall(r"going on from the snapshots of iteration (\d+) in memory", result.output))
    assert STEP - 1 <= start <= STEP
    assert [step for step in range(1, 8) if step not in done] in ([], [start]) and len(done) == len(set(done))
    values = result.loss_values()
    assert values == pytest.approx({step: undisturbed[step] for step in values}, rel=1e-6)


def test_a_rank_alone_in_its_group_leaves_it_for_others(tmp_path: Path) -> None:
    """It has no connection that could be closed."""
    launcher, flags = Launcher(tmp_path), FLAGS.replace("size 2", "size 1", 1)
    launch = Launch("alone", flags, ranks=1, script="tests/integration/dying.py")
    job = Forked(launch, STAYS=str(launcher.path))
    try:
        launcher.meet(1)
        assert launcher.answers(0, "") == STAYS
        assert launcher.answers(0, JOIN) == WAITS
        store = store_of_a_launch()
        again = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_PORT": str(store.port)}
        assert launcher.answers(0, json.dumps(again)) == STAYS
        result = job.wait().done()
    finally:
        job.end()
    assert sorted(result.loss_values()) == list(range(1, 8))


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
