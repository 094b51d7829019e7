"""Runs on the ranks of test_async_save.py."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron.pretrain.checkpoint import known, writing
from megatron.pretrain.checkpoint.lock import FolderLock
from megatron.pretrain.checkpoint.save_folder import SaveFolder
from megatron.pretrain.checkpoint.saving import Background
from tests.checkpoint import cases
from tests.checkpoint.cases import message, on_first, read
from tests.checkpoint.damage import SHARD, TRACKER, small_files, truncate
from tests.checkpoint.runs import Run

LAYOUTS = {
    "pp2": cases.PP,
    "tp2": cases.TP,
    "cp2": cases.CP,
    "dp2": cases.DP,
    "zero": cases.ZERO,
    "bf16 zero": cases.ZERO_BF16,
    "bf16 pp2": cases.BF16,
    "offloaded": cases.OFFLOADED,
    "half offloaded": cases.HALF_OFFLOADED,
    "sharded": cases.SHARDED,
    "spread head zero": cases.SPREAD_ZERO,
    "weipipe": cases.WEIPIPE,
    "untied wzb2": cases.WZB2_UNTIED,
}
OF_ONE_SAVE = {".metadata", "manifest.json"}  # torch gives each save a random name


class Held:
    """Writers that wait, once they have begun, until `go`."""

    def __init__(self) -> None:
        self._go = threading.Event()
        self._write = writing.CheckpointFiles.write

    def go(self) -> None:
        self._go.set()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Held]:
        def write(files: Any) -> Any:
            self._go.wait()
            return self._write(files)

        with mock.patch.object(writing.CheckpointFiles, "write", write):
            yield self


def all_cases(rank: int, world_size: int, folder: str, layouts: list[str]) -> dict[str, Any]:
    directory = Path(folder)
    results: dict[str, Any] = {}
    for name in layouts:
        results[name] = unlike_at_once(Run(LAYOUTS[name]).train(2), directory / name)
    results["in turn"] = in_turn(directory / "in turn")
    results["retained"] = retained(directory / "retained")
    failures(results, directory / "failures")
    results["locked"] = locked(directory / "locked")
    results["taken over"] = taken_over(directory / "taken over")
    results["given up"] = given_up(directory / "given up")
    results["resumed after a kill"] = resumed(directory / "killed")
    return results


def unlike_at_once(run: Run, directory: Path) -> str:
    """Save at once, and beside training that goes on before the first byte is written: files that differ, or what of
    this rank's state does once it is loaded."""
    expected = run.save(directory / "at once").tensors()
    saver = run.saver(directory / "beside", async_save=True)
    with Held()() as held:
        run.save_by(saver)
        newest = f"iter_{run.progress.iteration:07d}"
        saved = run.progress.iteration
        run.train(2)
        early = (directory / "beside" / newest).exists() or (directory / "beside" / TRACKER).exists()
        held.go()
        saver.settle()
    dist.barrier()
    folders = [directory / each / newest for each in ("at once", "beside")]
    names = [{path.name for path in each.iterdir()} for each in folders]
    if early or names[0] != names[1]:
        return f"{names}, there before it was written: {early}"
    same = [(folders[0] / name).read_bytes() == (folders[1] / name).read_bytes() for name in names[0] - OF_ONE_SAVE]
    if not all(same):
        return f"other files than {names[0] - OF_ONE_SAVE}: {same}"
    run.load(directory / "beside")
    equal = run.progress.iteration == saved and all(map(torch.equal, run.tensors(), expected))
    dist.barrier()
    return "" if equal else "another state"


def in_turn(directory: Path) -> list[str]:
    """Return what happens on this rank when a second checkpoint is due while the first is held up."""
    log: list[str] = []
    wait, begin, publish = Background.wait, SaveFolder.begin, SaveFolder.publish
    run = Run(cases.PP).train(1)
    saver = run.saver(directory, async_save=True)
    with Held()() as held:

        def waiting(background: Background) -> None:
            log.append("waits")
            held.go()
            wait(background)

        def beginning(folder: SaveFolder, iteration: int) -> Path:
            log.append(f"begins {iteration}")
            return begin(folder, iteration)

        def publishing(folder: SaveFolder, temporary: Path, files: Any, iteration: int) -> None:
            publish(folder, temporary, files, iteration)
            log.append(f"has {iteration}")

        with (
            mock.patch.object(Background, "wait", waiting),
            mock.patch.object(SaveFolder, "begin", beginning),
            mock.patch.object(SaveFolder, "publish", publishing),
        ):
            run.save_by(saver)
            saver.settle(wait=False)
            run.train(1).save_by(saver)
            saver.settle()
    return log


