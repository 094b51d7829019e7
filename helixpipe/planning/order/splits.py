"""Divides layers over stages that differ, by dynamic programs over tables of times and memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Protocol

from helixpipe.planning.memory.recompute_choice import TOLERANCE

Table = list[list[float]]
"""A number for each stage and each number of layers it may have; infinite where it cannot have them."""


class StageTimeTables(Protocol):
    """Tables of stages by their number of layers. times: of each stage. again: the part that is recomputation."""

    times: Table
    again: Table


@dataclass(frozen=True)
class Split:
    """A division of the layers. layers: of each stage. slowest: longest time of a stage, a microbatch. again: time of
    all recomputation.
    """

    layers: tuple[int, ...]
    slowest: float
    again: float


def splits_by_time(stages: StageTimeTables, layers: int, m: int) -> list[Split]:
    """Return the best split and those that trade the slowest stage for more or less recomputation, best first."""
    least = least_bottleneck(stages.times, layers)
    if least == inf:
        return []
    splits: dict[tuple[int, ...], Split] = {}
    fastest = cheapest_split(stages, layers, least)
    cheapest = cheapest_split(stages, layers, inf)
    if fastest is None or cheapest is None:
        raise AssertionError("a split with the least bottleneck exists")
    best = _objective(fastest, m)
    bound = inf if m == 1 else least + (fastest.again - cheapest.again) / (m - 1)
    while True:
        split = cheapest_split(stages, layers, bound)
        if split is None:
            break
        splits[split.layers] = split
        best = min(best, _objective(split, m))
        other = cheapest_split(stages, layers, bound, large_first=True)
        if other is not None:
            splits[other.layers] = other
        if split.again + (m - 1) * least >= best:
            break
        bound = split.slowest * (1 - 2 * TOLERANCE)
    return sorted(splits.values(), key=lambda each: rounded(_objective(each, m)))


def _objective(split: Split, m: int) -> float:
    """Return the time of a step, without one pass through all stages without recomputation, which is
    the same for all.
    """
    return split.again + (m - 1) * split.slowest


def cheapest_split(stages: StageTimeTables, layers: int, slowest: float, large_first: bool = False) -> Split | None:
    """Return the split whose stages take no longer than `slowest` and recompute the least; of these, the one whose
    stages' times are most alike. large_first: of equals, the one whose later stages are smaller. None if there is none.
    """
    bound = slowest + TOLERANCE * abs(slowest)
    step = max((each for row in stages.again for each in row if each < inf), default=0.0) * TOLERANCE or 1.0
    reached: dict[int, tuple[int, float]] = {0: (0, 0.0)}  # layers so far -> recomputation in steps, squared times
    taken: list[dict[int, int]] = []
    for rank, row in enumerate(stages.times):
        allowed = [
            (count, round(stages.again[rank][count] / step), time * time)
            for count, time in enumerate(row)
            if count and time <= bound and time < inf
        ]
        if large_first:
            allowed.reverse()
        remaining = len(stages.times) - rank - 1
        cheapest: dict[int, tuple[int, float]] = {}
        last: dict[int, int] = {}
        for before, (again, squares) in reached.items():
            for count, more, square in allowed:
                now = before + count
                if now > layers - remaining or (not remaining and now != layers):
                    continue
                cost = (again + more, squares + square)
                if now not in cheapest or cost < cheapest[now]:
                    cheapest[now], last[now] = cost, count
        reached = cheapest
        taken.append(last)
    if layers not in reached:
        return None
    split = []
    left = layers
    for last in reversed(taken):
        split.append(last[left])
        left -= last[left]
    split.reverse()
    times = [stages.times[rank][count] for rank, count in enumerate(split)]
    return Split(tuple(split), max(times), sum(stages.again[rank][count] for rank, count in enumerate(split)))


def least_bottleneck(values: Table, layers: int) -> float:
    """Return the least possible maximum over stages; infinite if no split is possible."""
    reached = {0: -inf}
    for row in values:
        bottlenecks: dict[int, float] = {}
        for before, largest in reached.items():
            for count in range(1, min(len(row) - 1, layers - before) + 1):
                now = max(largest, row[count])
                if now < bottlenecks.get(before + count, inf):
                    bottlenecks[before + count] = now
        reached = bottlenecks
    return reached.get(layers, inf)


def rounded(time: float) -> float:
    """Return the time rounded to nine digits, without floating-point noise."""
    return float(f"{time:.9g}")
