"""`helixpipe train` with snapshots in memory: which ranks begin anew after one was killed, and when a job ends."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from helixpipe.cli import ranks
from helixpipe.cli.replicas import AWAY, RankLayout, Roster
from helixpipe.common import installed
from helixpipe.common.host_memory import ROOT, Hold, Stamp, folder_of, remove_orphans
from schedules import command

RANK = """
import json, os, pathlib, signal, socket, struct, sys, time
life = len(list(pathlib.Path(".").glob(f"started-{os.environ['LOCAL_RANK']}-*"))) + 1
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
rank, local, world = map(os.environ.get, names)
rank, world = rank or "-", world or "-"
pathlib.Path(f"started-{local}-{life}").write_text(" ".join([rank, world, *sys.argv[1:2]]))
mode = sys.argv[-3]  # before -p 2
while life == 1 and local == "1" and len(list(pathlib.Path(".").glob("started-*-1"))) < int(world):
    time.sleep(0.01)  # who dies does so once the others are there
def snapshot(step):
    parent = os.getppid()
    born = pathlib.Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    folder = pathlib.Path(f"/dev/shm/helixpipe-{parent}-{born}-{os.stat('/proc/self/ns/pid').st_ino}/{local}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "own-0").write_bytes(struct.pack("<qq48x", life, step))
if local == "1" and mode == "always":
    snapshot(5)  # what it has taken from memory, in each life anew
if local == "1" and (mode == "always" or life == 1):
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "fails" and local == "0":
    time.sleep(0.3); sys.exit(2)
if life == 1 or mode == "always":
    time.sleep(60)
if mode == "joins" and world == "2":
    snapshot(7); time.sleep(60)
"""

STAYS = """
if mode.startswith("stays"):
    channel = socket.socket(fileno=int(os.environ["HELIXPIPE_GROUPS"]))
    lines = channel.makefile()
    def say(word):
        channel.sendall((word + "\\n").encode())
    def join():
        say("waits")
        return json.loads(next(lines))
    group = dict(os.environ) if "RANK" in os.environ else join()
    for number in range(9):
        say("stays")
        with open(f"groups-{local}-{life}", "a") as file:
            file.write(f"{group['RANK']}/{group['WORLD_SIZE']} ")
        if local == "1" and (life == 1 or mode == "stays-again" and life < 4):
            while len(list(pathlib.Path(".").glob("groups-*-1"))) < int(group["WORLD_SIZE"]):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        last = life > 1 or number > 0
        if mode == "stays-again":
            last = len(list(pathlib.Path(".").glob("started-1-*"))) == 4
        if group["WORLD_SIZE"] == "4" and last:
            sys.exit(0)
        if group["WORLD_SIZE"] == "2":
            if mode == "stays-alone":
                time.sleep(1); sys.exit(0)
            snapshot(6 + number + life - 1)
        assert next(lines).strip() == ("join" if group["WORLD_SIZE"] == "2" else "leave")
        if mode == "stays-stuck" and life == 1:
            time.sleep(60)
        if mode == f"stays-without-{local}" and life == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        group = join()
"""
RANK = RANK.replace('if local == "1" and mode', STAYS + 'if local == "1" and mode', 1)
FLAGS = "-p 2 --ranks 4 --global-batch-size 4 --micro-batch-size 1 --in-memory-checkpoint-interval 1"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ranks are a small program instead of the training program."""
    package = tmp_path / "megatron" / "pretrain"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(RANK)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(installed, "TRAINING", {})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lives(folder: Path) -> dict[str, list[str]]:
    """What each rank, as numbered when all are there, was told in each of its lives: rank and world size."""
    told: dict[str, list[str]] = {}
    for path in sorted(folder.glob("started-*")):
        rank, world, _ = path.read_text().split(" ")
        told.setdefault(path.name.split("-")[1], []).append(f"{rank}/{world}")
    return told


def test_all_begin_anew_when_one_was_killed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(["train", *FLAGS.split(), "once"]) == 0
    assert lives(folder) == {str(rank): [f"{rank}/4"] * 2 for rank in range(4)}
    assert capfd.readouterr().err == (
        "helixpipe: rank 1 was ended by signal 9, Killed: 4 of 4 ranks go on after step 0.\n"
    )


def test_the_others_go_on_without_its_replica(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Ranks 1 and 3 are the second replica."""
    assert command.main(["train", *FLAGS.split(), "--rejoin-after", "1000", "once"]) == 0
    assert lives(folder) == {"0": ["0/4", "0/2"], "1": ["1/4"], "2": ["2/4", "1/2"], "3": ["3/4"]}
    assert "2 of 4 ranks go on" in capfd.readouterr().err


def test_the_lost_replica_joins_once_the_others_have_gone_on(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(["train", *FLAGS.split(), "--rejoin-after=1", "joins"]) == 0
    assert lives(folder)["0"] == ["0/4", "0/2", "0/4"] and lives(folder)["1"] == ["1/4", "1/4"]
    assert "helixpipe: lost replicas join after step 7." in capfd.readouterr().err
    assert not folder_of(os.getpid()).exists()


def groups(folder: Path) -> dict[str, str]:
    """The groups that each process was in, by its rank as numbered when all are there and its number among those."""
    return {path.name.removeprefix("groups-"): path.read_text().strip() for path in sorted(folder.glob("groups-*"))}


def test_those_that_live_keep_their_processes(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Ranks 1 and 3 are the second replica: rank 3 waits for the new rank 1, and so does nobody else."""
    assert command.main(["train", *FLAGS.split(), "stays"]) == 0
    assert groups(folder) == {"0-1": "0/4 0/2 0/4", "1-1": "1/4", "1-2": "1/4", "2-1": "2/4 1/2 2/4", "3-1": "3/4 3/4"}
    assert capfd.readouterr().err == (
        "helixpipe: rank 1 was ended by signal 9, Killed: 2 of 4 ranks go on after step 0, without a new start of "
        "those that live.\nhelixpipe: lost replicas join after step 7.\n"
    )


def test_a_replica_stays_away_until_its_time(folder: Path) -> None:
    assert command.main(["train", *FLAGS.split(), "--rejoin-after", "1000", "stays-alone"]) == 0
    assert groups(folder) == {"0-1": "0/4 0/2", "1-1": "1/4", "2-1": "2/4 1/2", "3-1": "3/4"}


def test_of_one_replica_the_others_wait_for_the_lost_rank(folder: Path) -> None:
    assert command.main(["train", *FLAGS.split(), "--tensor-model-parallel-size", "2", "stays"]) == 0
    assert groups(folder) == {"0-1": "0/4 0/4", "1-1": "1/4", "1-2": "1/4", "2-1": "2/4 2/4", "3-1": "3/4 3/4"}


def test_all_begin_anew_when_ranks_do_not_leave_in_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_LEAVING", 0.5)
    assert command.main(["train", *FLAGS.split(), "stays-stuck"]) == 0
    assert groups(folder) == {f"{rank}-{life}": f"{rank}/4" for rank in range(4) for life in (1, 2)}


def test_after_a_new_start_of_all_lost_replicas_join(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Once its ranks have been started, and not before."""
    monkeypatch.setattr(ranks, "_LEAVING", 0.5)
    assert command.main(["train", *FLAGS.split(), "--rejoin-after", "1", "stays-stuck"]) == 0
    anew = {"0-2": "0/2 0/4", "1-2": "1/4", "2-2": "1/2 2/4", "3-2": "3/4"}
    assert groups(folder) == {**{f"{rank}-1": f"{rank}/4" for rank in range(4)}, **anew}
    assert capfd.readouterr().err.count("lost replicas join") == 1


@pytest.mark.parametrize(("rank", "others"), [(3, "0/4 0/2 0/4"), (2, "0/4 0/4")])
def test_a_rank_that_ends_itself_instead_of_leaving_is_lost_too(folder: Path, rank: int, others: str) -> None:
    """Rank 3 is of the replica that is lost anyway; without rank 2 none is whole, and all wait for both."""
    assert command.main(["train", *FLAGS.split(), f"stays-without-{rank}"]) == 0
    kept = {2: {"3-1": "3/4 3/4"}, 3: {"2-1": "2/4 1/2 2/4"}}[rank]
    anew = {"1-1": "1/4", "1-2": "1/4", f"{rank}-1": f"{rank}/4", f"{rank}-2": f"{rank}/4"}
    assert groups(folder) == {"0-1": others, **kept, **anew}


def test_a_job_whose_replicas_join_gets_somewhere(folder: Path) -> None:
    """Three groups, though not one after the other, in which no step was done."""
    assert command.main(["train", *FLAGS.split(), "stays-again"]) == 0
    assert groups(folder)["0-1"] == "0/4 0/2 0/4 0/2 0/4 0/2 0/4"


def test_a_replica_whose_ranks_cannot_be_started_stays_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = ranks.Ranks.start

    def start_no_spare(job: ranks.Ranks, rank: int, group: Mapping[str, str] | None = None) -> None:
        if group is None:
            raise OSError(errno.EAGAIN, "no process")
        start(job, rank, group)

    monkeypatch.setattr(ranks.Ranks, "start", start_no_spare)
    assert command.main(["train", *FLAGS.split(), "stays-alone"]) == 0
    assert groups(folder) == {"0-1": "0/4 0/2", "1-1": "1/4", "2-1": "2/4 1/2", "3-1": "3/4"}


def test_a_rank_that_cannot_be_started_anew_ends_the_job_by_a_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*arguments: Any, **named: Any) -> subprocess.Popen[bytes]:
        if len(started) == 5:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(popen(*arguments, **named))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    before = len(os.listdir("/proc/self/fd"))
    assert command.main(["train", *FLAGS.split(), "once"]) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("helixpipe: rank 1 cannot be started: Resource temporarily unavailable. A host must have ")
    assert len(started) == 5 and all(each.poll() is not None for each in started)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_signal_between_two_starts_ends_the_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Roster, "lose", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert command.main(["train", *FLAGS.split(), "once"]) == 128 + signal.SIGTERM
    assert all(len(own) == 1 for own in lives(folder).values())


def test_a_job_that_gets_nowhere_ends(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = FLAGS.replace("--ranks 4", "--ranks 2")
    assert command.main(["train", *flags.split(), "always"]) == 128 + 9
    assert len(lives(folder)["1"]) == 4  # a step was done in the first
    assert capfd.readouterr().err.splitlines()[-1].startswith("helixpipe: rank 1 was ended by signal 9, Killed; if ")


def test_a_rank_that_fails_by_itself_ends_the_job(folder: Path) -> None:
    assert command.main(["train", *FLAGS.split(), "--rejoin-after", "1000", "fails"]) == 2
    assert len(lives(folder)["0"]) == 2


def test_no_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["train", "--rejoin-after", "soon"]) == command.USER_ERROR
    assert capsys.readouterr().err.startswith("helixpipe: --rejoin-after: 'soon' is not a number of seconds")


def test_ranks_are_numbered_as_megatron_core_does() -> None:
    flags = (
        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --global-batch-size 12 --micro-batch-size 2"
    )
    layout = RankLayout.of(flags.split(), 12)
    assert layout == RankLayout(2, 2, 3, (1, 2, 3))
    assert [layout.replica_of(full) for full in range(12)] == [0, 0, 1, 1, 2, 2] * 2
    assert layout.ranks([0, 1, 2]) == list(range(12))
    assert layout.ranks([0, 2]) == [0, 1, 4, 5, 6, 7, 10, 11]


@pytest.mark.parametrize(
    ("flags", "ranks", "layout"),
    [
        ("--global-batch-size 8 --micro-batch-size 1", 8, RankLayout(1, 1, 8, (1, 2, 4, 8))),
        ("--global-batch-size=6 --micro-batch-size=1", 3, RankLayout(1, 1, 3, (1, 2, 3))),
        ("--global-batch-size 6 --micro-batch-size 1 --rampup-batch-size 2 2 8", 3, RankLayout(1, 1, 3, (3,))),
        ("--micro-batch-size 1", 3, RankLayout(1, 1, 3, (3,))),
        ("--context-parallel-size 2 --global-batch-size 4 --micro-batch-size 1", 4, RankLayout(1, 2, 2, (1, 2))),
        ("--pipeline-model-parallel-size 2 --global-batch-size 4 --micro-batch-size 1", 3, RankLayout(1, 3, 1, (1,))),
    ],
)
def test_numbers_of_replicas_that_share_out_the_batch(flags: str, ranks: int, layout: RankLayout) -> None:
    assert RankLayout.of(flags.split(), ranks) == layout


def test_a_roster() -> None:
    roster = Roster(RankLayout(2, 1, 4, (1, 2, 4)), rejoin=10.0)
    assert roster.members(0.0) == [0, 1, 2, 3]
    roster.lose([1], Stamp(1, 5), now=100.0)
    assert roster.members(100.0) == [0, 2], "three cannot share out the batch"
    assert roster.members(109.9) == [0, 2] and roster.members(110.0) == [0, 1, 2, 3]
    assert roster.members(110.0, ready={0, 2, 3}) == [0, 2], "it has no processes yet"
    roster.lose([0], Stamp(1, 6), now=105.0)
    assert roster.members(105.0) == [2, 3]
    roster.lose([0, 1, 2, 3], Stamp(1, 6), now=120.0)
    assert roster.members(120.0) == [0, 1, 2, 3], "nothing trains on without them"


def test_a_replica_that_dies_again_stays_away_longer() -> None:
    roster = Roster(RankLayout(2, 1, 2, (1, 2)), rejoin=0.0)
    for step, deaths, away in ((5, 1, 0.0), (5, 2, AWAY), (5, 3, 2 * AWAY), (6, 4, 0.0), (6, 5, AWAY)):
        now = 1000.0 * deaths
        roster.lose([1], Stamp(deaths, step), now=now)
        assert roster.is_back(1, now + away) and (not away or not roster.is_back(1, now + away - 0.1)), deaths


def test_folders_of_launchers_that_are_gone_go() -> None:
    """Not those that somebody holds, who may have process ids of another container, nor this process's own."""
    own = folder_of(os.getpid())
    gone, held = ROOT / "helixpipe-999999999-1-2", ROOT / "helixpipe-999999999-2-2"
    for each in (gone, held, own):
        (each / "0").mkdir(parents=True, exist_ok=True)
    hold = Hold(held)
    try:
        remove_orphans()
        assert own.exists() and held.exists() and not gone.exists()
        hold.close()
        remove_orphans()
        assert own.exists() and not held.exists()
    finally:
        (own / "0").rmdir()
        own.rmdir()
