"""Figures of a chunk that lie on straight lines over its tokens: asked at a few numbers of them, not at each.

A kernel takes the longer of its arithmetic and its traffic, both of which grow evenly with tokens; what an op needs is
the most of several sums of tensors. So such figures are lines with few bends. Steps of documents have chunks of
hundreds of unlike lengths, and the next step has others.
"""

from __future__ import annotations

from collections.abc import Callable

CELL = 256
"""Tokens between two points of which the figure is asked."""

FIRST = 4
"""Cells that are too short for it to be worth it: figures are asked as they are."""

EXACT = 1e-12
"""Part of a figure by which its middle may be off the line between the ends of a cell without a bend."""


class Lines:
    """A figure by tokens. exact: asked at the ends and the middle of a cell, and within one that has a bend. What it
    gives does not depend on what was asked before.
    """

    def __init__(self, exact: Callable[[float], float]):
        self._exact = exact
        self._points: dict[float, float] = {}
        self._rises: dict[int, float | None] = {}

    def __call__(self, tokens: float) -> float:
        cell = int(tokens / CELL)
        start = cell * CELL
        if cell < FIRST or tokens == start:
            return self._at(tokens)
        if cell not in self._rises:
            self._rises[cell] = self._rise(start)
        rise = self._rises[cell]
        return self._at(tokens) if rise is None else self._points[start] + rise * (tokens - start)

    def _at(self, tokens: float) -> float:
        figure = self._points.get(tokens)
        if figure is None:
            figure = self._points[tokens] = self._exact(tokens)
        return figure

    def _rise(self, start: int) -> float | None:
        """Return the figure's rise a token in a cell; None where it bends."""
        first, middle, last = map(self._at, (start, start + CELL // 2, start + CELL))
        return (last - first) / CELL if abs(first + last - 2 * middle) <= EXACT * abs(middle) else None
