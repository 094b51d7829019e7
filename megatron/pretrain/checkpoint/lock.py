"""Locks a folder of checkpoints, so that one job at a time writes into it: a file in it says which. Local and shared
file systems alike.

DIR/.lock   host, pid and start of the job, and a count that goes up every few seconds

A lock is left behind when a job is killed. On the same machine its process is looked for; from another machine the
count is watched, since clocks differ: a job whose count stands still for a minute is dead. Of several that find the
same dead lock one takes it over: whoever makes the file `.lock.over-TOKEN` first, and then still finds that lock.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from helixpipe.common.errors import CheckpointError
from helixpipe.common.json_values import parse_json
from helixpipe.common.output import say
from helixpipe.common.processes import born

NAME = ".lock"
_BEAT, _PATIENCE = 10.0, 60.0  # seconds between two counts, and until one that stands still is dead
_UNREADABLE = "unreadable"
_WIDTH = 1024  # bytes of a lock, so that it is written over in place


@dataclass
class _Holder:
    """A job as its lock describes it. machine: host, boot and space of process ids; born: the kernel's start time of
    the process, which a later one of the same id does not have."""

    token: str
    host: str
    machine: str
    pid: int
    born: str
    since: float
    count: int = 0

    def lives(self) -> bool | None:
        """Whether the holder's process is alive; None if it is on another machine."""
        if self.machine != _machine():
            return None
        return born(self.pid) == self.born

    def __str__(self) -> str:
        seconds = max(0.0, time.time() - self.since)
        age = f"{seconds / 3600:.1f} hours" if seconds >= 5400 else f"{seconds / 60:.0f} minutes"
        return f"process {self.pid} on {self.host}, for {age}"


class FolderLock:
    """The lock of one folder, for one process of a job (rank 0)."""

    def __init__(self, folder: Path, *, beat: float = _BEAT, patience: float = _PATIENCE) -> None:
        self._folder, self._path = folder, folder / NAME
        self._beat, self._patience = beat, patience
        pid = os.getpid()
        self._me = _Holder(
            secrets.token_hex(8), socket.gethostname(), _machine(), pid, born(pid) or "", round(time.time(), 3)
        )
        self._made: list[Path] = []
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._count, name="save-lock", daemon=True)
        self.heir_of: tuple[str, ...] = ()
        """Tokens of dead jobs whose lock was taken over."""

    @property
    def token(self) -> str:
        """A name for this job that no other has."""
        return self._me.token

    @property
    def path(self) -> Path:
        return self._path

    def acquire(self) -> None:
        """Make the folder if it is missing and lock it. Takes up to a minute if a job on another host has left its
        lock. Raises CheckpointError if another job holds it, OSError.
        """
        self._made = [each for each in (self._folder, *self._folder.parents) if not each.exists()]
        self._folder.mkdir(parents=True, exist_ok=True)
        while not self._make(self._path, self._me):
            holder = self._stale()
            if holder is None:
                continue
            over = self._path.with_name(f"{NAME}.over-{holder.token}")
            if not self._make(over, self._me):
                over_holder = _read(over)
                if over_holder is None or over_holder.lives() is not False:
                    raise CheckpointError(
                        f"--save {self._folder} is being taken over from a dead job; if no other job is starting, "
                        f"remove {over} and {self._path}."
                    )
            current = _read(self._path)
            if (current.token if current is not None else _UNREADABLE) == holder.token:
                self._path.unlink(missing_ok=True)
                self.heir_of += (holder.token,)
            over.unlink(missing_ok=True)
        self._beats.start()

    def check(self) -> None:
        """Raise CheckpointError when another job has taken the folder meanwhile, as it may from a stopped one."""
        holder = _read(self._path)
        if holder is None and self._make(self._path, self._me):
            return
        holder = _read(self._path)
        if holder is None or holder.token != self._me.token:
            raise CheckpointError(f"--save {self._folder} was taken over by another job ({holder}).")

    def release(self) -> None:
        """Let go of the folder, which disappears when it was made by `acquire` and holds nothing."""
        self._ended.set()
        with suppress(OSError):
            holder = _read(self._path)
            if holder is not None and holder.token == self._me.token:
                self._path.unlink()
            for folder in self._made:
                folder.rmdir()

    def _stale(self) -> _Holder | None:
        """Return the dead job that holds the lock; None if the lock is gone. Raises CheckpointError if the
        job lives.
        """
        holder = _read(self._path)
        if holder is None:
            if not self._path.exists():
                return None
            holder = _Holder(_UNREADABLE, "an unknown host", "", 0, "", self._path.stat().st_mtime)
        living = holder.lives()
        if living is None:
            say(f" > --save {self._folder} is locked by {holder}: waiting to see whether that job still runs")
            living = self._moves(holder)
        if living:
            raise CheckpointError(
                f"--save {self._folder} is in use by another job ({holder}); give another folder, or end that job."
            )
        return holder

    def _moves(self, holder: _Holder) -> bool:
        """Whether, within the time to wait, the holder renews its lock or releases it."""
        deadline = time.monotonic() + self._patience
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._patience / 10))
            now = _read(self._path)
            if now is None and not self._path.exists():
                return False
            if now is not None and (now.token, now.count) != (holder.token, holder.count):
                return True
        return False

    def _make(self, path: Path, holder: _Holder) -> bool:
        """Create the file; return False if it already exists."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(_bytes(holder))
            stream.flush()
            os.fsync(descriptor)
        return True

    def _count(self) -> None:
        while not self._ended.wait(self._beat):
            with suppress(OSError):  # a file system may be away for a moment
                holder = _read(self._path)
                if holder is None or holder.token != self._me.token:
                    continue  # `check` says so before anything is written
                self._me.count += 1
                with self._path.open("r+b") as stream:
                    stream.write(_bytes(self._me))


def _bytes(holder: _Holder) -> bytes:
    return json.dumps(asdict(holder)).encode().ljust(_WIDTH)


def _read(path: Path) -> _Holder | None:
    """Return the contents of a lock file, or None if there is no readable one."""
    for _ in range(5):  # it may be half-written
        try:
            return _Holder(**parse_json(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):
            time.sleep(0.05)
    return None


def _machine() -> str:
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)
