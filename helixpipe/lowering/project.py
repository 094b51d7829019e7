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

from helixpipe.lowering.graph import Graph
from helixpipe.lowering.order import TaskTimes
from helixpipe.program.message import Collective, Copy, Message
from helixpipe.program.program import Derives, Op, Program

RETURN_SLACK = 4
"""Ops that an owner still runs, after returned weight gradients came on paper, before it waits for them.

Nothing needs them before the step ends, and a neighbour that is a little late must not hold up its owner's compute.
With each op more a buffer is held longer; two folds of helix need four. Only for shipped stages: the sums of a ring
stage are as large as all that its owner holds."""


class Action(str, Enum):
    """The kinds of instruction; the executor has one handler for each."""

    __hash__ = str.__hash__  # Enum's own is a function of Python's, called for every instruction that is looked up

    RECV = "RECV"
    """Post the receive of a message: take a buffer and start listening."""
    WAIT = "WAIT"
    """Wait until a received message is there. No op needs gradients of weights: those that another message follows are
    waited for right before its SEND; the others, which are their owner's, `RETURN_SLACK` ops after the first one that
    starts, on paper, after they have come, or at the end."""
    RUN = "RUN"
    """Run an op."""
    SEND = "SEND"
    """Start sending a message; its tensors belong to the transport from here on. Weights that were received are sent as
    they are, maybe before they have arrived, and stay in use."""
    REDUCE = "REDUCE"
    """Start a collective; what it sums up belongs to it until the step ends."""
    GATHER = "GATHER"
    """Start to gather the weights of a stage over the data-parallel ranks; the op that needs them waits for them, and
    the last one lets go of them."""
    SCATTER = "SCATTER"
    """Start to scatter the gradients that an op has made over the data-parallel ranks."""
    SCATTERED = "SCATTERED"
    """Wait for that, add this rank's part to its sum, and let go of the whole: right before the first op that starts,
    on paper, after it has ended."""
    OFFLOAD = "OFFLOAD"
    """Start copying to the host what leaves of what the op, an F, has saved."""
    GONE = "GONE"
    """Wait until that copy has ended, and let go of the memory: right before the first op that starts, on paper, after
    it has."""
    FETCH = "FETCH"
    """Take memory for what an op needs back, and start copying it in, when it has left. GONE may come after that, but
    before BACK."""
    BACK = "BACK"
    """Wait until that is there, right before the op; its place in the host's memory is free."""
    FREE = "FREE"
    """Of a B or W: its unit stashes nothing any more. Of a message: the copy of weights it brought has had its last op
    and has been passed on."""


def begins(transfer: Collective | Copy) -> Action:
    """The action with which a collective or a copy begins on each of its ranks."""
    if isinstance(transfer, Copy):
        return Action.FETCH if transfer.inward else Action.OFFLOAD
    return {"gather": Action.GATHER, "scatter": Action.SCATTER}.get(transfer.kind, Action.REDUCE)


class Instruction(NamedTuple):
    """One step of a rank's stream. RUN names an op, OFFLOAD and GONE the F before, FETCH and BACK the op that needs
    what was offloaded, FREE an op or a message, REDUCE, GATHER, SCATTER and SCATTERED a collective, the others a
    message. task: the op's or transfer's number in the graph."""

    action: Action
    op: Op | None = None
    message: Message | None = None
    collective: Collective | None = None
    task: int = -1

    def __str__(self) -> str:
        return f"{self.action.value} {self.op or self.message or self.collective}"


_instruction = partial(tuple.__new__, Instruction)
"""Of a tuple of all fields: as `Instruction._make`, in half the time; there are four or five for each op."""
_RECV, _RUN, _SEND, _FREE = Action.RECV, Action.RUN, Action.SEND, Action.FREE


@dataclass(frozen=True)
class LoweredProgram(Derives):
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
    def messages(self) -> list[Message]:
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
        elif graph.is_message(task):
            projection.message(task)
        elif task < graph.first_copy:
            projection.collective(task)
        else:
            projection.copy(task)
    for stream, arrivals in zip(projection.streams, projection.returned, strict=True):
        stream.extend(arrival.wait for arrival in arrivals)
    return projection.streams, openings or tuple(map(len, projection.streams))


