"""Simulation of a runtime whose ranks wait for their messages: nothing is sent beside an op.

So does Megatron-LM's engine: a rank exchanges what it has made and what it needs, both directions and both neighbours
at once, and computes on when all of that is through. Here a message travels while neither of its ends computes, and
holds up both. A rank starts its next op when it has sent all that was ready to go. What comes to a rank between two ops
is taken in whether it is needed next or not, so nobody waits in a circle: whoever waits to send can receive.
Ranks with several stages exchange once for a forward and the backward after it, if that can start at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush

from helixpipe.lowering.graph import Graph
from helixpipe.lowering.order import TaskTimes
from helixpipe.program.program import Op
from helixpipe.program.tasks import Resource
from helixpipe.program.transfer import Transfer

_TIE = 1 + 1e-12
"""Tasks that end within this factor of a time end together: what follows from one is known when the others' ranks
start something."""


def blocking_schedule(
    graph: Graph,
    op_time: Callable[[Op], float],
    transfer_time: Callable[[Transfer], float],
    transfer_orders: Mapping[Resource, Sequence[int]],
    waits: Mapping[int, Sequence[int]],
) -> TaskTimes:
    """Run the tasks as early as such a runtime can. Copies and collectives run beside ops, each on its own resource.

    transfer_orders: of copy engines and groups, their tasks in order. waits: for a task more tasks that wait for it.
    """
    durations = [*map(op_time, graph.ops), *map(transfer_time, graph.transfers)]
    return _BlockingSimulation(graph, durations, transfer_orders, waits).run()


class _BlockingSimulation:
    """computing: whether a rank does. moving: messages that hold up each rank. outgoing: those that are ready to leave
    it or on their way. pending: ready messages, in the order in which they became so."""

    def __init__(
        self,
        graph: Graph,
        durations: list[float],
        orders: Mapping[Resource, Sequence[int]],
        waits: Mapping[int, Sequence[int]],
    ):
        self.graph, self.durations = graph, durations
        ranks = len(graph.rank_tasks)
        self.computing, self.moving, self.outgoing = [False] * ranks, [0] * ranks, [0] * ranks
        self.ops = [deque(tasks) for tasks in graph.rank_tasks]
        self.pending: list[int] = []
        self.resource, table = graph.resources()
        self.others = [deque(orders.get(each, ()) if each.kind != "link" else ()) for each in table]
        self.given = [each in orders for each in table]
        self.busy = [False] * len(table)
        self.successors = [[*after, *waits.get(task, ())] for task, after in enumerate(graph.successors)]
        self.waiting = list(graph.num_dependencies)
        for more in waits.values():
            for task in more:
                self.waiting[task] += 1
        self.start, self.end = [0.0] * graph.num_tasks, [0.0] * graph.num_tasks
        self.order: list[int] = []
        stages = [{op.stage for op in own} for own in graph.program.ranks]
        self.paired = [False] * ranks
        self.pairs = [len(own) > 1 for own in stages]
        self.completions: list[tuple[float, int]] = []

    def run(self) -> TaskTimes:
        for task in range(self.graph.num_ops, self.graph.num_tasks):
            if not self.waiting[task]:
                self._ready(task)
        self._start_all(0.0, range(len(self.busy)))
        while self.completions:
            now, touched = self.completions[0][0], set[int]()
            while self.completions and self.completions[0][0] <= now * _TIE:
                touched |= self._finish(heappop(self.completions)[1])
            self._start_all(now, sorted(touched))
        assert len(self.order) == self.graph.num_tasks, "a program that can run waits for itself"
        return TaskTimes(self.start, self.end, self.order, [])

    def _finish(self, task: int) -> set[int]:
        """Resources on which something may start now."""
        touched = {self.resource[task]}
        if task < self.graph.num_ops:
            rank = self.resource[task]
            self.order.append(task)
            self.computing[rank] = False
            self.paired[rank] = self.pairs[rank] and self.graph.ops[task].kind == "F"
        else:
            self.busy[self.resource[task]] = False
            message = self.graph.transfer(task)
            if message.resource == "link":
                touched |= {message.source, message.target}
                self.moving[message.source] -= 1
                self.moving[message.target] -= 1
                self.outgoing[message.source] -= 1
        for successor in self.successors[task]:
            self.waiting[successor] -= 1
            if not self.waiting[successor]:
                touched.add(self.resource[successor])
                if successor >= self.graph.num_ops:
                    self._ready(successor)
        return touched

    def _ready(self, task: int) -> None:
        transfer = self.graph.transfer(task)
        if transfer.resource == "link":
            self.pending.append(task)
            self.outgoing[transfer.source] += 1
        elif not self.given[self.resource[task]]:
            self.others[self.resource[task]].append(task)

    def _start_all(self, now: float, touched: Sequence[int]) -> None:
        """Messages first: they may hold up the ops."""
        ranks = len(self.ops)
        for number in touched:
            queue = self.others[number]
            if queue and not self.busy[number] and not self.waiting[queue[0]]:
                self.busy[number] = True
                self._begin(queue.popleft(), now)
        for rank in touched:
            if rank < ranks and self.paired[rank] and not self.computing[rank] and not self.moving[rank]:
                self.paired[rank] = False
                if self.ops[rank] and self.graph.ops[self.ops[rank][0]].kind in "BI":
                    self._compute(rank, now)
        left = []
        for task in self.pending:
            message, link = self.graph.transfer(task), self.resource[task]
            if self.computing[message.source] or self.computing[message.target] or self.busy[link]:
                left.append(task)
                continue
            self.busy[link] = True
            self.moving[message.source] += 1
            self.moving[message.target] += 1
            self._begin(task, now)
        self.pending = left
        for rank in touched:
            if rank >= ranks or self.computing[rank] or self.moving[rank] or self.outgoing[rank]:
                continue
            self._compute(rank, now)

    def _compute(self, rank: int, now: float) -> None:
        """Start the rank's next op, if it waits for nothing."""
        if self.ops[rank] and not self.waiting[self.ops[rank][0]]:
            self.computing[rank] = True
            self._begin(self.ops[rank].popleft(), now)

    def _begin(self, task: int, now: float) -> None:
        self.start[task], self.end[task] = now, now + self.durations[task]
        if task >= self.graph.num_ops:
            self.order.append(task)
        heappush(self.completions, (self.end[task], task))