def retained(directory: Path) -> list[str]:
    run = Run(cases.ZERO)
    saver = run.saver(directory, async_save=True, save_retain_interval=4)
    for _ in range(6):
        run.train(1).save_by(saver)
    saver.settle()
    dist.barrier()
    return sorted(path.name for path in directory.iterdir())


# ------------------------------------------------------------------------------------------------------------- failures


def failures(results: dict[str, Any], directory: Path) -> None:
    """What is said of saves that fail, and what is there afterwards."""
    run = Run(replace(cases.PP, hidden_size=64)).train(1)  # tensors that no file's buffer holds
    rank = dist.get_rank()

    def attempt(name: str, async_save: bool, failure: Callable[[], Any]) -> None:
        saver = run.saver(directory, async_save=async_save)

        def save() -> None:
            run.save_by(saver)
            saver.settle()

        with failure():
            told = message(save)
        dist.barrier()
        results[name] = told, sorted(path.name for path in directory.iterdir())
        dist.barrier()

    def no_memory() -> Any:
        def copied(value: Any) -> Any:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes.")

        return mock.patch.object(writing, "_copied", copied) if rank == 1 else contextlib.nullcontext()

    for kind, beside in (("beside", True), ("at once", False)):
        attempt(f"first, {kind}", beside, lambda: small_files(1000 if rank == 1 else None))  # within an object
    run.save(directory).train(1)
    index = known.read_index(directory / "iter_0000001")
    here = [info for info in index.storage_data.values() if info.relative_path == SHARD]
    largest = max(here, key=lambda info: info.length)
    middle = largest.offset + largest.length // 2
    for kind, beside in (("beside", True), ("at once", False)):
        attempt(f"shard, {kind}", beside, lambda: small_files(middle if rank == 1 else None))
        attempt(f"common, {kind}", beside, lambda: small_files(1_000 if rank == 0 else None))
        attempt(f"index, {kind}", beside, lambda: index_does_not_fit() if rank == 0 else contextlib.nullcontext())
    attempt("no memory", True, no_memory)
    run.save(directory, async_save=True)
    results["afterwards"] = sorted(path.name for path in directory.iterdir())
    dist.barrier()


@contextlib.contextmanager
def index_does_not_fit() -> Iterator[None]:
    write_index = writing.CheckpointFiles.write_index

    def limited(files: Any, parts: Any) -> Any:
        with small_files(100):
            return write_index(files, parts)

    with mock.patch.object(writing.CheckpointFiles, "write_index", limited):
        yield


def locked(directory: Path) -> tuple[str, list[str]]:
    """Another job asks for the folder while a checkpoint is written; what is in it after both."""
    run = Run(cases.PP).train(1)
    saver = run.saver(directory, async_save=True)
    told = ""
    with saver.folder.locked(), Held()() as held:
        run.save_by(saver)
        if dist.get_rank() == 0:
            told = message(FolderLock(directory).acquire)
        held.go()
        saver.settle()
    dist.barrier()
    return told, sorted(path.name for path in directory.iterdir())


def taken_over(directory: Path) -> tuple[str, list[str]]:
    """Another job has taken the folder before a checkpoint was complete."""
    run = Run(cases.PP).train(1)
    saver = run.saver(directory, async_save=True)
    with saver.folder.locked(), Held()() as held:
        run.save_by(saver)
        on_first(lambda: other_lock(directory / ".lock"))
        held.go()
        told = message(saver.settle)
    dist.barrier()
    return told, sorted(path.name for path in directory.iterdir())


def given_up(directory: Path) -> tuple[str, list[str]]:
    """The run fails when all is written and nothing has its name yet."""
    run = Run(cases.PP).train(1)
    saver = run.saver(directory, async_save=True)
    complete, ended, publish = threading.Event(), threading.Event(), SaveFolder.publish

    def late(*args: Any) -> None:
        complete.set()
        ended.wait()
        publish(*args)

    with mock.patch.object(SaveFolder, "publish", late):
        with contextlib.suppress(KeyError), saver.folder.locked():
            run.save_by(saver)
            on_first(complete.wait)
            raise KeyError
        ended.set()
        told = message(saver.settle)
    dist.barrier()
    return told, sorted(path.name for path in directory.iterdir()) if directory.exists() else []


def other_lock(path: Path) -> None:
    text = path.read_text()
    token = text.split('"token": "')[1].split('"')[0]
    path.write_text(text.replace(token, "0" * len(token)))


# ---------------------------------------------------------------------------------------------------------------- kills


