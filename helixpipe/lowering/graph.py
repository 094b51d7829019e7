"""The graph of a program: tasks on resources, buffers, and the edges that follow from them.

`build.build_graph` indexes the program's ops and runs the passes one after the other. A pass adds buffers, with the
tasks that write and read them, and the transfers that bring them to other ranks; a `Draft` makes every edge from that:

- a task that reads a buffer waits for the one that wrote it;
- tasks that update a buffer in turn wait for one another in that order;
- a task that writes into memory which another buffer had waits for all who use that one.

The order of the tasks on one resource is the program's (ops) or the one order's (transfers) and makes no edge here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from helixpipe.compiled import MadeWhenAsked
from helixpipe.lowering.index import OpIndex
from helixpipe.program.program import Op, Program, Unit
from helixpipe.program.tasks import Buffer, Resource
from helixpipe.program.transfer import TRANSFER_KINDS, Transfer, TransferKind


@dataclass(frozen=True)
class Graph(MadeWhenAsked):
    """Tasks, buffers and edges of a program. Tasks are numbered: its ops first, then its transfers.

    rank_tasks: for each rank its op tasks in program order. ranks: of each op. successors: for each task the tasks that
    wait for it (rank order is not included). num_dependencies: for each task how many tasks it waits for.
    resources: what each task runs on, as a number; `resource_table` names them, those of ranks' compute first.

    buffers: all there are, by number. writer: of each the task that makes it. writes: for each task the buffers that it
    makes; reads: those that it waits for; frees: those that nobody needs once it has ended (borrowed weights apart:
    which of their readers comes last the order says).
    takes, gives: for each op the buffer of the activation or gradient that crosses the cut into it, and out of it; -1
    where there is none. saved: for each F, R, B and I the buffer of what its unit saved.
    recomputes: the op tasks, B or I, that recompute what their unit needs inside; no one else asks whether they do.
    weights_of: for each op that runs with a copy of its stage's weights, the transfer that brought it. sum_of: for each
    op whose weight gradient leaves its rank, the transfer it leaves in. pairs: for each op that runs beside the one
    after it on its rank, that one (`passes/pairs.py`).
    """

    program: Program
    ops: list[Op]
    ranks: list[int]
    rank_tasks: list[range]
    transfers: list[Transfer] = field(default_factory=list)
    successors: list[list[int]] = field(default_factory=list)
    num_dependencies: list[int] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    writer: list[int] = field(default_factory=list)
    writes: list[tuple[int, ...]] = field(default_factory=list)
    reads: list[tuple[int, ...]] = field(default_factory=list)
    frees: list[tuple[int, ...]] = field(default_factory=list)
    takes: list[int] = field(default_factory=list)
    gives: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    recomputes: set[int] = field(default_factory=set)
    weights_of: dict[Op, Transfer] = field(default_factory=dict)
    sum_of: dict[Op, Transfer] = field(default_factory=dict)
    pairs: dict[int, int] = field(default_factory=dict)

    @property
    def num_tasks(self) -> int:
        return len(self.successors) if self.compiled is None else int(self.compiled.num_tasks)

    @property
    def num_ops(self) -> int:
        return len(self.ops) if self.compiled is None else int(self.compiled.num_ops)

    def transfer(self, task: int) -> Transfer:
        return self.transfers[task - len(self.ops)]

    def task(self, transfer: Transfer) -> int:
        return len(self.ops) + transfer.number

    def count(self, counted: Callable[[TransferKind], object]) -> int:
        """Return the number of transfers of the kinds that are to be counted."""
        rows = TRANSFER_KINDS
        if self.compiled is None:
            return sum(bool(counted(rows[each.kind])) for each in self.transfers)
        return sum(self.compiled.count(number) for number, row in enumerate(rows.values()) if counted(row))

    @cached_property
    def messages(self) -> list[Transfer]:
        """Return the transfers from one rank to another."""
        return [each for each in self.transfers if each.resource == "link"]

    @cached_property
    def collectives(self) -> list[Transfer]:
        return [each for each in self.transfers if each.resource == "collective"]

    @cached_property
    def copies(self) -> list[Transfer]:
        """Return the transfers between a device and its host."""
        return [each for each in self.transfers if each.resource in ("copy_out", "copy_in")]

    def resources(self) -> tuple[list[int], list[Resource]]:
        """For each task the number of what it runs on, and what these numbers mean; those of ranks' compute first."""
        table = [Resource("compute", (rank,)) for rank in range(len(self.rank_tasks))]
        numbers: dict[tuple[str, tuple[int, ...]], int] = {}
        of_task = list(self.ranks)
        for transfer in self.transfers:
            key = transfer.resource, transfer.ranks
            number = numbers.setdefault(key, len(table))
            if number == len(table):
                table.append(Resource(*key))
            of_task.append(number)
        return of_task, table


