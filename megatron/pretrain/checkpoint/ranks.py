"""Steps that all ranks take together: when one of them fails, every rank raises the same error, and none waits."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from helixpipe.common import output
from helixpipe.common.errors import CheckpointError, UserError

T = TypeVar("T")
_VISIBLE_WITHIN = 10.0  # seconds a network file system may take to show a new folder to other nodes


class DamagedError(Exception):
    """A checkpoint turned out unusable; an older one may do."""


def gather(value: T) -> list[T]:
    """Every rank's value, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def together(action: Callable[[], T], where: str | None = None) -> T:
    """Run `action` on every rank and return its result; when one rank fails, all do, with the first rank's reason.

    Raises CheckpointError for a UserError, and for any other failure too when `where` says what was worked on,
    else DamagedError.
    """
    result, failure, mine = None, None, None
    try:
        result = action()
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        mine, failure = error, (isinstance(error, UserError), _reason(error))
    failures = [each for each in gather(failure) if each is not None]
    if failures:
        by_user, reason = failures[0]
        if by_user:
            raise CheckpointError(reason) from mine
        if where is not None:
            raise CheckpointError(f"{where}: {reason}.") from mine
        raise DamagedError(reason) from mine
    return result  # type: ignore[return-value]


def on_first(action: Callable[[], T], where: str) -> T:
    """Run `action` on rank 0 and return its result on every rank. Raises CheckpointError on all when it fails."""
    results: list[Any] = [together(lambda: action() if dist.get_rank() == 0 else None, where)]
    dist.broadcast_object_list(results, src=0)
    result: T = results[0]
    return result


def _reason(error: BaseException) -> str:
    """An error in one line; torch's collective ones name the first rank's."""
    failures = getattr(error, "failures", None)
    if failures:
        return _reason(next(iter(failures.values()))[0])
    if isinstance(error, UserError):
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
    """Whether a new file or folder becomes visible here soon."""
    deadline = time.monotonic() + _VISIBLE_WITHIN
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
