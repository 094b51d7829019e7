"""Measuring messages between pairs of ranks, and naming the links that are dead or slow; see preflight.py.

Every link is tried in a communicator of its two ends alone, so that a dead one holds up nobody else, and by a thread
that is given up when its time is over. What ranks have to tell each other meanwhile goes through the launcher's store.
"""

from __future__ import annotations

import json
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

PINGS = 20
BURST = 4
"""Messages of a burst that are timed: from the arrival of the one before them to that of the last."""

WITHIN, BETWEEN = "within a node", "between nodes"
"""The two kinds of links, each compared with its own kind alone."""

GRACE = 5.0
"""Seconds that rank 0 gives the others beyond a limit, to say that they have reached it."""

FIRST_BYTES, GROWTH, MOST_BYTES = 1 << 16, 4, 1 << 26
"""Size of a message: it grows until a burst takes an eighth of its direction's time."""


class Store(Protocol):
    """The part of torch.distributed's stores that is used."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def add(self, key: str, amount: int) -> int: ...

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until all keys are set; raises RuntimeError after the timeout."""
        ...


@dataclass(frozen=True)
class RankLocation:
    """The place where a rank runs. node: the number of its launcher; index: of its GPU, or of the process on a node
    without.
    """

    host: str
    node: int
    device: str
    index: int

    def __str__(self) -> str:
        return f"{self.host} {self.device}{self.index}"


@dataclass(frozen=True)
class Link:
    """One direction between two ranks. bandwidth: bytes a second; latency: seconds, half of a round trip, and so the
    same in both directions. Both are 0 if the link carries nothing, with the reason in `failure`.
    """

    source: int
    target: int
    bandwidth: float = 0.0
    latency: float = 0.0
    failure: str = ""


# ------------------------------------------------------------------------------------------------------ which, and when