class Draft:
    """A graph being made, and where the ops of each unit are. The passes of `build.PASSES` read and change it by what
    is here alone, for a compiled one (`compiled.CompiledDraft`) has no `graph`.

    ops, ranks, rank_tasks: as of `Graph`. forward, backward (B or I), weight (W), recompute (R): the task of each unit,
    -1 where there is none, by the unit's number (see `OpIndex`). units: of each op task, its unit's number.
    replica_sums: the collectives that sum gradients over ranks, with these ranks and the stage.
    """

    def __init__(self, program: Program, index: OpIndex):
        self.program, self.units, self.per_stage, self.offsets = program, index.units, index.per_stage, index.offsets
        self.ops, self.ranks, self.rank_tasks = index.ops, index.ranks, index.rank_tasks
        self.replica_sums: list[tuple[int, tuple[int, ...], int]] = []
        graph = self.graph = Graph(program, index.ops, index.ranks, index.rank_tasks)
        numbers = range(self.per_stage * len(program.stages))
        tasks = index.tasks
        self.forward, self.weight, self.recompute = ([tasks[kind].get(n, -1) for n in numbers] for kind in "FWR")
        backward = {**tasks["B"], **tasks["I"]}
        self.backward = [backward.get(n, -1) for n in numbers]
        graph.successors.extend([] for _ in graph.ops)
        graph.num_dependencies.extend([0] * graph.num_ops)
        graph.writes.extend([()] * graph.num_ops)
        graph.reads.extend([()] * graph.num_ops)
        graph.frees.extend([()] * graph.num_ops)
        graph.takes.extend([-1] * graph.num_ops)
        graph.gives.extend([-1] * graph.num_ops)
        graph.saved.extend([-1] * graph.num_ops)

    @property
    def num_transfers(self) -> int:
        return len(self.graph.transfers)

    def unit(self, stage: int, microbatch: int, chunk: int) -> int:
        return stage * self.per_stage + self.offsets[microbatch] + chunk

    def adds(self, name: str) -> bool:
        """Add what the pass of that name would, and return True; where nothing but that function can, return False."""
        return False

    def wait(self, task: int, before: int) -> None:
        """An edge: `task` waits for `before`. A pass asks for one itself only where it paces a transfer, or where
        memory is used in turn; all others follow from what tasks read."""
        self.graph.successors[before].append(task)
        self.graph.num_dependencies[task] += 1

    def buffer(self, buffer: Buffer, writer: int, readers: Iterable[int] = (), freed_by: int = -1) -> int:
        """Add a buffer that `writer` makes and each of the readers waits for; returns its number."""
        graph, number = self.graph, len(self.graph.buffers)
        graph.buffers.append(buffer)
        graph.writer.append(writer)
        graph.writes[writer] += (number,)
        for reader in readers:
            self.read(reader, number)
        if freed_by >= 0:
            graph.frees[freed_by] += (number,)
        return number

    def read(self, task: int, number: int) -> None:
        """Have a task read a buffer, and so wait for the one that wrote it."""
        self.graph.reads[task] += (number,)
        self.wait(task, self.graph.writer[number])

    def also_reads(self, task: int, number: int) -> None:
        """Have a task read a buffer of one that it waits for already."""
        self.graph.reads[task] += (number,)

    def also_frees(self, task: int, number: int) -> None:
        self.graph.frees[task] += (number,)

    def updated(self, buffer: Buffer, tasks: Sequence[int], freed_by: int) -> int:
        """Add a buffer that tasks work on in turn, the first of which makes it."""
        for before, task in pairwise(tasks):
            self.wait(task, before)
        return self.buffer(buffer, tasks[0], (), freed_by)

    def crosses(self, number: int, giver: int = -1, taker: int = -1) -> None:
        """Note a buffer as what crosses the cut out of one op, or into another."""
        if giver >= 0:
            self.graph.gives[giver] = number
        if taker >= 0:
            self.graph.takes[taker] = number

    def keep(self, number: int, *tasks: int, inside: bool = False) -> None:
        """Note a buffer as what the unit of these ops saved; inside: whether the last of them recomputes more."""
        for task in tasks:
            self.graph.saved[task] = number
        if inside:
            self.graph.recomputes.add(tasks[-1])

    def lend(self, op: int, transfer: int) -> None:
        """Note that an op runs with the weights that a transfer, given as its task, brings."""
        self.graph.weights_of[self.ops[op]] = self.graph.transfer(transfer)

    def collect(self, op: int, transfer: int) -> None:
        """Note that an op adds to the gradients that a transfer, given as its task, takes away."""
        self.graph.sum_of[self.ops[op]] = self.graph.transfer(transfer)

    def transfer(
        self, kind: str, ranks: tuple[int, ...], unit: Unit, producer: int = -1, consumer: int = -1,
        *, takes: Iterable[int] = (), follows: int = -1,
    ) -> int:  # fmt: skip
        """Add a transfer (see `Transfer`) and return its task. producer, consumer: tasks of ops, -1 for none. takes:
        the buffers that it reads and frees. Raises ValueError for a kind that is not in `TRANSFER_KINDS`."""
        if kind not in TRANSFER_KINDS:
            raise ValueError(f"{kind!r} is no kind of transfer; known are {', '.join(TRANSFER_KINDS)}")
        graph = self.graph
        made, needed = (None if op < 0 else self.ops[op] for op in (producer, consumer))
        graph.transfers.append(Transfer(len(graph.transfers), kind, ranks, unit, made, needed, follows))
        graph.successors.append([])
        graph.num_dependencies.append(0)
        graph.writes.append(())
        graph.reads.append(())
        graph.frees.append(tuple(takes))
        task = len(graph.successors) - 1
        for number in graph.frees[task]:
            self.read(task, number)
        return task

    def unit_order(self) -> list[int]:
        """Return the ops in the order in which they end where each takes one time and a transfer none."""
        return unit_order(self.graph)

    def finished(self) -> Graph:
        return self.graph


