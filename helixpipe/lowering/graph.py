"""The graph of a program: tasks on resources, buffers, and the edges that follow from them.

`build.build_graph` indexes the program's ops and runs the passes one after the other. A pass adds buffers, with the
tasks that write and read them, and the transfers that bring them to other ranks; a `Draft` makes every edge from that:

- a task that reads a buffer waits for the one that wrote it;
- tasks that update a buffer in turn wait for one another in that order;
- a task that writes into memory which another buffer had waits for all who use that one.

The order of the tasks on one resource is the program's (ops) or the one order's (transfers) and makes no edge here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from helixpipe.lowering.index import OpIndex
from helixpipe.program.message import Collective, Copy, Message
from helixpipe.program.program import Op, Program
from helixpipe.program.tasks import Buffer, Resource


@dataclass(frozen=True)
class Graph:
    """Tasks, buffers and edges of a program. Tasks are numbered: its ops first, then messages, collectives and
    copies.

    rank_tasks: for each rank its op tasks in program order. ranks: of each op. successors: for each task the tasks that
    wait for it (rank order is not included). num_dependencies: for each task how many tasks it waits for.
    resources: what each task runs on, as a number; `resource_table` names them, those of ranks' compute first.

    buffers: all there are, by number. writes: for each task the buffers that it makes; frees: those that nobody needs
    once it has ended (borrowed weights apart: which of their readers comes last the order says).
    takes, gives: for each op the buffer of the activation or gradient that crosses the cut into it, and out of it; -1
    where there is none. saved: for each F, R, B and I the buffer of what its unit saved. sources, targets: for each
    message the buffer it carries away, and the one it fills; -1 where these are weights of a rank's own.
    recomputes: the op tasks, B or I, that recompute what their unit needs inside; no one else asks whether they do.
    weights_of: for each op that runs with a copy of its stage's weights, the message that brought it. sum_of: for each
    op whose weight gradient leaves its rank, the message it leaves in.
    """

    program: Program
    ops: list[Op]
    ranks: list[int]
    rank_tasks: list[range]
    messages: list[Message] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    successors: list[list[int]] = field(default_factory=list)
    num_dependencies: list[int] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    writes: list[tuple[int, ...]] = field(default_factory=list)
    frees: list[tuple[int, ...]] = field(default_factory=list)
    takes: list[int] = field(default_factory=list)
    gives: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    recomputes: set[int] = field(default_factory=set)
    weights_of: dict[Op, Message] = field(default_factory=dict)
    sum_of: dict[Op, Message] = field(default_factory=dict)

    @property
    def num_tasks(self) -> int:
        return len(self.successors)

    @property
    def num_ops(self) -> int:
        return len(self.ops)

    def message(self, task: int) -> Message:
        return self.messages[task - len(self.ops)]

    def collective(self, task: int) -> Collective:
        return self.collectives[task - len(self.ops) - len(self.messages)]

    def copy(self, task: int) -> Copy:
        return self.copies[task - self.first_copy]

    @property
    def first_copy(self) -> int:
        """The number of the first task that is a copy."""
        return len(self.ops) + len(self.messages) + len(self.collectives)

    def is_message(self, task: int) -> bool:
        return len(self.ops) <= task < len(self.ops) + len(self.messages)

    def resources(self) -> tuple[list[int], list[Resource]]:
        """For each task the number of what it runs on, and what these numbers mean; those of ranks' compute first."""
        table = [Resource("compute", (rank,)) for rank in range(len(self.rank_tasks))]
        numbers: dict[tuple[str, tuple[int, ...]], int] = {}
        of_task = list(self.ranks)

        def add(kind: str, ranks: tuple[int, ...]) -> None:
            number = numbers.setdefault((kind, ranks), len(table))
            if number == len(table):
                table.append(Resource(kind, ranks))
            of_task.append(number)

        for message in self.messages:
            add("link", (message.source, message.target))
        for collective in self.collectives:
            add("collective", collective.ranks)
        for copy in self.copies:
            add("copy_in" if copy.inward else "copy_out", (copy.rank,))
        return of_task, table


class Draft:
    """A graph being made, and where the ops of each unit are.

    forward, backward (B or I), weight (W), recompute (R): the task of each unit, -1 where there is none, by the unit's
    number (see `OpIndex`). units: of each op task, its unit's number.
    """

    def __init__(self, program: Program, index: OpIndex):
        self.program, self.units, self.per_stage, self.unit = program, index.units, index.per_stage, index.unit
        graph = self.graph = Graph(program, index.ops, index.ranks, index.rank_tasks)
        numbers = range(self.per_stage * len(program.stages))
        tasks = index.tasks
        self.forward, self.weight, self.recompute = ([tasks[kind].get(n, -1) for n in numbers] for kind in "FWR")
        backward = {**tasks["B"], **tasks["I"]}
        self.backward = [backward.get(n, -1) for n in numbers]
        graph.successors.extend([] for _ in graph.ops)
        graph.num_dependencies.extend([0] * graph.num_ops)
        graph.writes.extend([()] * graph.num_ops)
        graph.frees.extend([()] * graph.num_ops)
        graph.takes.extend([-1] * graph.num_ops)
        graph.gives.extend([-1] * graph.num_ops)
        graph.saved.extend([-1] * graph.num_ops)

    def wait(self, task: int, before: int) -> None:
        """An edge: `task` waits for `before`. For the methods below."""
        self.graph.successors[before].append(task)
        self.graph.num_dependencies[task] += 1

    def buffer(self, buffer: Buffer, writer: int, readers: Iterable[int] = (), freed_by: int = -1) -> int:
        """Add a buffer that `writer` makes and each of the readers waits for; returns its number."""
        graph, number = self.graph, len(self.graph.buffers)
        graph.buffers.append(buffer)
        graph.writes[writer] += (number,)
        for reader in readers:
            self.wait(reader, writer)
        if freed_by >= 0:
            graph.frees[freed_by] += (number,)
        return number

    def updated(self, buffer: Buffer, tasks: Sequence[int], freed_by: int) -> int:
        """Add a buffer that tasks work on in turn, the first of which makes it."""
        for before, task in pairwise(tasks):
            self.wait(task, before)
        return self.buffer(buffer, tasks[0], (), freed_by)

    def transfer(self, message: Message) -> int:
        """Add a message's task; what it waits for and who for it its buffers say."""
        graph = self.graph
        graph.messages.append(message)
        graph.sources.append(-1)
        graph.targets.append(-1)
        return self._task()

    def collective(self, collective: Collective, after: Iterable[int]) -> int:
        """Add a collective's task, after the ops whose results it sums up."""
        self.graph.collectives.append(collective)
        task = self._task()
        for before in after:
            self.wait(task, before)
        return task

    def copy(self, copy: Copy) -> int:
        """Add a copy's task, which makes no edge by itself."""
        self.graph.copies.append(copy)
        return self._task()

    def _task(self) -> int:
        graph = self.graph
        graph.successors.append([])
        graph.num_dependencies.append(0)
        graph.writes.append(())
        graph.frees.append(())
        return len(graph.successors) - 1


def op_dependencies(graph: Graph) -> dict[Op, list[Op]]:
    """For each op the ops it waits for, on its own rank or through one message."""
    needed: dict[Op, list[Op]] = {op: [] for op in graph.ops}
    for task, op in enumerate(graph.ops):
        for successor in graph.successors[task]:
            if successor < graph.num_ops:
                needed[graph.ops[successor]].append(op)
                continue
            for reader in graph.successors[successor]:
                if reader < graph.num_ops:
                    needed[graph.ops[reader]].append(op)
    return needed