def rounds(pairs: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Return the pairs, each once and the smaller number first, in rounds in which no number comes twice."""
    result: list[list[tuple[int, int]]] = []
    for low, high in sorted({(min(pair), max(pair)) for pair in pairs}):
        free = (each for each in result if all(low not in pair and high not in pair for pair in each))
        into = next(free, None)
        if into is None:
            result.append(into := [])
        into.append((low, high))
    return result


def on_all_pipelines(
    rounds: Sequence[Sequence[tuple[int, int]]], ranks: int, world: int
) -> list[list[tuple[int, int]]]:
    """Return the rounds between global ranks: pipelines lie side by side, pipeline rank i of each `world / ranks`
    apart.
    """
    step = world // ranks
    return [[(low * step + i, high * step + i) for low, high in each for i in range(step)] for each in rounds]


# ------------------------------------------------------------------------------------------------------ a pair of ranks


class Pair(Protocol):
    """One end of a link. Both calls return when everything is sent or received."""

    def send(self, tensor: torch.Tensor, times: int = 1) -> None: ...

    def receive(self, tensor: torch.Tensor, times: int = 1) -> None: ...


class GlooPair:
    """A link over a gloo group of two. Raises RuntimeError after `timeout` without the other end."""

    def __init__(self, store: Any, name: str, first: bool, timeout: timedelta):
        own = 0 if first else 1
        own_store = dist.PrefixStore(name, store)  # type: ignore[attr-defined]  # torch does not say that it exports it
        self._group: Any = dist.ProcessGroupGloo(own_store, own, 2, timeout)
        self._peer = 1 - own

    def send(self, tensor: torch.Tensor, times: int = 1) -> None:
        for work in [self._group.send([tensor], self._peer, 0) for _ in range(times)]:
            work.wait()

    def receive(self, tensor: torch.Tensor, times: int = 1) -> None:
        for work in [self._group.recv([tensor], self._peer, 0) for _ in range(times)]:
            work.wait()


class NcclPair:
    """A link over the default group, in which NCCL makes a communicator for two ranks with their first message."""

    def __init__(self, peer: int, device: torch.device):
        torch.cuda.set_device(device)  # of this thread
        self._peer = peer

    def send(self, tensor: torch.Tensor, times: int = 1) -> None:
        for _ in range(times):
            dist.send(tensor, self._peer)
        torch.cuda.synchronize()

    def receive(self, tensor: torch.Tensor, times: int = 1) -> None:
        for _ in range(times):
            dist.recv(tensor, self._peer)
        torch.cuda.synchronize()


def measure(pair: Pair, first: bool, seconds: float, device: torch.device) -> tuple[float, float]:
    """Return (bytes a second that come from the other end, seconds one way), about `seconds` for each direction.

    The two ends call it together, one of them `first`: it sends before it receives.
    """
    latency = _ping(pair, first, device)
    if first:
        _send_bursts(pair, device)
        return _receive_bursts(pair, seconds, device), latency
    bandwidth = _receive_bursts(pair, seconds, device)
    _send_bursts(pair, device)
    return bandwidth, latency


def _ping(pair: Pair, first: bool, device: torch.device) -> float:
    token, seconds = torch.zeros(1, device=device), []
    for _ in range(1 + PINGS):  # the first one connects
        start = time.perf_counter()
        for send in (first, not first):
            (pair.send if send else pair.receive)(token)
        seconds.append((time.perf_counter() - start) / 2)
    return statistics.median(seconds[1:])


def _send_bursts(pair: Pair, device: torch.device) -> None:
    """Send the bursts that the other end requests, each of messages of the requested size, until it
    requests 0 bytes.
    """
    asked = torch.zeros(1, dtype=torch.int64, device=device)
    while True:
        pair.receive(asked)
        if not (size := int(asked.item())):
            return
        pair.send(torch.zeros(size, dtype=torch.uint8, device=device), 1 + BURST)


def _receive_bursts(pair: Pair, seconds: float, device: torch.device) -> float:
    """Median bytes a second of the bursts of the largest messages."""
    size, rates = FIRST_BYTES, list[float]()
    deadline = time.perf_counter() + seconds
    while size:
        pair.send(torch.tensor([size], device=device))
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        pair.receive(buffer)
        start = time.perf_counter()
        pair.receive(buffer, BURST)
        now = time.perf_counter()
        rates.append(BURST * size / (now - start))
        if now > deadline:
            size = 0
        elif size < MOST_BYTES and now - start < seconds / 8:
            size *= GROWTH
            rates.clear()
    pair.send(torch.tensor([0], device=device))
    return statistics.median(rates)


def limited(function: Callable[[], T], seconds: float) -> T:
    """Return or raise what the function does; raises TimeoutError after `seconds`, and the function
    runs on unattended.
    """
    answer: queue.SimpleQueue[tuple[list[T], BaseException | None]] = queue.SimpleQueue()

    def call() -> None:
        try:
            answer.put(([function()], None))
        except BaseException as error:
            answer.put(([], error))

    threading.Thread(target=call, name="link", daemon=True).start()
    try:
        value, error = answer.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"nothing has come for {seconds:.0f} s") from None
    if error is not None:
        raise error
    return value[0]


# ---------------------------------------------------------------------------------------------------------------- check


class Check:
    """A check of every link, round by round. Rank 0 announces through the store when a round begins and who is left out
    of it, since it still waits on an earlier link, and collects the results of both ends.

    connect: this rank's end of a link, from a name, the other rank and whether this end is first. slot: seconds of
    sending in one direction. timeout: seconds for a link to come up, or any message of it.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        connect: Callable[[str, int, bool], Pair],
        device: torch.device,
        slot: float,
        timeout: float,
    ):
        self._store, self._rank, self._connect, self._device = store, rank, connect, device
        self._slot, self._limit = slot, timeout + 4 * slot

    def run(self, rounds: Sequence[Sequence[tuple[int, int]]], missing: Sequence[int] = ()) -> list[Link]:
        """Check both directions of every pair; return the links on rank 0, nothing elsewhere. missing: ranks that are
        left out from the start, as rank 0 knows. Raises RuntimeError if rank 0, or the store, is gone.
        """
        links: list[Link] = []
        out = set(missing)
        for number, pairs in enumerate(rounds):
            if self._rank == 0:
                self._store.set(f"round {number}", json.dumps(sorted(out)))
            self._wait(f"round {number}", 3 * (self._limit + GRACE))  # until rank 0 has met all, or heard of all
            out = set(json.loads(self._store.get(f"round {number}")))
            own = [pair for pair in pairs if self._rank in pair and not out & set(pair)]
            deadline = time.monotonic() + self._limit + GRACE
            for pair in own:
                self._store.set(f"{number} {self._rank}", json.dumps(self._try(f"link {number}", pair)))
            if self._rank == 0:
                for pair in pairs:
                    links += self._collect(number, pair, out, deadline)
        return links

    def _try(self, name: str, pair: tuple[int, int]) -> dict[str, Any]:
        """Return this end's result for a link: the `bandwidth` of what arrived and `latency`, or a `failure`, and
        whether this end is `stuck` in it.
        """
        low, high = pair
        first, peer = self._rank == low, high if self._rank == low else low

        def exchange() -> tuple[float, float]:
            end = self._connect(f"{name} {low} {high}", peer, first)
            return measure(end, first, self._slot, self._device)

        try:
            bandwidth, latency = limited(exchange, self._limit)
        except TimeoutError as error:
            return {"failure": str(error), "stuck": True}
        except Exception as error:  # a backend's own words
            return {"failure": first_line(error)}
        return {"bandwidth": bandwidth, "latency": latency}

    def _collect(self, number: int, pair: tuple[int, int], out: set[int], deadline: float) -> list[Link]:
        """Rank 0: both directions of a pair; adds to `out` the ends that cannot try another link."""
        low, high = pair
        if waiting := sorted(out & set(pair)):
            reason = f"not tried, since rank {waiting[0]} is out"
            return [Link(low, high, failure=reason), Link(high, low, failure=reason)]
        said = {end: self._said(f"{number} {end}", deadline) for end in pair}
        out |= {end for end, words in said.items() if words.get("stuck")}
        failures = [str(words["failure"]) for words in said.values() if "failure" in words]
        if failures:
            return [Link(low, high, failure=failures[0]), Link(high, low, failure=failures[0])]
        latency = said[low]["latency"]
        return [Link(low, high, said[high]["bandwidth"], latency), Link(high, low, said[low]["bandwidth"], latency)]

    def _said(self, key: str, deadline: float) -> dict[str, Any]:
        try:
            self._wait(key, max(deadline - time.monotonic(), 0.01))
        except RuntimeError:
            return {"failure": f"rank {key.split()[1]} no longer answers", "stuck": True}
        return dict(json.loads(self._store.get(key)))

    def _wait(self, key: str, seconds: float) -> None:
        self._store.wait([key], timedelta(seconds=seconds))


def first_line(error: BaseException) -> str:
    """Return a backend's error message without the stack it adds."""
    return next(iter(str(error).splitlines()), type(error).__name__)