def unit_order(graph: Graph) -> list[int]:
    """The ops in the order in which `list_schedule` has them end where every op takes one time and a transfer none, in
    linear time. Ops that can never start are absent."""
    waiting, (resource, table) = list(graph.num_dependencies), graph.resources()
    queues = [deque[int]() for _ in table]
    for rank, tasks in enumerate(graph.rank_tasks):
        queues[rank].extend(tasks)
    busy = [False] * len(table)
    running, instant = deque[int](), deque[int]()  # ops and transfers in the order they have started and so will end

    def try_start(number: int) -> None:
        queue = queues[number]
        if queue and not busy[number] and not waiting[queue[0]]:
            busy[number] = True
            task = queue.popleft()
            (running if task < graph.num_ops else instant).append(task)

    for task in range(graph.num_ops, graph.num_tasks):
        if not waiting[task]:
            queues[resource[task]].append(task)
    for number in range(len(table)):
        try_start(number)
    order = []
    while instant or running:  # of what ends at one time transfers come first
        task = instant.popleft() if instant else running.popleft()
        if task < graph.num_ops:
            order.append(task)
        for successor in graph.successors[task]:
            waiting[successor] -= 1
            if not waiting[successor]:
                if successor >= graph.num_ops:
                    queues[resource[successor]].append(successor)
                try_start(resource[successor])
        busy[resource[task]] = False
        try_start(resource[task])
    return order


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
