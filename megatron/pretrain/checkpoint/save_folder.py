"""The folder of --save as all ranks of one job have it: for this job alone, and seen by every rank."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from helixpipe.common.errors import CheckpointError
from megatron.pretrain.checkpoint import folder as folders
from megatron.pretrain.checkpoint.lock import FolderLock
from megatron.pretrain.checkpoint.options import CheckpointOptions
from megatron.pretrain.checkpoint.ranks import appears, gather, on_first, place


class SaveFolder:
    """Where checkpoints go; `begun` and `locked` are entered, and `publish` called, on all ranks."""

    def __init__(self, options: CheckpointOptions):
        self._options = options
        self._lock: FolderLock | None = None
        self._owner = secrets.token_hex(8)  # without a lock nobody is its heir
        self.path = Path(options.save or "")
        self.where = f"--save {self.path}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Have the folder for this job alone, where --save is given.

        Raises CheckpointError when another job has it, when it holds checkpoints that this run would replace without
        continuing them, and when some rank does not see it.
        """
        if self._options.save is None:
            yield
            return
        lock = FolderLock(self.path)
        try:
            on_first(lambda: self._claim(lock), self.where)
            self._lock = lock
            self._seen_by_all(lock.path)
            yield
        finally:
            if dist.get_rank() == 0:
                lock.release()

    def _claim(self, lock: FolderLock) -> None:
        there = folders.iterations(self.path)
        if there and not self._options.continues and not self._options.overwrite_checkpoints:
            raise CheckpointError(
                f"--save {self.path} holds checkpoints up to iteration {there[0]}: continue them with --load "
                f"{self.path}, give another folder, or replace them with --overwrite-checkpoints."
            )
        lock.acquire()

    @contextmanager
    def begun(self, iteration: int) -> Iterator[Path]:
        """A temporary folder for one checkpoint; removed when the block fails, since room may be what is missing."""
        path = self.path / on_first(lambda: self._begin(iteration).name, self.where)
        try:
            self._seen_by_all(path)
            yield path
        except BaseException:  # another rank may have been killed
            if dist.get_rank() == 0:
                shutil.rmtree(path, ignore_errors=True)
            raise

    def _begin(self, iteration: int) -> Path:
        if self._lock is None:
            return folders.begin(self.path, iteration, self._owner)
        self._lock.check()
        return folders.begin(self.path, iteration, self._lock.token, self._lock.heir_of)

    def publish(self, temporary: Path, files: Mapping[str, list[int]], iteration: int) -> None:
        """Give a complete checkpoint its name and point the tracker at it; the one before goes where it is not to be
        kept."""
        on_first(lambda: self._publish(temporary, files, iteration), self.where)

    def _publish(self, temporary: Path, files: Mapping[str, list[int]], iteration: int) -> None:
        previous = folders.read_tracker(self.path)
        folders.publish(temporary, files, iteration)
        folders.write_tracker(self.path, iteration)
        keep = self._options.save_retain_interval
        if keep and previous is not None and previous < iteration and previous % keep:
            folders.remove(self.path / folders.folder_name(previous), self._lock.token if self._lock else self._owner)

    def _seen_by_all(self, path: Path) -> None:
        missing = [host for host in gather(None if appears(path) else place()) if host]
        if missing:
            raise CheckpointError(
                f"{self.where} is not seen by {', '.join(missing)}: every rank needs the same file system."
            )
