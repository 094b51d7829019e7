"""The folder of --save as all ranks of one job have it: for this job alone, and seen by every rank."""

from __future__ import annotations

import secrets
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from helixpipe.common.errors import CheckpointError
from megatron.pretrain.checkpoint import folder as folders
from megatron.pretrain.checkpoint.lock import FolderLock
from megatron.pretrain.checkpoint.options import CheckpointOptions
from megatron.pretrain.checkpoint.ranks import Exchange, NotWrittenError, appears, gather, on_first, place, writing


class SaveFolder:
    """The folder of --save; methods not documented as rank 0's alone are called on all ranks."""

    def __init__(self, options: CheckpointOptions):
        self._options = options
        self._lock: FolderLock | None = None
        self._owner = secrets.token_hex(8)  # without a lock nobody is its heir
        self._unfinished: Path | None = None
        self._given_up = False
        self._naming = threading.Lock()  # a checkpoint is given its name or given up
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
            self.check_seen(lock.path)
            yield
        finally:
            if dist.get_rank() == 0:
                self._give_up()
                lock.release()

    def _give_up(self) -> None:
        """Remove what a thread may still be writing, in a run that has failed."""
        with self._naming:
            self._given_up = True
            if self._unfinished is not None:
                shutil.rmtree(self._unfinished, ignore_errors=True)

    def _claim(self, lock: FolderLock) -> None:
        there = folders.iterations(self.path)
        if there and not self._options.continues and not self._options.overwrite_checkpoints:
            raise CheckpointError(
                f"--save {self.path} holds checkpoints up to iteration {there[0]}: continue them with --load "
                f"{self.path}, give another folder, or replace them with --overwrite-checkpoints."
            )
        lock.acquire()

    def begin(self, iteration: int) -> Path:
        """Create a temporary folder for one checkpoint."""
        self._unfinished = self.path / on_first(lambda: self._begin(iteration).name, self.where)
        return self._unfinished

    def _begin(self, iteration: int) -> Path:
        if self._lock is None:
            return folders.begin(self.path, iteration, self._owner)
        self._lock.check()
        return folders.begin(self.path, iteration, self._lock.token, self._lock.heir_of)

    @contextmanager
    def says_what_is_kept(self, exchange: Exchange) -> Iterator[None]:
        """Add to a CheckpointError of the block, which all ranks raise, which checkpoint is still kept."""
        try:
            yield
        except CheckpointError as error:
            newest = exchange.from_first(folders.read_tracker(self.path) if dist.get_rank() == 0 else None)
            kept = "no checkpoint is there yet" if newest is None else f"{folders.folder_name(newest)} is kept"
            raise CheckpointError(f"{str(error).rstrip('.')}; {kept}.") from error

    @contextmanager
    def removed_on_failure(self, temporary: Path) -> Iterator[None]:
        """Remove what is written of a checkpoint when the block fails, since the disk may be full."""
        try:
            yield
        except BaseException:  # another rank may have been killed
            if dist.get_rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def publish(self, temporary: Path, files: Mapping[str, list[int]], iteration: int) -> None:
        """Rename a complete checkpoint and point the tracker at it; the previous one is removed unless it is to be
        kept. On rank 0. Raises CheckpointError, NotWrittenError.
        """
        with self._naming:
            if self._given_up:
                raise NotWrittenError("the run has ended before all of it was written")
            if self._lock is not None:
                self._lock.check()
            previous = folders.read_tracker(self.path)
            with writing(temporary / folders.MANIFEST):
                folders.publish(temporary, files, iteration)
            self._unfinished = None
            with writing(self.path / folders.TRACKER):
                folders.write_tracker(self.path, iteration)
        keep = self._options.save_retain_interval
        if keep and previous is not None and previous < iteration and previous % keep:
            folders.remove(self.path / folders.folder_name(previous), self._lock.token if self._lock else self._owner)

    def check_seen(self, path: Path) -> None:
        """Check that every rank sees a file or folder that the first has created. Raises CheckpointError."""
        missing = [host for host in gather(None if appears(path) else place()) if host]
        if missing:
            raise CheckpointError(
                f"{self.where} is not seen by {', '.join(missing)}: every rank needs the same file system."
            )
