"""Work that all ranks do, or one for all: whatever fails, on whichever rank, is raised on all of them.

Ranks wait for one another through the job's key-value store. A process group for it would be a second one of all ranks
(the first has the job's timeout, which building an index outlasts), and over gloo each of its ranks has a connection to
every other: more than a process may have at a thousand ranks.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from helixpipe.common.errors import DataError, UserError

T = TypeVar("T")

_TIMEOUT = timedelta(hours=2)  # building an index may outlast the job's timeout many times

_STAY = 10.0  # seconds that rank 0 waits at most for the others to read a failure

_FAILURES_TOLD = 64
"""Ranks whose failure is written down: where thousands fail alike, all others would read thousands of lines."""


class AllRanks:
    """The ranks of the job, which call each method in the same order. Each call costs a rank a few requests to the
    store, in which the last rank to arrive lets the others go on.

    store: a torch.distributed store that all ranks share; None: there is one rank. timeout: of one call.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta = _TIMEOUT):
        self._rank, self._size, self._timeout = rank, size, timeout
        # A connection of its own where this torch has it: one is blocked for all threads while one of them waits.
        self._store = store.clone() if hasattr(store, "clone") else store

    @classmethod
    def of_job(cls) -> AllRanks:
        """Return the ranks of torch.distributed; one rank where it is not initialised."""
        if not dist.is_initialized():
            return cls(None, 0, 1)
        return cls(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())

    @property
    def is_first(self) -> bool:
        return self._rank == 0

    def together(self, work: Callable[[], T]) -> T:
        """Do `work` on every rank at once and return its result. Where it fails on any rank, raises there what it
        raised, and DataError with the lowest such rank's reason on all others.
        """
        return self._together(work)[0]

    def on_first(self, work: Callable[[], T]) -> T:
        """Do `work` on rank 0 and return its result, or raise its failure, on all. What it returns is pickled."""
        result, key = self._together(lambda: self._given(work) if self.is_first else None)
        if result is not None:
            return result[0]
        value: T = pickle.loads(self._store.get(f"{key}/value"))
        return value

    def _given(self, work: Callable[[], T]) -> tuple[T]:
        """Do the work, and put its result where the other ranks look for it once all have arrived."""
        result = work()
        if self._store is not None:
            self._store.set(f"{self._next_key(arrives=False)}/value", pickle.dumps(result))
        return (result,)

    def _next_key(self, arrives: bool) -> str:
        """Return the name of the call under way: ranks arrive at one when all have arrived at the one before."""
        arrived = self._store.add("all ranks/arrived", 1 if arrives else 0)
        call = (arrived - 1 if arrives else arrived) // self._size
        if arrives and arrived % self._size == 0:
            self._store.set(f"all ranks/{call}/all", "")
        return f"all ranks/{call}"

    def _together(self, work: Callable[[], T]) -> tuple[T, str]:
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        if self._store is None:
            if failure is not None:
                raise failure
            return result, ""
        if failure is not None:
            self._tell(failure)
        key = self._next_key(arrives=True)
        self._store.wait([f"{key}/all"], self._timeout)
        if not self._store.check([f"{key}/failures"]):
            return result, key
        told = self._store.get(f"{key}/failures").decode().splitlines()
        self._wait_for_readers(key)
        if failure is not None:
            raise failure
        rank, reason = min(map(json.loads, told))
        raise DataError(reason if rank == 0 else f"rank {rank}: {reason}")

    def _wait_for_readers(self, key: str) -> None:
        """Let rank 0, which may hold the store and ends after a failure, wait until every rank has read it."""
        readers, until = self._store.add(f"{key}/readers", 1), time.monotonic() + _STAY
        while self.is_first and readers < self._size and time.monotonic() < until:
            time.sleep(0.02)
            readers = self._store.add(f"{key}/readers", 0)

    def _tell(self, failure: Exception) -> None:
        key = self._next_key(arrives=False)
        if self.is_first or self._store.add(f"{key}/failed", 1) <= _FAILURES_TOLD:
            self._store.append(f"{key}/failures", json.dumps([self._rank, _sentence(failure)]) + "\n")


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
