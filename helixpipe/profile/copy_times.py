"""Measures the time of copies between device and host: in each direction alone, and with the other in use.

On CUDA between device and page-locked host memory, on a stream for each direction. On the CPU, where device and host
are one, a thread for each direction copies from one part of memory to another: where all cores compute, its processor
time is taken from them, and where there are more such threads than cores, it is what a copy takes.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from helixpipe.costs.profile_costs import CopyTimes
from helixpipe.model.device import device
from helixpipe.profile.message_times import fit_line

COPIES = 10
COPY_BYTES = (1 << 20, 1 << 22, 1 << 24)
COPY_BYTES_OF_GPUS = (1 << 26, 1 << 28)
"""Beside those: 16 MiB take a third of a millisecond over PCIe 5."""

Points = Sequence[tuple[float, float]]
"""Measured points (bytes, seconds)."""


class Direction:
    """Copies of up to `size` bytes from the device to its host, or (inward) back."""

    def __init__(self, inward: bool, size: int, on: torch.device):
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=on.type == "cuda")
        own = torch.ones(size, dtype=torch.uint8, device=on)
        self.source, self.target = (host, own) if inward else (own, host)
        self._stream = torch.cuda.Stream(on) if on.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(on))

    def copy(self, size: int) -> None:
        """Copy `size` bytes; the copy is complete when it returns."""
        if self._stream is None:
            self.target[:size].copy_(self.source[:size])
            return
        with torch.cuda.stream(self._stream):
            self.target[:size].copy_(self.source[:size], non_blocking=True)
        self._stream.synchronize()


def measure_copies(group: Any, computing: int) -> CopyTimes:
    """Measure this rank's copies while the others of the group copy as well: the ranks of a machine share its host
    memory, and on many machines the link to it. computing: processes that compute at the same time in a step.
    """
    sizes = COPY_BYTES + (COPY_BYTES_OF_GPUS if torch.cuda.is_available() else ())
    ways = [Direction(inward, sizes[-1], device()) for inward in (False, True)]
    alone: list[list[tuple[float, float]]] = [[], []]
    for size in (sizes[-1], *sizes):  # once for the first touch of pages
        for way, points in zip(ways, alone, strict=True):
            dist.barrier(group)
            (seconds,) = seconds_at_once([lambda way=way, size=size: way.copy(size)])  # type: ignore[misc]
            points.append((size, seconds))
    dist.barrier(group)
    both = seconds_at_once([lambda way=way: way.copy(sizes[-1]) for way in ways])  # type: ignore[misc]
    own, cores = [0.0, 0.0], os.cpu_count() or 1
    if device().type == "cpu":
        dist.barrier(group)
        copies = [lambda way=way: way.copy(sizes[-1]) for way in ways]
        processor = seconds_at_once(copies, now=time.thread_time)
        if len(ways) * dist.get_world_size(group) > cores:
            both = processor  # copies have waited for each other's cores
        if computing >= cores:
            own = [seconds / sizes[-1] for seconds in processor]
    lines = copy_times([points[1:] for points in alone], [(sizes[-1], seconds) for seconds in both])
    return replace(lines, own=(own[0], own[1]))


def seconds_at_once(
    copies: Sequence[Callable[[], None]], count: int = COPIES, now: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Median seconds of each of the copies while all of them run: each is made again until all were made that often.
    now: the clock."""
    samples: list[list[float]] = [[] for _ in copies]
    over = threading.Event()

    def run(index: int) -> None:
        try:
            while not over.is_set():
                start = now()
                copies[index]()
                samples[index].append(now() - start)
                if min(map(len, samples)) >= count:
                    over.set()
        finally:
            over.set()  # or the others would go on for ever after an error

    with ThreadPoolExecutor(len(copies)) as threads:
        for thread in [threads.submit(run, index) for index in range(len(copies))]:
            thread.result()
    return [statistics.median(seconds) for seconds in samples]


def copy_times(alone: Sequence[Points], both: Points) -> CopyTimes:
    """Fit the model of copies to the times of several sizes (out, inward) alone, and of one size in both directions."""
    lines = [fit_line(points) for points in alone]
    latency = statistics.mean(once for once, _ in lines)
    out, inward = (
        (1.0 / per_byte, size / max(seconds - latency, 1e-9))
        for (_, per_byte), (size, seconds) in zip(lines, both, strict=True)
    )
    return CopyTimes(latency, out, inward)
