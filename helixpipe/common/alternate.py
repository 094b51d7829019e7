"""Runs two pieces of work in turns: what orders ops over two halves of their tokens, and their costs."""

from __future__ import annotations

from collections.abc import Generator
from itertools import chain, cycle
from typing import TypeVar

Result = TypeVar("Result")


def alternate(
    first: Generator[None, None, Result], second: Generator[None, None, Result], behind: int = 1
) -> tuple[Result, Result]:
    """Run both to their ends, the second so many steps behind the first; returns what they return."""
    halves, results = (first, second), dict[int, Result]()
    for which in chain((0,) * behind, cycle((0, 1))):
        if which not in results:
            try:
                next(halves[which])
            except StopIteration as end:
                results[which] = end.value
        elif len(results) == 2:
            break
    return results[0], results[1]


def finished(steps: Generator[None, None, Result]) -> Result:
    """Run a piece of work to its end with nothing beside it; returns what it returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
