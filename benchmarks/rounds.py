"""Measurements that take turns, so that what else the machine does hits all alike, and their ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

Name = TypeVar("Name")
Value = TypeVar("Value")


def turns(names: Iterable[Name], rounds: int) -> Iterator[tuple[int, Name]]:
    """(round, name): every name once a round, forwards and backwards through the list by turns."""
    names = list(names)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            yield number, name


def in_turn(
    names: Iterable[Name], rounds: int, measure: Callable[[Name], Value], warm_up: int = 0
) -> dict[Name, list[Value]]:
    """Return what `measure` returns for each name in each round; those of the first `warm_up` rounds do not count."""
    names = list(names)
    found: dict[Name, list[Value]] = {name: [] for name in names}
    for number, name in turns(names, warm_up + rounds):
        value = measure(name)
        if number >= warm_up:
            found[name].append(value)
    return found


def ratios(own: Sequence[float], over: Sequence[float]) -> list[float]:
    """Of each round."""
    return [mine / theirs for mine, theirs in zip(own, over, strict=True)]


def median_ratio(own: Sequence[float], over: Sequence[float]) -> float:
    return statistics.median(ratios(own, over))


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third."""
    low, _, high = statistics.quantiles(values, n=4)
    return low, high
