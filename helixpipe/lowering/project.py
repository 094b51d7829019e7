"""The one order projected onto ranks: each rank's instructions.

A rank's stream is the one order with everything left out that does not concern the rank. A message concerns two ranks
and so appears in both of their streams, at its place; a collective appears in those of all its members.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple

from helixpipe.compiled import MadeWhenAsked
from helixpipe.lowering.graph import Graph
from helixpipe.lowering.order import TaskTimes
from helixpipe.program.derived import Derives
from helixpipe.program.program import Op, Program
from helixpipe.program.transfer import TRANSFER_KINDS, Transfer, Waited

RETURN_SLACK = 4
"""Ops that an owner still runs, after returned weight gradients came on paper, before it waits for them.

Nothing needs them before the step ends, and a neighbour that is a little late must not hold up its owner's compute.
With each op more a buffer is held longer; two folds of helix need four. Only for shipped stages: the sums of a ring
stage are as large as all that its owner holds."""


class Action(str, Enum):
    """The kinds of instruction; the executor has one handler for each."""

    __hash__ = str.__hash__  # Enum's own is a function of Python's, called for every instruction that is looked up

    RUN = "RUN"
    """Run an op; of a pair the first begins with it, and both have ended after that of the second."""
    SEND = "SEND"
    """Start sending a message; its tensors belong to the transport from here on. Weights that were received are sent as
    they are, maybe before they have arrived, and stay in use."""
    RECV = "RECV"
    """Post the receive of a message: take a buffer and start listening."""
    START = "START"
    """Begin a collective with the others of its group, or a copy: take memory for what it brings."""
    WAIT = "WAIT"
    """Wait until a transfer has ended, and let go of what it has taken away; where that is `transfer.Waited` says. No
    op needs gradients of weights: those that another message follows are waited for right before its SEND; the others,
    which are their owner's, `RETURN_SLACK` ops after the first one that starts, on paper, after they have come, or at
    the end. What is fetched may be waited for only after what was offloaded has been."""
    FREE = "FREE"
    """Of a B or W: its unit stashes nothing any more. Of a message: the copy of weights it brought has had its last op
    and has been passed on."""


class Instruction(NamedTuple):
    """One step of a rank's stream. RUN names an op, FREE an op or a message, the others a transfer. task: the op's or
    transfer's number in the graph."""

    action: Action
    op: Op | None = None
    transfer: Transfer | None = None
    task: int = -1

    def __str__(self) -> str:
        return f"{self.action.value} {self.op or self.transfer}"


_instruction = partial(tuple.__new__, Instruction)
"""Of a tuple of all fields: as `Instruction._make`, in half the time; there are four or five for each op."""
_RUN, _SEND, _RECV, _START = Action.RUN, Action.SEND, Action.RECV, Action.START
_WAIT, _FREE = Action.WAIT, Action.FREE


@dataclass(frozen=True)
class LoweredProgram(MadeWhenAsked, Derives):
    """A program lowered to one stream of instructions a rank, which the executor and the simulator both read.

    streams: for each rank its instructions. graph: the tasks they came from. order: the one linear order of tasks.
    openings: how many instructions of each rank's stream belong to the opening of the step, which is what comes before
    the first backward in the one order. All that is sent in it is received in it, so it can be run again.
    """

    program: Program
    graph: Graph
    order: tuple[int, ...]
    streams: tuple[tuple[Instruction, ...], ...]
    openings: tuple[int, ...]

    @property
    def messages(self) -> list[Transfer]:
        return self.graph.messages


def project(
    graph: Graph, times: TaskTimes, return_slack: int = RETURN_SLACK
) -> tuple[list[list[Instruction]], tuple[int, ...]]:
    """The streams of the ranks, and how much of each is the opening: what comes before the first backward."""
    projection = _Projection(graph, times, return_slack)
    openings: tuple[int, ...] | None = None
    for task in times.order:
        if task < graph.num_ops:
            if openings is None and graph.ops[task].kind in "BI":
                openings = tuple(map(len, projection.streams))
            projection.op(task)
        else:
            projection.transfer(task)
    for stream, arrivals in zip(projection.streams, projection.returned, strict=True):
        stream.extend(arrival.wait for arrival in arrivals)
    return projection.streams, openings or tuple(map(len, projection.streams))


@dataclass
class _UnawaitedTransfer:
    """A transfer whose end no task waits for: weight gradients on their way to their owner, a copy to the host, a
    scatter.
    end: of it, on paper. slack: ops left until its WAIT."""

    end: float
    slack: int
    wait: Instruction


