"""What ranks tell each other beside a run's own traffic, in their hosts' memory, over few connections.

A process group of all ranks would have each of them connected to every other over gloo, by more sockets than a process
may have at a thousand ranks. Here two ranks that exchange something have a group of two, which they make through the
store by themselves; torch's new_group wants all ranks for it, or names a group by how many each has. What all have to
know goes up a binary tree of the ranks and down again, so a rank has at most `TREE` connections for it and one to each
rank that it sends to or receives from.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

TREE = 3
"""The most neighbours in the tree: one above, two below."""

_TIMEOUT = timedelta(minutes=30)


class Pending(Protocol):
    def wait(self) -> Any: ...


class HostNetwork:
    """A network of a job's ranks. Collective over all of them when made. near: those that this one will send to or
    receive from, and they name it likewise; others are connected when first used, which both ends have to do in an
    order that all ranks share."""

    def __init__(self, near: Collection[int] = ()):
        self._rank, size = dist.get_rank(), dist.get_world_size()
        store: Any = dist.distributed_c10d._get_default_store()
        number = store.add(f"host network/{self._rank}", 1)  # of this network in the job, the same on all ranks
        self._store = PrefixStore(f"host network/{number}", store)
        self._above = [(self._rank - 1) // 2] if self._rank > 0 else []
        self._below = [each for each in (2 * self._rank + 1, 2 * self._rank + 2) if each < size]
        self._pairs: dict[int, Any] = {}
        for pair in sorted(self._ranks(other) for other in {*self._above, *self._below, *near}):
            self._pair(sum(pair) - self._rank)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value."""

        def join(parts: list[dict[int, bytes]]) -> dict[int, bytes]:
            return {rank: each for part in parts for rank, each in part.items()}

        values = self._through_tree({self._rank: pickle.dumps(value)}, join)
        return [pickle.loads(values[rank]) for rank in sorted(values)]

    def least(self, number: int) -> int:
        """Return the least of all ranks' numbers."""
        return self._through_tree(number, min)

    def send(self, values: Tensor, rank: int) -> Pending:
        return self._start("send", values, rank)

    def receive(self, values: Tensor, rank: int) -> Pending:
        return self._start("recv", values, rank)

    def _start(self, way: str, values: Tensor, rank: int) -> Pending:
        """What two ranks say to each other comes in the order in which it was said."""
        work: Pending = getattr(self._pair(rank), way)([values], int(rank > self._rank), 0)
        return work

    def _ranks(self, other: int) -> tuple[int, int]:
        return min(self._rank, other), max(self._rank, other)

    def _pair(self, other: int) -> Any:
        """Return the group of this rank and another one, which the two make by themselves. It comes about when both
        have called: in the order of all pairs, or nobody would be the first to go on."""
        if other not in self._pairs:
            first, second = self._ranks(other)
            store = PrefixStore(f"{first}-{second}", self._store)
            make: Any = dist.distributed_c10d.ProcessGroupGloo  # see `helixpipe.runtime.gloo_device`
            self._pairs[other] = make(store, int(self._rank == second), 2, _TIMEOUT)
        return self._pairs[other]

    def _through_tree(self, own: Any, join: Callable[[list[Any]], Any]) -> Any:
        """Return what all ranks' values make together: each joins its own with those from below. What comes from
        above goes on as it is."""
        parts = [own, *(_unpacked(self._take(below)) for below in self._below)]
        data = _packed(join(parts))
        for above in self._above:
            self._give(data, above)
            data = self._take(above)
        for below in self._below:
            self._give(data, below)
        return _unpacked(data)

    def _give(self, data: Tensor, rank: int) -> None:
        for each in (torch.tensor([data.numel()]), data):
            self._start("send", each, rank).wait()

    def _take(self, rank: int) -> Tensor:
        size = torch.empty(1, dtype=torch.int64)
        self._start("recv", size, rank).wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        self._start("recv", data, rank).wait()
        return data


def _packed(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpacked(data: Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())
