"""Measures the time of messages between two ranks, and how long they keep the ranks from computing."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from helixpipe.costs.profile_costs import MessageTimes
from helixpipe.model.device import device
from helixpipe.runtime.communicators import backend_of
from helixpipe.runtime.transport import Receipt, Transport, make_transport

MESSAGES = 30
"""Back and forth."""
ROWS, MESSAGES_OF_ROW = 12, 8
"""Of each direction, beside computing: a row is long beside what clocks and other processes add to one."""
MESSAGE_BYTES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
MESSAGE_BYTES_OF_GPUS = (1 << 24, 1 << 26)
"""Beside those: NVLink takes 4 MiB in less time than NCCL needs to start."""


def measure_messages(rank: int, computing: int) -> MessageTimes:
    """Measure messages between ranks 0 and 1 with the executor's transport: how long they take while nothing else runs,
    and how much more processor time both ranks need for their computation while one is on its way.

    computing: processes that compute at the same time in a step. Where they leave no core free, all processor time of a
    message keeps its rank from computing, else that of the computing thread. With NCCL neither waits for it.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    backend = backend_of(group, device())
    transport = make_transport(group, device(), [(0, 1), (1, 0)])
    processor = time.process_time if computing >= (os.cpu_count() or 1) else time.thread_time
    whole, own = [], []
    numbers = itertools.count()
    for size in MESSAGE_BYTES + (MESSAGE_BYTES_OF_GPUS if torch.cuda.is_available() else ()):
        exchange = _MessageRows(transport, rank, size, numbers)
        whole.append((size, exchange.half_round_trip()))
        own.append((size, *(exchange.beside_computing(processor) if backend != "nccl" else (0.0, 0.0))))
    ends: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ends, own)
    transport.close()
    send, receive = (
        fit_line([(first[0], (first[end] + second[end]) / 2) for first, second in zip(*ends[:2], strict=True)])
        if backend != "nccl"
        else (0.0, 0.0)
        for end in (1, 2)
    )
    latency, per_byte = fit_line(whole)
    return MessageTimes(max(latency - send[0] - receive[0], 0.0), 1.0 / per_byte, backend, send, receive)


class _Computing:
    """What a rank computes for each message, some milliseconds: products that use the caches, and an operation that
    needs memory. Longer ones would hide what a message takes in what they differ among themselves.
    """

    def __init__(self) -> None:
        self._left, self._right, self._long = torch.ones(256, 256), torch.ones(256, 512), torch.ones(1 << 19)

    def run(self) -> None:
        for _ in range(2):
            self._left @ self._right
        self._long.add_(1.0)


LEAST_SHARE = 1e-2
"""The share of the largest time below which errors count as of one that large."""


class _MessageRows:
    """Messages of `size` bytes between ranks 0 and 1; the other ranks only come to the barriers."""

    def __init__(self, transport: Transport, rank: int, size: int, numbers: Iterator[int]):
        self._transport, self._rank, self._numbers = transport, rank, numbers
        self._shapes = [torch.Size((size // 4,))]
        self._payload = torch.zeros(size // 4, device=device())

    def half_round_trip(self) -> float:
        """Median seconds of a message, back and forth."""
        seconds = []
        for _ in range(MESSAGES):
            number = next(self._numbers)
            dist.barrier()
            start = time.perf_counter()
            if self._rank == 0:
                self._transport.send([self._payload], 1, number)
            receipt = self._receive(number)
            if receipt is not None:
                receipt.wait()
            if self._rank == 1:
                self._transport.send([self._payload], 0, number)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append((time.perf_counter() - start) / 2)
            self._transport.finish()
        return statistics.median(seconds)

    def beside_computing(self, processor: Callable[[], float]) -> tuple[float, float]:
        """Median processor seconds (of a message sent, of one received) that this rank takes beside what it computes
        meanwhile: more than on a rank that only waits, since caches are full of something else and threads in the way
        of each other. Ranks 0 and 1 send in turn; each row of messages is compared with the same computation just
        before it."""
        computing = _Computing()
        times: dict[bool, list[float]] = {True: [], False: []}
        for row in range(2 * ROWS):
            sends = (self._rank - row) % 2 == 0
            dist.barrier()
            start = processor()
            for _ in range(MESSAGES_OF_ROW):
                computing.run()
            alone = processor() - start
            dist.barrier()
            start = processor()
            self._row(sends, computing)
            times[sends].append((processor() - start - alone) / MESSAGES_OF_ROW)
        sent, received = (max(statistics.median(times[sends]), 0.0) for sends in (True, False))
        return sent, received

    def _row(self, sends: bool, computing: _Computing) -> None:
        """Messages, one after another, that leave before the computation of each or are waited for after it."""
        receipt = None
        for _ in range(MESSAGES_OF_ROW):
            number = next(self._numbers)
            if not sends:
                receipt = self._receive(number)
            elif self._rank < 2:
                self._transport.send([self._payload], 1 - self._rank, number)
            computing.run()
            if receipt is not None:
                receipt.wait()
        self._transport.finish()

    def _receive(self, number: int) -> Receipt | None:
        if self._rank > 1:
            return None
        return self._transport.receive(self._shapes, torch.float32, 1 - self._rank, number)


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (y at 0, slope) of the line with the least sum of squared relative errors; neither below a
    tiny positive.
    """
    least = max(max(y for _, y in points) * LEAST_SHARE, 1e-12)  # a difference of two times may be nothing
    weights = [1.0 / max(y, least) ** 2 for _, y in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    above = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    below = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = max(above / below, 1e-15)
    return max(mean_y - slope * mean_x, 0.0), slope
