"""A lower bound from a linear program over time steps, for steps of few tasks whose times are multiples of one step.

Whether a step can end within h time steps: x[j, t] is 1 where task j starts at t, every task starts once within its
window (`problem.windows`), and
- busy: of a resource's tasks at most one runs at a time;
- before: where j waits for i, by any time t no more of j has started than of i has ended;
- memory: what a rank holds at any time is within its limit.
Starts may be taken to be whole steps: any order's earliest starts are. With x in fractions this is a relaxation
(time-indexed formulation; Pritsker, Watters and Wolfe, Management Science 1969, with the precedences of Christofides,
Alvarez-Valdes and Tamarit, EJOR 1987), and where it has no solution no order ends within h.

What proves that are a few numbers, one for each row, none of them negative (Farkas' lemma in Lagrange's form): the rows
added up, each times its number, have the least left side that any starts within the windows can give; where that
is above the right side there are none. That is checked by adding up, whoever found the numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import ceil, gcd, inf, lcm
from typing import NamedTuple

from helixpipe.certify.bounds import Bound
from helixpipe.certify.problem import OrderingProblem, Windows, windows

MOST_STARTS = 8000
"""Pairs of a task and a time at which it may start: so many take about ten seconds, and some much longer."""

TIME_LIMIT = 600.0
"""Seconds of a linear program; one that takes longer proves nothing."""

MARGIN = 1e-6
"""What the left side must be above the right one: rounding is far below it."""


class Inequality(NamedTuple):
    """kind: `busy`, `before` or `memory`. one: a task of the resource; the task waited for; the rank. other: the task
    that waits, else -1. time: in steps."""

    kind: str
    one: int
    other: int
    time: int


Entries = list[tuple[int, int, int, float]]
"""(j, from, to, coefficient) of x[j, from] ... x[j, to]."""

Numbers = Mapping[Inequality, float]


def steps_bound(problem: OrderingProblem, least: float, makespan: float) -> Bound | None:
    """Return the largest bound that the linear program gives, at most the makespan; None if that is no more than
    `least`, or the problem is too large or has no time step."""
    step = time_step([task.time for task in problem.tasks])
    if step is None:
        return None
    times = tuple(round(task.time / step) for task in problem.tasks)
    windowed = windows(problem, times)
    low, high = ceil(least / step - 1e-9), ceil(makespan / step - 1e-9)  # none ends within low - 1 or less
    found, horizon = None, high - 1
    while low < high:
        program = TimeSteps(problem, windowed, times, horizon)
        if program.starts > MOST_STARTS:
            if found is None and horizon == high - 1 and horizon > low:
                high = horizon  # fewer starts fit into a shorter time
                horizon = (low + high - 1) // 2
                continue
            return found
        numbers = program.proof()
        if numbers is None:
            high = horizon
        else:
            low = horizon + 1
            rows = [[*row, number] for row, number in numbers.items()]
            found = Bound(low * step, "steps", None, {"step": step, "horizon": horizon, "rows": rows})
        horizon = (low + high - 1) // 2
    return found


def time_step(times: Sequence[float]) -> float | None:
    """Return the longest step that all times are multiples of, None where there is none of use."""
    exact = [Fraction(time).limit_denominator(1000) for time in times if time]
    if not exact or any(
        abs(each - Fraction(time)) > 1e-12 * time for each, time in zip(exact, filter(None, times), strict=True)
    ):
        return None
    scale = lcm(*(each.denominator for each in exact))
    return gcd(*(int(each * scale) for each in exact)) / scale


@dataclass(frozen=True)
class TimeSteps:
    """A problem that has to end within `horizon` time steps. times, windows: of its tasks, in steps."""

    problem: OrderingProblem
    windows: Windows
    times: tuple[int, ...]
    horizon: int

    def first(self, task: int) -> int:
        return round(self.windows.heads[task])

    def last(self, task: int) -> int:
        return self.horizon - round(self.windows.tails[task]) - self.times[task]

    @cached_property
    def tasks(self) -> list[int]:
        """Those that take any time, or begin or end what is held."""
        ends = {task for held in self.problem.held for task in (held.first, held.last)}
        return [task for task, time in enumerate(self.times) if time or task in ends]

    @cached_property
    def starts(self) -> int:
        return sum(self.last(task) - self.first(task) + 1 for task in self.tasks)

    def rows(self) -> Iterator[tuple[Inequality, Entries, float]]:
        """All rows with their right sides; without those that hold for any starts within the windows."""
        own: dict[object, list[int]] = defaultdict(list)
        for task in self.tasks:
            own[self.problem.tasks[task].resource].append(task)
        for tasks in own.values():
            for time in range(self.horizon):
                entries = self.busy(tasks, time)
                if len(entries) > 1:
                    yield Inequality("busy", tasks[0], -1, time), entries, 1.0
        for one, other in self.waits:
            for time in range(self.first(other), min(self.last(other), self.last(one) + self.times[one])):
                yield Inequality("before", one, other, time), self.before(one, other, time), 0.0
        for rank, limit in enumerate(self.problem.limits):
            if limit < inf and any(held.rank == rank for held in self.problem.held):
                for time in range(self.horizon):
                    yield Inequality("memory", rank, -1, time), self.memory(rank, time), limit

    def busy(self, tasks: Sequence[int], time: int) -> Entries:
        spans = ((task, time - self.times[task] + 1, time) for task in tasks)
        return [entry for span in spans for entry in self._within(*span, 1.0)]

    def before(self, one: int, other: int, time: int) -> Entries:
        waits = self._within(other, 0, time, 1.0)
        return waits + self._within(one, 0, time - self.times[one], -1.0)

    def memory(self, rank: int, time: int) -> Entries:
        entries: Entries = []
        for _, first, last, size, after in (held for held in self.problem.held if held.rank == rank):
            entries += self._within(first, 0, time - (self.times[first] if after else 0), size)
            entries += self._within(last, 0, time - self.times[last], -size)
        return entries

    def _within(self, task: int, begin: int, end: int, coefficient: float) -> Entries:
        """The entry of starts from `begin` to `end`, as far as they are within the task's window."""
        begin, end = max(begin, self.first(task)), min(end, self.last(task))
        return [(task, begin, end, coefficient)] if begin <= end else []

    @cached_property
    def waits(self) -> list[tuple[int, int]]:
        """Pairs of `tasks` of which the second waits for the first, directly or through others; without those that
        follow from others."""
        earlier: dict[int, int] = {}  # by task, a bit for each task that is before it
        place = {task: number for number, task in enumerate(self.windows.order)}
        sources: dict[int, set[int]] = {}
        inside, pairs = frozenset(self.tasks), []
        for task in self.windows.order:
            waited: set[int] = set()
            for one in self.windows.before[task]:
                waited |= {one} if one in inside else sources[one]
            sources[task], seen = waited, 0
            for one in sorted(waited, key=place.__getitem__, reverse=True):
                if task in inside and not seen >> one & 1:
                    pairs.append((one, task))
                seen |= earlier[one] | 1 << one
            earlier[task] = seen
        return pairs

    def proof(self) -> Numbers | None:
        """Return numbers for rows that show that no order ends within the horizon; None where the linear program has a
        solution. `busy` and `memory` may be exceeded by a common z, whose least value is what the numbers show."""
        import numpy as np
        from scipy.optimize import linprog
        from scipy.sparse import csr_array

        offset, width = {}, 0
        for task in self.tasks:
            offset[task] = width - self.first(task)
            width += self.last(task) - self.first(task) + 1
        names, right = [], []
        columns: list[int] = []
        values: list[float] = []
        ends = [0]
        for row, entries, limit in self.rows():
            for task, begin, end, coefficient in entries:
                columns.extend(range(offset[task] + begin, offset[task] + end + 1))
                values.extend([coefficient] * (end - begin + 1))
            if row.kind != "before":
                columns.append(width)
                values.append(-1.0)
            names.append(row)
            right.append(limit)
            ends.append(len(columns))
        matrix = csr_array((values, columns, ends), shape=(len(right), width + 1))
        owners = np.concatenate(
            [np.full(self.last(task) - self.first(task) + 1, place) for place, task in enumerate(self.tasks)]
        )
        once = csr_array((np.ones(width), (owners, np.arange(width))), shape=(len(self.tasks), width + 1))
        weights = np.zeros(width + 1)
        weights[width] = 1.0
        sums = np.ones(len(self.tasks))
        options = {"time_limit": TIME_LIMIT}
        optimum = linprog(weights, matrix, right, once, sums, method="highs", options=options)
        if optimum.x is None or optimum.fun <= MARGIN:
            return None
        marginals = zip(names, -optimum.ineqlin.marginals, strict=True)
        numbers = {row: round(float(number), 9) for row, number in marginals if number > 1e-9}
        return numbers if self.excess(numbers) > MARGIN else None

    def excess(self, numbers: Numbers) -> float:
        """Return by how much the least left side of the rows' sum is above its right side."""
        total: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        right = 0.0
        for row, entries, limit in self.rows():
            if number := numbers.get(row, 0.0):
                right += number * limit
                for task, begin, end, coefficient in entries:
                    for time in range(begin, end + 1):
                        total[task][time] += number * coefficient
        least = (
            min(own.get(time, 0.0) for time in range(self.first(task), self.last(task) + 1))
            for task, own in total.items()
        )
        return sum(least) - right
