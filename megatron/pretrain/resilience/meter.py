"""What the record of a step says in a report, on a clock that all ranks share."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch.distributed as dist

from helixpipe.adapt.reports import RankTimes, Received, medians
from helixpipe.runtime.recording import Record

ROUNDS = 9
"""Barriers from which the difference of two clocks is known, to about the time that one takes."""


def clock_offset(group: dist.ProcessGroup | None, now: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds by which this rank's clock is ahead of that of the group's first rank: 0 on one machine, else
    what their clocks said after barriers. Collective over the group.
    """
    names: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(names, platform.node(), group=group)
    if len(set(names)) == 1:
        return 0.0
    differences = []
    for _ in range(ROUNDS):
        dist.barrier(group=group)
        times: list[Any] = [None] * len(names)
        dist.all_gather_object(times, now(), group=group)
        differences.append(times[dist.get_rank(group)] - times[0])
    return median(differences)


def report_of(record: Record, step: int, rank: int, pipeline: int = 0, plan: int = 0, offset: float = 0.0) -> RankTimes:
    """Return the report of a recorded step. plan: the number of the plan it ran. offset: of this rank's clock."""
    waited = record.waited
    received = {
        number: Received(record.posted[number] - offset, waited[number] - offset, arrived - offset)
        for number, arrived in record.arrived.items()
        if number in record.posted
    }
    return RankTimes(
        step,
        rank,
        pipeline,
        plan,
        medians(record.ops),
        {number: sent - offset for number, sent in record.sent.items()},
        received,
        sum(end - start for start, end in record.copies.values()),
        min((start for _, start, _ in record.ops), default=offset) - offset,
        max((end for *_, end in record.ops), default=offset) - offset,
    )
