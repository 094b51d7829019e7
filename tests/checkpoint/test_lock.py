"""One job at a time in a folder of checkpoints, and none kept out by a job that is dead."""

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from helixpipe.common.errors import CheckpointError
from megatron.pretrain.checkpoint import lock as locks
from megatron.pretrain.checkpoint.lock import FolderLock


def quick(folder: Path) -> FolderLock:
    return FolderLock(folder, beat=0.02, patience=0.5)


def left_by(folder: Path, **changes: Any) -> None:
    """A lock as another job left it, or still has it."""
    first = quick(folder)
    first.acquire()
    described = json.loads(first.path.read_bytes())
    first.release()
    folder.mkdir(exist_ok=True)
    first.path.write_text(json.dumps({**described, "token": "0123", **changes}))


def dead_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_second_job_is_refused_and_told_by_whom(tmp_path: Path) -> None:
    first, second = quick(tmp_path / "save"), quick(tmp_path / "save")
    first.acquire()
    with pytest.raises(CheckpointError, match=rf"in use by another job \(process {os.getpid()} on .*, for 0 minutes\)"):
        second.acquire()
    first.check()
    first.release()
    second.acquire()
    assert second.heir_of == ()
    second.release()
    assert not (tmp_path / "save").exists(), "a folder that was made and holds nothing goes, too"


@pytest.mark.parametrize("changes", [{"pid": "dead"}, {"born": "1"}], ids=["killed", "its number given to another"])
def test_a_job_killed_on_this_machine_is_replaced_at_once(tmp_path: Path, changes: dict[str, Any]) -> None:
    left_by(tmp_path, **{key: dead_process() if value == "dead" else value for key, value in changes.items()})
    lock = FolderLock(tmp_path, patience=3600.0)
    lock.acquire()
    assert lock.heir_of == ("0123",)
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_job_on_another_machine_lives_while_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = quick(tmp_path), quick(tmp_path)
    monkeypatch.setattr(locks, "_machine", lambda: "elsewhere")
    third = quick(tmp_path)
    monkeypatch.undo()
    third.acquire()
    with pytest.raises(CheckpointError, match="in use by another job"):
        first.acquire()
    third.release()
    left_by(tmp_path, machine="elsewhere")
    second.acquire()
    assert second.heir_of == ("0123",)
    second.release()


def test_nonsense_in_the_place_of_a_lock_keeps_nobody_out(tmp_path: Path) -> None:
    (tmp_path / locks.NAME).write_text("{")
    lock = quick(tmp_path)
    lock.acquire()
    lock.check()
    lock.release()


def test_a_job_that_lost_its_folder_does_not_save(tmp_path: Path) -> None:
    """As one that was stopped for minutes."""
    lock = FolderLock(tmp_path)
    lock.acquire()
    content = json.loads(lock.path.read_bytes())
    lock.path.write_text(json.dumps({**content, "token": "another", "pid": 77}))
    with pytest.raises(CheckpointError, match=r"was taken over by another job \(process 77 on "):
        lock.check()
    lock.release()
    assert lock.path.exists(), "it is the other job's"
    lock.path.unlink()
    lock.check()  # somebody cleared the folder: it is locked anew
    assert json.loads(lock.path.read_bytes())["token"] == lock.token


def test_one_of_several_takes_over(tmp_path: Path) -> None:
    dead = dead_process()
    for _ in range(10):
        left_by(tmp_path, pid=dead)
        contenders = [FolderLock(tmp_path) for _ in range(8)]

        def try_it(lock: FolderLock) -> bool:
            try:
                lock.acquire()
            except CheckpointError:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            won = [lock for lock, got in zip(contenders, pool.map(try_it, contenders), strict=True) if got]
        assert len(won) == 1
        won[0].check()
        won[0].release()
        assert list(tmp_path.iterdir()) == []