def killed(rank: int, world_size: int, folder: str) -> None:
    """Train on beside a save, whose writer on rank 1 dies with its process when its shard is there."""
    run = Run(cases.PP).train(3).save(folder).train(2)
    write = writing.CheckpointFiles.write

    def write_and_die(files: Any) -> Any:
        written = write(files)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    saver = run.saver(folder, load=folder, async_save=True)
    with saver.folder.locked(), mock.patch.object(writing.CheckpointFiles, "write", write_and_die):
        run.save_by(saver)
        while True:
            run.train(1)
            dist.barrier()


def resumed(directory: Path) -> dict[str, Any]:
    """Relaunch after `killed`."""
    left = sorted(path.name.partition("-")[0] for path in directory.iterdir())
    dist.barrier()
    run = Run(cases.PP, seed=2)
    run.load(directory)
    at = run.progress.iteration
    run.train(2).save(directory, locked=True, load=str(directory), async_save=True)
    whole = all(map(torch.equal, run.tensors(), Run(cases.PP).train(5).tensors()))
    return {"left": left, "at": at, "whole": whole, "then": sorted(path.name for path in directory.iterdir())}


class Moments:
    """Keeps what a kill at any moment would leave: copies of a folder, made before every change that this process makes
    in it, and with the file that it wrote last cut in half."""

    _CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")

    def __init__(self, folder: Path, copies: Path):
        self._folder, self._copies, self._busy = folder, copies, threading.local()
        self.active, self.count = False, 0
        self._last: Path | None = None
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.active or getattr(self._busy, "now", False):
            return
        opens = event == "open" and isinstance(args[0], str) and bool(args[2] & (os.O_WRONLY | os.O_RDWR))
        if not opens and event not in self._CHANGES:
            return
        path = Path(os.fsdecode(args[0]))
        if path.is_absolute() and self._folder not in path.parents:
            return
        self._busy.now = True
        try:
            self._copy(None)
            if self._last is not None and self._last.is_file():
                self._copy(self._last.relative_to(self._folder))
        finally:
            self._busy.now = False
        self._last = path if opens else None

    def _copy(self, torn: Path | None) -> None:
        copy = self._copies / f"{dist.get_rank()}-{self.count}"
        shutil.copytree(self._folder, copy)
        if torn is not None:
            truncate(torn.name)(copy / torn.parent)
        self.count += 1


def at_every_moment(rank: int, world_size: int, folder: str) -> list[tuple[str, int, int, bool]]:
    """Save beside training: a new checkpoint, the same again, and one that replaces another. For each moment and each
    rank's point of view: (its name, iterations that may be loaded from there, the one that is, whether it is right)."""
    directory = Path(folder, "saved")
    run = Run(cases.PP).train(3).save(directory)
    expected = {3: run.tensors()}
    saver = run.train(2).saver(directory, async_save=True, save_retain_interval=4)
    moments = Moments(directory, Path(folder, "moments"))
    bounds: list[tuple[int, int, int]] = []  # moments up to here, the least and the greatest iteration
    for least, greatest in ((3, 5), (5, 5), (5, 6)):
        if greatest != run.progress.iteration:
            run.train(1)
        expected[greatest] = run.tensors()
        dist.barrier()
        moments.active = True
        run.save_by(saver)
        run.train(1)
        saver.settle()
        moments.active = False
        run.load(directory)
        bounds.append((moments.count, least, greatest))
    every: list[Any] = [None] * world_size
    dist.all_gather_object(every, bounds)
    return [moment for each in range(world_size) for moment in loaded(Path(folder), each, every[each], expected)]


def loaded(folder: Path, rank: int, bounds: list[tuple[int, int, int]], expected: dict[int, Any]) -> list[Any]:
    found, seen = [], set()
    run = Run(cases.PP, seed=2)
    for moment in range(bounds[-1][0]):
        least, greatest = next((least, greatest) for count, least, greatest in bounds if moment < count)
        name = f"{rank}-{moment}"
        copy = folder / "moments" / name
        files = frozenset((str(path.relative_to(copy)), path.stat().st_size) for path in copy.rglob("*"))
        if (least, greatest, files) in seen:
            continue
        seen.add((least, greatest, files))
        with contextlib.redirect_stdout(io.StringIO()):
            run.load(folder / "moments" / name)
        at = run.progress.iteration
        right = least <= at <= greatest and all(map(torch.equal, run.tensors(), expected[at]))
        tracker = int(read(folder / "moments" / name / TRACKER))
        found.append((name, tracker, at, right))
    return found