@dataclass
class _UnawaitedTransfer:
    """A transfer whose end no op waits for: weight gradients on their way to their owner, a copy to the host
    or a scatter.
    end: of it, on paper. slack: ops left until WAIT or GONE."""

    end: float
    slack: int
    wait: Instruction


class _Projection:
    """The streams so far. returned: by rank, gradients and copies that have ended or will, oldest first. unused: of
    borrowed weights, by message, the ops that still run with them and the messages that still pass them on."""

    def __init__(self, graph: Graph, times: TaskTimes, return_slack: int):
        self.graph, self.times, self.return_slack = graph, times, return_slack
        self.streams: list[list[Instruction]] = [[] for _ in graph.rank_tasks]
        self.returned: list[list[_UnawaitedTransfer]] = [[] for _ in graph.rank_tasks]
        self.waits: dict[Op, list[Instruction]] = {}
        for message in graph.messages:
            if message.kind != "weight_gradients":
                self.waits.setdefault(message.consumer, []).append(self._instruction(Action.WAIT, message))
        for task, copy in enumerate(graph.copies, start=graph.first_copy):
            if copy.inward:
                back = _instruction((Action.BACK, copy.op, None, None, task))
                self.waits.setdefault(copy.op, []).append(back)
        self.unused = Counter(message.number for message in graph.weights_of.values())
        self.unused.update(m.follows for m in graph.messages if m.kind == "weights" and m.follows >= 0)
        self.joined = {m.follows for m in graph.messages if m.kind == "weight_gradients"}

    def op(self, task: int) -> None:
        graph = self.graph
        op, rank = graph.ops[task], graph.ranks[task]
        stream = self.streams[rank]
        if self.returned[rank]:
            self._take_in(rank, self.times.start[task])
        stream.extend(self.waits.get(op, ()))
        stream.append(_instruction((_RUN, op, None, None, task)))
        if op.kind in "BW":  # the last op of a unit: a whole backward, or W where the backward is split into I and W
            stream.append(_instruction((_FREE, op, None, None, task)))
        if op in graph.weights_of:
            self._use(graph.weights_of[op])

    def message(self, task: int) -> None:
        message = self.graph.message(task)
        before = self.graph.messages[message.follows] if message.follows >= 0 else None
        source = self.streams[message.source]
        if before is not None and message.kind == "weight_gradients":
            # The message carries the sum that `before` brought beside its own, so it cannot leave earlier.
            source.append(self._instruction(Action.WAIT, before))
        source.append(_instruction((_SEND, None, message, None, task)))
        self.streams[message.target].append(_instruction((_RECV, None, message, None, task)))
        if message.kind == "weight_gradients" and message.number not in self.joined:
            wait = self._instruction(Action.WAIT, message)
            stage = self.graph.program.stages[message.producer.stage]
            slack = self.return_slack if stage.placement == "shipped" else 0
            self.returned[message.target].append(_UnawaitedTransfer(self.times.end[task], slack, wait))
        if before is not None and message.kind == "weights":
            self._use(before)

    def collective(self, task: int) -> None:
        collective = self.graph.collective(task)
        action = begins(collective)
        for rank in collective.ranks:
            self.streams[rank].append(Instruction(action, None, None, collective, task))
            if action is Action.SCATTER:
                done = Instruction(Action.SCATTERED, None, None, collective, task)
                self.returned[rank].append(_UnawaitedTransfer(self.times.end[task], 0, done))

    def copy(self, task: int) -> None:
        copy = self.graph.copy(task)
        self.streams[copy.rank].append(_instruction((begins(copy), copy.op, None, None, task)))
        if not copy.inward:
            gone = _instruction((Action.GONE, copy.op, None, None, task))
            self.returned[copy.rank].append(_UnawaitedTransfer(self.times.end[task], 0, gone))

    def _instruction(self, action: Action, message: Message) -> Instruction:
        return _instruction((action, None, message, None, self.graph.num_ops + message.number))

    def _take_in(self, rank: int, start: float) -> None:
        """Before an op that starts then: wait for the gradients that came, when they have had their slack."""
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

    def _use(self, message: Message) -> None:
        """Count one use of borrowed weights, by an op or a message that passes them on; the last use frees them."""
        self.unused[message.number] -= 1
        if not self.unused[message.number]:
            self.streams[message.target].append(self._instruction(Action.FREE, message))
