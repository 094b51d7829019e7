"""Figures of a chunk that lie on straight lines over its tokens: asked at a few numbers of them, not at each.

A kernel takes the longer of its arithmetic and its traffic, both of which grow evenly with tokens; what an op needs is
the most of several sums of tensors. So such figures are lines with few bends, all to one side: if the middle of a range
is on the line between its ends, so is all of it. Steps of documents have chunks of hundreds of unlike lengths, and the
next step has others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

CELL = 256
"""Tokens of the shortest range that is looked at."""

FIRST = 4
"""Cells that are too short for it to be worth it: figures are asked as they are."""

EXACT = 1e-12
"""Part of a figure by which its middle may be off the line between the ends of a range without a bend."""


class _Line(NamedTuple):
    start: int
    figure: float
    rise: float


class Lines:
    """A figure by tokens. exact: asked at the ends and the middles of ranges, the halves of one that has a bend, and
    within a cell that has one. Ranges begin as the doublings of the first, so what it gives does not depend on what was
    asked before.
    """

    def __init__(self, exact: Callable[[float], float]):
        self._exact = exact
        self._points: dict[float, float] = {}
        self._lines: dict[int, _Line | None] = {}

    def __call__(self, tokens: float) -> float:
        cell = int(tokens / CELL)
        if cell < FIRST:
            return self._at(tokens)
        if cell not in self._lines:
            self._lines[cell] = self._line(cell)
        line = self._lines[cell]
        return self._at(tokens) if line is None else line.figure + line.rise * (tokens - line.start)

    def _at(self, tokens: float) -> float:
        figure = self._points.get(tokens)
        if figure is None:
            figure = self._points[tokens] = self._exact(tokens)
        return figure

    def _line(self, cell: int) -> _Line | None:
        """Return the longest line that the cell lies on; None where the figure bends in it."""
        start = length = FIRST
        while start + length <= cell:
            start, length = 2 * start, 2 * length
        while length:
            first, middle, last = (
                self._at(at) for at in (start * CELL, start * CELL + length * CELL // 2, (start + length) * CELL)
            )
            if abs(first + last - 2 * middle) <= EXACT * abs(middle):
                return _Line(start * CELL, first, (last - first) / (length * CELL))
            length //= 2
            start += length if cell >= start + length else 0
        return None
