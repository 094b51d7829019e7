"""The one order: every task of every resource in one list, ops by their end, all else by its start.

A message so stands before the op that its receiver runs while it travels: whoever goes through the list in turn has
posted the receive when the message leaves, and the transfer overlaps that op. Of tasks with one time transfers come
first, where nothing they wait for forces an op before them: an op that ends just when a message starts may as well end
a little later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf
from types import MappingProxyType

from helixpipe.compiled import MadeWhenAsked
from helixpipe.lowering.graph import Graph
from helixpipe.program.program import Op
from helixpipe.program.tasks import Resource
from helixpipe.program.transfer import Transfer


@dataclass(frozen=True)
class TaskTimes(MadeWhenAsked):
    """Start and end of every task, and `order`: ops by end and transfers by start, always a linear extension of the
    dependencies, of each rank's order and of each link's.

    crowded: transfers that start less than the longest op's time after their link or group was free, and when it was;
    see `places`.
    """

    start: list[float]
    end: list[float]
    order: list[int]
    crowded: list[tuple[int, float]]

    @property
    def makespan(self) -> float:
        return max(self.end, default=0.0) if self.compiled is None else float(self.compiled.makespan)

    @property
    def num_ended(self) -> int:
        """The number of tasks that can start."""
        return len(self.order) if self.compiled is None else int(self.compiled.num_ended)


class _EarliestStarts:
    """Tasks that start as early as their dependencies and resources allow; `completions` holds those that run."""

    def __init__(self, graph: Graph, durations: list[float], given: Mapping[Resource, Sequence[int]]):
        self.graph, self.durations, self.num_ops = graph, durations, graph.num_ops
        self.resource, table = graph.resources()
        ranks = len(graph.rank_tasks)
        self.queues: list[deque[int]] = [deque(tasks) for tasks in graph.rank_tasks]
        self.queues += [deque(given.get(each, ())) for each in table[ranks:]]
        self.in_order = [True] * ranks + [each in given for each in table[ranks:]]  # else first ready, first sent
        self.start, self.end = [0.0] * graph.num_tasks, [0.0] * graph.num_tasks
        self.order: list[int] = []
        self.crowded: list[tuple[int, float]] = []
        self.longest = max(durations[: graph.num_ops], default=0.0)
        self.freed = [-inf] * len(self.queues)
        self.waiting = list(graph.num_dependencies)
        self.busy = [False] * len(self.queues)
        self.completions: list[tuple[float, int, int]] = []  # (time, turn, task)
        self._started = 0

    def queue(self, task: int) -> None:
        """A transfer is ready: where no order of its link is given, it takes the next place."""
        if not self.in_order[self.resource[task]]:
            self.queues[self.resource[task]].append(task)

    def try_start(self, resource: int, now: float) -> None:
        queue = self.queues[resource]
        if queue and not self.busy[resource] and not self.waiting[queue[0]]:
            task = queue.popleft()
            self.busy[resource] = True
            self.start[task], end = now, now + self.durations[task]
            self.end[task] = end
            turn = self._started = self._started + 1
            if task < self.num_ops:
                turn += len(self.start)  # of tasks that end at one time all transfers come before the first op
            else:
                self.order.append(task)
                if now - self.freed[resource] < self.longest:
                    self.crowded.append((task, self.freed[resource]))
            heappush(self.completions, (end, turn, task))


def list_schedule(
    graph: Graph,
    op_time: Callable[[Op], float],
    transfer_time: Callable[[Transfer], float],
    transfer_orders: Mapping[Resource, Sequence[int]] = MappingProxyType({}),
    waits: Mapping[int, Sequence[int]] | None = None,
) -> TaskTimes:
    """Run the tasks as early as their dependencies and resources allow: each rank runs its ops in program order, one
    at a time; each directed link (source, target) carries one message at a time, each copy engine makes one copy, each
    group is in one collective at a time.

    transfer_orders: of links and copy engines, their tasks in the order to run them; others run first what is ready.
    waits: for a task more tasks that wait for it, beside those of the graph.
    Tasks that can never start (a cyclic program) are absent from `order`. Time is O(n log n) in the number of tasks.
    """
    durations = [*map(op_time, graph.ops), *map(transfer_time, graph.transfers)]
    run = _EarliestStarts(graph, durations, transfer_orders)
    waiting, resource, busy, freed, try_start = run.waiting, run.resource, run.busy, run.freed, run.try_start
    successors = graph.successors
    if waits:
        successors = list(successors)
        for task, more in waits.items():
            successors[task] = [*successors[task], *more]
            for waiter in more:
                waiting[waiter] += 1
    for task in range(graph.num_ops, graph.num_tasks):
        if not waiting[task]:
            run.queue(task)
    for number in range(len(run.queues)):
        try_start(number, 0.0)
    completions, num_ops, order = run.completions, graph.num_ops, run.order
    while completions:
        now, _, task = heappop(completions)
        if task < num_ops:
            order.append(task)
        for successor in successors[task]:
            waiting[successor] -= 1
            if not waiting[successor]:
                if successor >= num_ops:
                    run.queue(successor)
                try_start(resource[successor], now)
        number = resource[task]
        busy[number], freed[number] = False, now
        try_start(number, now)
    return TaskTimes(run.start, run.end, order, run.crowded)


def side_by_side(graph: Graph, times: TaskTimes) -> TaskTimes:
    """Return the same times with the ops of each pair next to each other in the order, where the second one stands."""
    if not graph.pairs:
        return times
    first_of = {second: first for first, second in graph.pairs.items()}
    order = []
    for task in times.order:
        if task in first_of:
            order.append(first_of[task])
        if task not in graph.pairs:
            order.append(task)
    return replace(times, order=order)
