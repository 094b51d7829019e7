"""Evaluates an order of a step's ops: `list_schedule` and the memory sweep in one pass over flat lists.

The compiled twin of `Evaluator` is `compiled/orders.cpp`; `evaluator` takes it where it was built. Both do the same
sums in the same order, so they agree to the last digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from typing import Protocol

from helixpipe.compiled import core
from helixpipe.planning.reorder.instance import Instance

MARGIN = 1 + 1e-9
"""Rounding that a limit allows."""


class Judge(Protocol):
    """The interface of an evaluator of orders. starts, ends: of each task in the last order that `makespan` evaluated
    to its end. peaks: the most memory of each rank.
    """

    def makespan(self, orders: Sequence[Sequence[int]], bound: float) -> float:
        """Return the makespan of tasks run as early as these orders, their dependencies and the links allow.

        inf if the order has a cycle, if a rank is above its limit, and as soon as it is certain that the makespan is
        above the bound.
        """

    @property
    def starts(self) -> list[float]: ...

    @property
    def ends(self) -> list[float]: ...

    @property
    def peaks(self) -> list[float]: ...


def evaluator(instance: Instance) -> Judge:
    """Return the compiled evaluator if it was built, else the one in Python."""
    compiled = compiled_evaluator(instance)
    return Evaluator(instance) if compiled is None else compiled


def is_compiled() -> bool:
    """Whether there is a compiled evaluator."""
    return core() is not None


def compiled_evaluator(instance: Instance) -> Judge | None:
    """Return the compiled evaluator; None if it was not built."""
    module = core()
    if module is None:
        return None
    starts = [0]
    for each in instance.successors:
        starts.append(starts[-1] + len(each))
    judge: Judge = module.Evaluator(
        instance.num_ranks,
        instance.num_resources,
        instance.durations,
        instance.resources,
        starts,
        [task for each in instance.successors for task in each],
        instance.waiting,
        instance.held,
        instance.rise,
        instance.change,
        [rank for rank, _ in instance.taken],
        [size for _, size in instance.taken],
        [rank for rank, _ in instance.sent],
        [size for _, size in instance.sent],
        [limit * MARGIN for limit in instance.limits],
    )
    return judge


class Evaluator:
    """The evaluator in Python. left: of each rank the time of ops that have not started."""

    def __init__(self, instance: Instance):
        self.instance = instance
        self.starts = [0.0] * len(instance.durations)
        self.ends = [0.0] * len(instance.durations)
        self.peaks = [0.0] * instance.num_ranks

    def makespan(self, orders: Sequence[Sequence[int]], bound: float) -> float:
        run = _OrderEvaluation(self.instance, orders, bound)
        result = run.run()
        if result < inf:
            self.starts, self.ends, self.peaks = run.starts, run.ends, run.peaks
        return result


class _OrderEvaluation:
    """The evaluation of one order. queues: the tasks to run of each resource; next: the place of the next one.
    completions: (end, turn, task) of tasks that run; of those that end at one time transfers come before ops, as in
    `list_schedule`.
    """

    def __init__(self, instance: Instance, orders: Sequence[Sequence[int]], bound: float):
        self.instance, self.bound = instance, bound
        self.queues = [*map(list, orders), *([] for _ in range(instance.num_resources - len(orders)))]
        self.next, self.busy = [0] * len(self.queues), [False] * len(self.queues)
        self.waiting = list(instance.waiting)
        self.starts, self.ends = [0.0] * len(self.waiting), [0.0] * len(self.waiting)
        self.now, self.peaks = list(instance.held), list(instance.held)
        self.limits = [limit * MARGIN for limit in instance.limits]
        self.left = []
        for order in orders:
            left = 0.0
            for task in order:
                left += instance.durations[task]
            self.left.append(left)
        self.completions: list[tuple[float, int, int]] = []
        self.started = 0
        self.failed = False

    def run(self) -> float:
        instance, waiting = self.instance, self.waiting
        num_ops, resources = len(instance.ops), instance.resources
        for task in range(num_ops, len(waiting)):
            if not waiting[task]:
                self.queues[resources[task]].append(task)
        for number in range(len(self.queues)):
            self.try_start(number, 0.0)
        last, ended = 0.0, 0
        while self.completions and not self.failed:
            last, _, task = heappop(self.completions)
            ended += 1
            if task < num_ops:
                self.has_run(task)
            for successor in instance.successors[task]:
                waiting[successor] -= 1
                if not waiting[successor]:
                    if successor >= num_ops:
                        self.queues[resources[successor]].append(successor)
                    self.try_start(resources[successor], last)
            self.busy[resources[task]] = False
            self.try_start(resources[task], last)
        return inf if self.failed or ended < len(waiting) or last > self.bound else last

    def try_start(self, number: int, now: float) -> None:
        queue, place = self.queues[number], self.next[number]
        if place == len(queue) or self.busy[number] or self.waiting[queue[place]]:
            return
        task = queue[place]
        self.next[number], self.busy[number] = place + 1, True
        self.started += 1
        turn, duration, num_ops = self.started, self.instance.durations[task], len(self.instance.ops)
        self.starts[task], self.ends[task] = now, now + duration
        if task < num_ops:
            turn += len(self.starts)
            if now + self.left[number] > self.bound * MARGIN:
                self.failed = True
            self.left[number] -= duration
        else:
            for rank, size in (self.instance.taken[task - num_ops], self.instance.sent[task - num_ops]):
                if rank >= 0:
                    self.now[rank] += size
                    self.has(rank, self.now[rank])
        heappush(self.completions, (now + duration, turn, task))

    def has_run(self, task: int) -> None:
        """Memory around an op: as of its end, where it is in the one order."""
        rank = self.instance.resources[task]
        self.has(rank, self.now[rank] + self.instance.rise[task])
        self.now[rank] += self.instance.change[task]

    def has(self, rank: int, size: float) -> None:
        if size > self.peaks[rank]:
            self.peaks[rank] = size
            if size > self.limits[rank]:
                self.failed = True