class _Projection:
    """The streams so far. returned: by rank, transfers that no task waits for and that have ended or will, oldest
    first. waits: by task those that are waited for right before it. unused: of borrowed weights, by transfer, the ops
    that still run with them and the transfers that still pass them on."""

    def __init__(self, graph: Graph, times: TaskTimes, return_slack: int):
        self.graph, self.times, self.return_slack = graph, times, return_slack
        self.streams: list[list[Instruction]] = [[] for _ in graph.rank_tasks]
        self.returned: list[list[_UnawaitedTransfer]] = [[] for _ in graph.rank_tasks]
        self.waits = _waits(graph)
        self.awaited = {(wait.task, _rank(graph, task)) for task, waits in self.waits.items() for wait in waits}
        self.first_of = {second: first for first, second in graph.pairs.items()}
        self.unused = Counter(transfer.number for transfer in graph.weights_of.values())
        self.unused.update(each.follows for each in graph.transfers if TRANSFER_KINDS[each.kind].passed_on)

    def op(self, task: int) -> None:
        """Add an op, or a pair with its second one: what it waits for, the ops, and what goes after them."""
        graph = self.graph
        if task in graph.pairs:
            return
        tasks = (self.first_of[task], task) if task in self.first_of else (task,)
        rank = graph.ranks[task]
        stream = self.streams[rank]
        if self.returned[rank]:
            self._take_in(rank, self.times.start[tasks[0]])
        for each in tasks:
            stream.extend(self.waits.get(each, ()))
        stream.extend(_instruction((_RUN, graph.ops[each], None, each)) for each in tasks)
        for each in tasks:
            op = graph.ops[each]
            if op.kind in "BW":  # the last op of a unit: a whole backward, or W where the backward is split
                stream.append(_instruction((_FREE, op, None, each)))
            if op in graph.weights_of:
                self._use(graph.weights_of[op])

    def transfer(self, task: int) -> None:
        transfer = self.graph.transfer(task)
        row = TRANSFER_KINDS[transfer.kind]
        ends = _ENDS if row.resource == "link" else (_START,) * len(transfer.ranks)
        self.streams[transfer.source].extend(self.waits.get(task, ()))
        for rank, action in zip(transfer.ranks, ends, strict=True):
            self.streams[rank].append(_instruction((action, None, transfer, task)))
        if row.waited is Waited.ENDED or row.waited is Waited.READER:
            shipped = self.graph.program.stages[transfer.unit.stage].placement == "shipped"
            slack = self.return_slack if shipped and row.resource == "link" else 0
            wait = _instruction((_WAIT, None, transfer, task))
            for rank in transfer.ranks[1:] if row.resource == "link" else transfer.ranks:
                if (task, rank) not in self.awaited:
                    self.returned[rank].append(_UnawaitedTransfer(self.times.end[task], slack, wait))
        if transfer.follows >= 0 and row.passed_on:
            self._use(self.graph.transfers[transfer.follows])

    def _take_in(self, rank: int, start: float) -> None:
        """Before an op that starts then: wait for the transfers that have ended, when they have had their slack."""
        waiting = []
        for arrival in self.returned[rank]:
            if arrival.end > start:
                waiting.append(arrival)
            elif arrival.slack > 0:
                arrival.slack -= 1
                waiting.append(arrival)
            else:
                self.streams[rank].append(arrival.wait)
        self.returned[rank] = waiting

    def _use(self, message: Transfer) -> None:
        """Count one use of borrowed weights, by an op or a message that passes them on; the last use frees them."""
        self.unused[message.number] -= 1
        if not self.unused[message.number]:
            self.streams[message.target].append(_instruction((_FREE, None, message, self.graph.task(message))))


_ENDS = (_SEND, _RECV)


def _rank(graph: Graph, task: int) -> int:
    """The rank in whose stream a task waits for others."""
    return graph.ranks[task] if task < graph.num_ops else graph.transfer(task).source


def _waits(graph: Graph) -> dict[int, list[Instruction]]:
    """For each task the transfers that are waited for right before it: those of which it is the first of its rank to
    read what they bring. Ops come in their rank's order before all transfers, so what passes weights on, which an op
    of its rank needs too, does not wait for them."""
    waits: dict[int, list[Instruction]] = {}
    seen: set[tuple[int, int]] = set()
    rows = [TRANSFER_KINDS[each.kind] for each in graph.transfers]
    for task, numbers in enumerate(graph.reads):
        for number in numbers:
            writer = graph.writer[number]
            place = writer - graph.num_ops
            if place < 0 or rows[place].waited is not Waited.READER or (writer, _rank(graph, task)) in seen:
                continue
            seen.add((writer, _rank(graph, task)))
            waits.setdefault(task, []).append(_instruction((_WAIT, None, graph.transfers[place], writer)))
    return waits
