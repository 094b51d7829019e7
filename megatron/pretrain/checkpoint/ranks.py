"""Steps that all ranks take together: when one of them fails, every rank raises the same error, and none waits."""

from __future__ import annotations

import pickle
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from helixpipe.common import output
from helixpipe.common.errors import CheckpointError, UserError
from megatron.pretrain.checkpoint import folder as folders

T = TypeVar("T")
_VISIBLE_WITHIN = 10.0  # seconds a network file system may take to show a new folder to other nodes


_Failure = tuple[bool, str]
"""A failure: whether it is a sentence for the user, and the sentence or the reason."""

_LONGEST_POLL = 1.0  # seconds between two looks into the store


class DamagedError(Exception):
    """A checkpoint turned out unusable; an older one may do."""


class NotWrittenError(Exception):
    """A file cannot be written. The message names it and says why."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise NotWrittenError if the block cannot write this file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise NotWrittenError(f"{folders.shown(path)} could not be written ({reason})") from None


def gather(value: T) -> list[T]:
    """Return every rank's value, in the order of ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def together(action: Callable[[], T], where: str | None = None) -> T:
    """Run `action` on every rank and return its result; when one rank fails, all do, with the first rank's reason.

    Raises CheckpointError for a UserError, and for any other failure too when `where` says what was worked on,
    else DamagedError.
    """
    result, failure, mine = _tried(action)
    failures = [each for each in gather(failure) if each is not None]
    if failures:
        raise _error(failures[0], where) from mine
    return result  # type: ignore[return-value]


def _tried(action: Callable[[], T]) -> tuple[T | None, _Failure | None, BaseException | None]:
    """Return (result, None, None), or None, what other ranks are told of the error, and the error."""
    try:
        return action(), None, None
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        return None, (isinstance(error, UserError), _reason(error)), error


def _error(failure: _Failure, where: str | None) -> Exception:
    by_user, reason = failure
    if by_user:
        return CheckpointError(reason)
    return DamagedError(reason) if where is None else CheckpointError(f"{where}: {reason}.")


def on_first(action: Callable[[], T], where: str) -> T:
    """Run `action` on rank 0 and return its result on every rank. Raises CheckpointError on all when it fails."""
    results: list[Any] = [together(lambda: action() if dist.get_rank() == 0 else None, where)]
    dist.broadcast_object_list(results, src=0)
    result: T = results[0]
    return result


class Exchange(Protocol):
    """Communication of all ranks with rank 0: results to it, its answer back; each method is called on all ranks."""

    def to_first(self, value: Any) -> list[Any] | None:
        """Return every rank's value in the order of ranks on rank 0, None on the others."""
        ...

    def from_first(self, value: Any) -> Any:
        """Rank 0's value."""
        ...


class Collectives:
    """Exchange over the job's process group, in order with the main thread's other collectives."""

    def to_first(self, value: Any) -> list[Any] | None:
        values = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(value, values)
        return values

    def from_first(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]


class ThroughStore:
    """Exchange over a key-value store that all ranks share: for threads, since a process group runs one collective at a
    time.

    name: a unique name of this exchange. The store is polled rather than waited on: a connection on which one thread
    waits serves no other thread.
    """

    def __init__(self, store: Any, name: str):
        self._store, self._name = store, f"checkpoint/{name}"
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._answers = 0

    def to_first(self, value: Any) -> list[Any] | None:
        if self._rank != 0:
            self._store.set(f"{self._name}/{self._rank}", pickle.dumps(value))
            return None
        return [value, *(self._take(f"{self._name}/{rank}") for rank in range(1, self._size))]

    def from_first(self, value: Any) -> Any:
        self._answers += 1
        key = f"{self._name}/answer {self._answers}"
        if self._rank == 0:
            self._store.set(key, pickle.dumps(value))  # it stays: some bytes, which nobody reads last
            return value
        return self._wait(key)

    def _take(self, key: str) -> Any:
        value = self._wait(key)
        self._store.delete_key(key)
        return value

    def _wait(self, key: str) -> Any:
        pause = 0.01
        while not self._store.check([key]):
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_POLL)
        return pickle.loads(self._store.get(key))


def completed(own: Callable[[], T], finish: Callable[[list[T]], None], exchange: Exchange, where: str) -> None:
    """Run `own` on every rank and then, where none failed, `finish` with all results on rank 0.

    Raises CheckpointError on all ranks when one fails, with the first rank's reason.
    """
    result, failure, mine = _tried(own)
    parts = exchange.to_first((result, failure))
    if parts is not None:
        failure = next((each for _, each in parts if each is not None), None)
        if failure is None:
            _, failure, mine = _tried(lambda: finish([each for each, _ in parts]))
    failure = exchange.from_first(failure)
    if failure is not None:
        raise _error(failure, where) from mine


def _reason(error: BaseException) -> str:
    """Return an error in one line; torch's collective ones name the first rank's."""
    failures = getattr(error, "failures", None)
    if failures:
        return _reason(next(iter(failures.values()))[0])
    if isinstance(error, (UserError, NotWrittenError, folders.MalformedError)):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def say(line: str) -> None:
    if dist.get_rank() == 0:
        output.say(line)


def place() -> str:
    return f"rank {dist.get_rank()} on {socket.gethostname()}"


def appears(path: Path) -> bool:
    """Whether a new file or folder becomes visible on this rank within `_VISIBLE_WITHIN` seconds."""
    deadline = time.monotonic() + _VISIBLE_WITHIN
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
