"""Ranks that wait for one another through a store: threads of this process with a connection each."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from helixpipe.common.errors import DataError
from megatron.pretrain.data.together import AllRanks


class Counting:
    """A store that counts requests."""

    def __init__(self, store: Any) -> None:
        self._store, self.requests = store, 0

    def __getattr__(self, name: str) -> Any:
        if name == "clone":
            raise AttributeError(name)
        self.requests += 1
        return getattr(self._store, name)


def ranks(size: int) -> list[AllRanks]:
    store = HashStore()
    return [AllRanks(store, rank, size, timedelta(seconds=30)) for rank in range(size)]


def on_all(every: list[AllRanks], call: Callable[[int, AllRanks], Any]) -> list[Any]:
    """What the call returns or raises on each rank."""

    def tried(rank: int) -> Any:
        try:
            return call(rank, every[rank])
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(every)) as pool:
        return list(pool.map(tried, range(len(every))))


def fail(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize("size", [1, 2, 5])
def test_calls_follow_one_another(size: int) -> None:
    """Each returns its own result, and no rank gets ahead of the others."""
    arrived: list[tuple[int, int]] = []

    def several(rank: int, group: AllRanks) -> list[Any]:
        results = []
        for call in range(3):
            results.append(group.together(lambda call=call: arrived.append((call, rank)) or 10 * call + rank))  # type: ignore[misc]
            results.append(group.on_first(lambda call=call: [call, rank]))  # type: ignore[misc]
        return results

    results = on_all(ranks(size), several)
    assert results == [[each for call in range(3) for each in (10 * call + rank, [call, 0])] for rank in range(size)]
    assert [call for call, _ in arrived] == sorted(call for call, _ in arrived)


class SlowReader(Counting):
    """The store of a rank that is slow to read why the work of another has failed."""

    def get(self, key: str) -> bytes:
        time.sleep(0.3)
        value: bytes = self._store.get(key)
        self.read_at = time.monotonic()
        return value


def test_rank_0_which_may_hold_the_store_ends_after_all_have_read_its_failure() -> None:
    store = HashStore()
    slow = SlowReader(store)
    every = [AllRanks(each, rank, 2, timedelta(seconds=30)) for rank, each in enumerate((store, slow))]

    def work(rank: int, group: AllRanks) -> float:
        with pytest.raises(DataError):
            group.together(lambda: fail(DataError("short")) if rank == 0 else None)
        return time.monotonic()

    assert on_all(every, work)[0] > slow.read_at


def test_the_lowest_failing_rank_is_told() -> None:
    errors = {1: OSError("stale"), 3: DataError("short")}

    def work(rank: int, group: AllRanks) -> Any:
        return group.together(lambda: fail(errors[rank]) if rank in errors else rank)

    every = ranks(4)
    results = on_all(every, work)
    assert results[1] is errors[1] and results[3] is errors[3]
    assert [str(results[rank]) for rank in (0, 2)] == ["rank 1: OSError: stale"] * 2
    assert all(isinstance(results[rank], DataError) for rank in (0, 2))
    assert on_all(every, lambda rank, group: group.together(lambda: rank)) == [0, 1, 2, 3], "the next call is a new one"


def test_a_failure_of_the_first_is_everyones() -> None:
    results = on_all(ranks(3), lambda rank, group: group.on_first(lambda: fail(DataError("no such file"))))
    assert [str(each) for each in results] == ["no such file"] * 3


def test_a_rank_asks_the_store_a_few_times() -> None:
    """However many ranks there are, and however many of them fail."""
    for size in (2, 8):
        stores = [Counting(HashStore())] * size
        every = [AllRanks(stores[rank], rank, size, timedelta(seconds=30)) for rank in range(size)]
        on_all(every, lambda rank, group: group.on_first(lambda: rank))
        assert stores[0].requests <= 5 * size


def test_nobody_waits_longer_than_allowed() -> None:
    alone = AllRanks(HashStore(), 0, 2, timedelta(seconds=0.1))
    with pytest.raises(RuntimeError, match=r"(?i)timeout"):
        alone.together(lambda: 0)
