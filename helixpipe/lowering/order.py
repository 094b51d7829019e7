"""The one order: every task of every resource in one list, by start. No torch here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from helixpipe.lowering.graph import Graph
from helixpipe.program.message import Message
from helixpipe.program.program import Op


@dataclass(frozen=True)
class Times:
    """Start and end of every task, and `order`: the tasks by start time, always a linear extension of the
    dependencies."""

    start: list[float]
    end: list[float]
    order: list[int]

    @property
    def makespan(self) -> float:
        return max(self.end, default=0.0)


class _Run:
    """Tasks that start as early as their dependencies and resources allow; `completions` holds those that run."""

    def __init__(
        self, graph: Graph, durations: list[float], link_orders: Mapping[tuple[int, ...], Sequence[int]] | None
    ):
        self.graph, self.durations = graph, durations
        self.resource, table = graph.resources()
        self.in_order = link_orders is not None  # else first ready, first sent
        self.queues: list[deque[int]] = [deque(tasks) for tasks in graph.rank_tasks]
        for each in table[len(self.queues) :]:
            link = each.kind == "link" and link_orders is not None
            self.queues.append(deque(link_orders.get(each.ranks, ()) if link and link_orders is not None else ()))
        self.start, self.end = [0.0] * graph.num_tasks, [0.0] * graph.num_tasks
        self.order: list[int] = []
        self.waiting = list(graph.num_dependencies)
        self.busy = [False] * len(self.queues)
        self.completions: list[tuple[float, int, int]] = []  # (time, place in `order`, task)

    def queue(self, task: int) -> None:
        """A transfer is ready: where no order of its link is given, it takes the next place."""
        if task >= self.graph.num_ops and not (self.in_order and self.graph.is_message(task)):
            self.queues[self.resource[task]].append(task)

    def try_start(self, resource: int, now: float) -> None:
        queue = self.queues[resource]
        if queue and not self.busy[resource] and not self.waiting[queue[0]]:
            task = queue.popleft()
            self.busy[resource] = True
            self.start[task], end = now, now + self.durations[task]
            self.end[task] = end
            heappush(self.completions, (end, len(self.order), task))
            self.order.append(task)


def list_schedule(
    graph: Graph,
    op_time: Callable[[Op], float],
    message_time: Callable[[Message], float],
    link_orders: Mapping[tuple[int, ...], Sequence[int]] | None = None,
    waits: Mapping[int, Sequence[int]] | None = None,
) -> Times:
    """Run the tasks as early as their dependencies and resources allow: each rank runs its ops in program order, one
    at a time; each directed link (source, target) carries one message at a time, each group is in one collective at a
    time. Collectives take no time here: nothing in the step waits for one.

    link_orders: for each link its message tasks in the order to send them; without it, first ready, first sent.
    waits: for a task more tasks that wait for it, beside those of the graph.
    Tasks that can never start (a cyclic program) are absent from `order`. Time is O(n log n) in the number of tasks.
    """
    durations = [op_time(op) for op in graph.ops] + [message_time(message) for message in graph.messages]
    run = _Run(graph, durations + [0.0] * len(graph.collectives), link_orders)
    waiting, resource, busy, try_start = run.waiting, run.resource, run.busy, run.try_start
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
    completions, num_ops = run.completions, graph.num_ops
    while completions:
        now, _, task = heappop(completions)
        for successor in successors[task]:
            waiting[successor] -= 1
            if not waiting[successor]:
                if successor >= num_ops:
                    run.queue(successor)
                try_start(resource[successor], now)
        busy[resource[task]] = False
        try_start(resource[task], now)
    return Times(run.start, run.end, run.order)
