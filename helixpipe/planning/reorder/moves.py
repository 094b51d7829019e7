"""Changes of an order that may shorten the step: ops and runs of ops of a rank, earlier or later."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from helixpipe.planning.reorder.instance import Instance, Orders

FURTHEST = 24
"""Places that ops move at most."""

LONGEST = 8
"""Ops that move together at most."""


class Move(NamedTuple):
    """The ops [first, end) of a rank's order go to where the op at `to` is, outside of them: before it, or, if it comes
    after them, behind it."""

    rank: int
    first: int
    end: int
    to: int

    def applied(self, order: Sequence[int]) -> list[int]:
        """Return the rank's order with the move applied."""
        _, first, end, to = self
        if to < first:
            return [*order[:to], *order[first:end], *order[to:first], *order[end:]]
        return [*order[:first], *order[end : to + 1], *order[first:end], *order[to + 1 :]]


class Moves:
    """The next moves to try, drawn from an order and its times.

    Half of the draws are on a critical path, the chain of tasks without a gap that ends last: only what changes it can
    make the step shorter. An op on it that waits for its rank alone may come before ops that it follows there. A
    quarter fill gaps: something that comes later on a rank goes where the rank idles. The rest go anywhere.
    """

    def __init__(self, instance: Instance, rng: Random):
        self.instance, self.rng = instance, rng
        self.before: list[list[int]] = [[] for _ in instance.durations]
        for task, successors in enumerate(instance.successors):
            for successor in successors:
                self.before[successor].append(task)
        self.behind = _behind(instance)
        self._critical: list[tuple[int, int]] = []
        self._gaps: list[tuple[int, int]] = []

    def look(self, orders: Orders, starts: Sequence[float], ends: Sequence[float]) -> None:
        """Take these for the order and its times."""
        self._gaps = []
        previous = [-1] * len(starts)
        place = {}
        for rank, order in enumerate(orders):
            free = 0.0
            for at, task in enumerate(order):
                place[task] = rank, at
                previous[task] = order[at - 1] if at else -1
                if starts[task] > free * (1 + 1e-12):
                    self._gaps.append((rank, at))
                free = ends[task]
        self._on_links(starts, previous)
        self._critical = []
        task = max(range(len(ends)), key=ends.__getitem__)
        while task >= 0 and starts[task] > 0:
            ahead, start = previous[task], starts[task]
            if ahead >= 0 and ends[ahead] == start:
                if task in place:
                    self._critical.append(place[task])
                task = ahead
            else:
                task = next((each for each in self.before[task] if ends[each] == start), -1)

    def _on_links(self, starts: Sequence[float], previous: list[int]) -> None:
        """Add the transfer before each on its link."""
        resources, first = self.instance.resources, len(self.instance.ops)
        last: dict[int, int] = {}
        for task in sorted(range(first, len(starts)), key=starts.__getitem__):
            previous[task] = last.get(resources[task], -1)
            last[resources[task]] = task

    def draw(self, orders: Orders) -> Move | None:
        """Draw a move that no dependency on the rank itself forbids; None if there is none at the place drawn."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.5 and self._critical:
            rank, at = rng.choice(self._critical)
            return self._earlier(orders[rank], rank, at, at + self._length(), 1 + int(rng.random() ** 2 * FURTHEST))
        if kind < 0.75 and self._gaps:
            rank, gap = rng.choice(self._gaps)
            order = orders[rank]
            at = min(gap + 1 + int(rng.random() ** 2 * FURTHEST), len(order) - 1)
            if at <= gap:
                return None
            move = self._earlier(order, rank, at, at + self._length(), at - gap)
            return move if move is not None and move.to == gap else None
        rank = rng.choice([rank for rank, order in enumerate(orders) if len(order) > 1] or [0])
        order = orders[rank]
        if len(order) < 2:
            return None
        at, distance = rng.randrange(len(order)), 1 + int(rng.random() ** 2 * FURTHEST)
        end = at + self._length()
        if rng.random() < 0.5:
            return self._earlier(order, rank, at, end, distance)
        return self._later(order, rank, at, end, distance)

    def _length(self) -> int:
        """Draw the length of a run: mostly one op."""
        return 1 if self.rng.random() < 0.75 else self.rng.randint(2, LONGEST)

    def _earlier(self, order: Sequence[int], rank: int, first: int, end: int, distance: int) -> Move | None:
        """Move the ops as many places earlier as dependencies allow, at most `distance`."""
        end = min(end, len(order))
        moved = sum(1 << task for task in order[first:end])
        to = first
        while to > max(0, first - distance) and not self.behind[order[to - 1]] & moved:
            to -= 1
        return Move(rank, first, end, to) if to < first else None

    def _later(self, order: Sequence[int], rank: int, first: int, end: int, distance: int) -> Move | None:
        end = min(end, len(order))
        moved = 0
        for task in order[first:end]:
            moved |= self.behind[task]
        to = end - 1
        while to < min(len(order), end + distance) - 1 and not moved >> order[to + 1] & 1:
            to += 1
        return Move(rank, first, end, to) if to >= end else None


def _behind(instance: Instance) -> list[int]:
    """Return, for each task, the ops that depend on it, as the bits of a number."""
    waiting, order = list(instance.waiting), [task for task, count in enumerate(instance.waiting) if not count]
    for task in order:
        for successor in instance.successors[task]:
            waiting[successor] -= 1
            if not waiting[successor]:
                order.append(successor)
    behind = [0] * len(waiting)
    for task in reversed(order):
        for successor in instance.successors[task]:
            behind[task] |= behind[successor] | (1 << successor if successor < len(instance.ops) else 0)
    return behind
