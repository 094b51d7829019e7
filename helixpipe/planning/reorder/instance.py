"""A lowered program as flat lists, for judging many orders of its ops quickly.

What a program's tasks wait for follows from where its ops run, hardly from their order. So a search over orders takes
the edges, times and buffers of one lowered program as they are and changes only the order of each rank's ops. That is
exact for resident and replicated stages. Which weights travel, and what is gathered, copied to the host or waited for
in between, does depend on the order: there a judgement is a guess, and lowering the new program says what is true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.project import Action, LoweredProgram
from helixpipe.program.costs import Costs
from helixpipe.program.program import Op
from helixpipe.program.transfer import Transfer
from helixpipe.simulate.sweep import Sweep

SLOW = 3e-3
"""Of `Instance.with_slow_messages`. All messages of a chain together are to take less than one op."""

Orders = list[list[int]]
"""The op tasks of each rank, in the order they run in."""


@dataclass(frozen=True)
class Instance:
    """Tasks by number, ops first, as in the lowered program's graph.

    ops: of the op tasks. orders: of the program itself. durations, resources: of each task; the first resources are the
    ranks. successors: the tasks that wait for each. waiting: for how many tasks each waits.
    memory is in the costs' unit. held: what each rank has when the step starts. rise: of each op the most that its rank
    has more while it runs than right before; change: that it has more once it is over. taken, sent: of each transfer
    what it takes where it arrives and frees where it starts, as (rank, size), when it starts; rank -1 for nothing.
    limits: what each rank may have.
    """

    ops: tuple[Op, ...]
    orders: Orders
    durations: list[float]
    resources: list[int]
    num_resources: int
    successors: list[list[int]]
    waiting: list[int]
    held: list[float]
    rise: list[float]
    change: list[float]
    taken: list[tuple[int, float]]
    sent: list[tuple[int, float]]
    limits: list[float]

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    def ranks_of(self, orders: Sequence[Sequence[int]]) -> tuple[tuple[Op, ...], ...]:
        """Return the ops of each rank in these orders of tasks."""
        return tuple(tuple(self.ops[task] for task in tasks) for tasks in orders)

    @property
    def with_slow_messages(self) -> Instance:
        """The same where no transfer is free: those that take no time take `SLOW` of an op's mean time.

        Times that are multiples of one step give most orders the makespan of their neighbours, and a search no hint of
        where to go on. Orders in which fewer ops wait for messages at once are shorter here, and nearer to a shorter
        one.
        """
        count = len(self.ops)
        least = SLOW * sum(self.durations[:count]) / count
        durations = [*self.durations[:count], *(time or least for time in self.durations[count:])]
        return replace(self, durations=durations)


def instance_of(lowered: LoweredProgram, costs: Costs, limits: Sequence[float] | None = None) -> Instance:
    """Return the instance of a lowered program. limits: of each rank's memory beside its weights and optimizer, in the
    costs' unit; None: none.
    """
    graph, bound = lowered.graph, BoundCosts(lowered.program, costs)
    durations = [*map(bound.op_time, graph.ops), *map(bound.transfer_time, graph.transfers)]
    resources, table = graph.resources()
    ranks = lowered.program.num_ranks
    transfers = graph.num_tasks - graph.num_ops
    rise, change = [0.0] * graph.num_ops, [0.0] * graph.num_ops
    taken, sent = [(-1, 0.0)] * transfers, [(-1, 0.0)] * transfers
    held = []
    for rank in range(ranks):
        changes = _Changes(lowered, bound, rank)
        held.append(changes.of_task.pop(-1, 0.0))
        for task, size in changes.of_task.items():
            if task < graph.num_ops:
                rise[task], change[task] = changes.rise.get(task, 0.0), size
            elif task in changes.arriving:
                taken[task - graph.num_ops] = rank, size
            else:
                sent[task - graph.num_ops] = rank, size
    return Instance(
        tuple(graph.ops),
        [list(tasks) for tasks in graph.rank_tasks],
        durations,
        resources,
        len(table),
        [list(each) for each in graph.successors],
        list(graph.num_dependencies),
        held,
        rise,
        change,
        taken,
        sent,
        list(limits) if limits is not None else [inf] * ranks,
    )


class _Changes(Sweep):
    """A sweep that notes whose doing each change of a rank's memory is.

    of_task: by task how much more there is for it; what comes and goes with no task of its own (a wait, the end of a
    copy of weights) is the op's before it; -1: before the first. rise: of each op how much more there is at most while
    it runs. arriving: transfers that this rank receives.
    """

    def __init__(self, lowered: LoweredProgram, costs: BoundCosts, rank: int):
        super().__init__(lowered.graph, costs, rank)
        self.of_task: dict[int, float] = {}
        self.rise: dict[int, float] = {}
        self.arriving: set[int] = set()
        self._op = self._task = -1
        self._running = False
        self._before = 0.0
        self.go_through(lowered)

    def run(self, task: int) -> None:
        self._op = self._task = task
        self._before, self._running = sum(self.now), True
        self.of_task.setdefault(task, 0.0)
        super().run(task)
        self._running = False

    def transfer(self, action: Action, transfer: Transfer, task: int) -> None:
        if action in (Action.RECV, Action.SEND):
            self._task = task
            if action is Action.RECV:
                self.arriving.add(task)
        super().transfer(action, transfer, task)
        self._task = self._op

    def take(self, number: int, category: int = -1) -> None:
        super().take(number, category)
        if number in self.alive:  # on the device
            self._add(self.alive[number][1])

    def free(self, number: int) -> None:
        size = self.alive[number][1] if number in self.alive else 0.0
        super().free(number)
        self._add(-size)

    def _add(self, size: float) -> None:
        self.of_task[self._task] = self.of_task.get(self._task, 0.0) + size

    def check(self) -> None:
        super().check()
        if self._running:
            self.rise[self._op] = max(self.rise.get(self._op, 0.0), sum(self.now) - self._before)
