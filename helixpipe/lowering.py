"""Lowering: a program with every receive, wait, send and free made explicit. No torch here.

The program is list-scheduled once; ops and messages by start time form one linear order that extends the dependencies
and every rank's own order. Each rank's stream is the projection of that one order: a message appears at its place in
the streams of both its ends.

Theorem. Streams projected from one linear order cannot deadlock, even when messages are unbuffered rendezvous (a send
ends only when its receive runs) and each rank has a single communication stream that runs in the order issued.
Proof. Take the earliest event of the order that has not finished. Everything before it has. If it is an op, its rank
has finished all that precedes it in its stream, and all messages it waits for are earlier in the order, so finished:
it runs. If it is a message, both ends have issued it, because all earlier ops of both ranks have finished, and it is
at the head of both communication streams, because all earlier messages have finished: it runs. So there is never an
earliest event that is stuck. (Tested with random programs.)

`receive_ahead` posts receives earlier than their place, by that many ops, so that the transfer overlaps the op before
the one that needs it even where the receiver must have posted first (gloo). That is safe where a posted receive holds
up nothing but later receives from the same rank (gloo; NCCL with a communicator a direction), which
`Transport.independent_channels` states; otherwise it must be 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from helixpipe.costs import Costs, PieceTimes
from helixpipe.graph import Graph, Message, Times, collector_paused, list_schedule
from helixpipe.program import PIECE_KINDS, Op, Program
from helixpipe.validate import validate


class Action(str, Enum):
    """What one instruction does; the executor has one handler each."""

    RECV = "RECV"
    """Post the receive of a message: take a buffer and start listening."""
    WAIT = "WAIT"
    """Wait until a received message is there. No op needs the gradients of shipped weights: they are taken in before
    the first op that starts, on paper, after they have come, or at the end."""
    RUN = "RUN"
    """Run an op."""
    SEND = "SEND"
    """Start sending a message; its tensors belong to the transport from here on."""
    FREE = "FREE"
    """After an F whose outputs have left: this rank no longer needs their data. After a B or W: nor anything its unit
    stashed."""


class Instruction(NamedTuple):
    """One step of a rank's stream. RUN and FREE name an op, the others a message."""

    action: Action
    op: Op | None = None
    message: Message | None = None

    def __str__(self) -> str:
        return f"{self.action.value} {self.op if self.op is not None else self.message}"


@dataclass(frozen=True)
class LoweredProgram:
    """What the executor and the simulator both read.

    streams: for each rank its instructions. graph: the tasks they came from. order: the one linear order of tasks.
    """

    program: Program
    graph: Graph
    order: tuple[int, ...]
    streams: tuple[tuple[Instruction, ...], ...]

    @property
    def messages(self) -> list[Message]:
        return self.graph.messages


@collector_paused()
def lower(program: Program, costs: Costs | None = None, receive_ahead: int = 0) -> LoweredProgram:
    """Validate and lower a program. Every rank computes the same result from the same arguments.

    costs: decide the order of messages relative to ops; unit costs when None. Raises ProgramError when the program is
    not valid.
    """
    graph = validate(program)
    times = list_schedule(graph, *timers(program, costs or unit_costs()))
    streams = tuple(_post_receives_early(stream, receive_ahead) for stream in _project(graph, times))
    return LoweredProgram(program, graph, tuple(times.order), streams)


def unit_costs() -> PieceTimes:
    """Every piece takes 1, backward twice that, a message 0.1: only their order matters here."""
    return PieceTimes(dict.fromkeys(PIECE_KINDS, 1.0), message=0.1)


def timers(program: Program, costs: Costs) -> tuple[Callable[[Op], float], Callable[[Message], float]]:
    """`costs` bound to a program for `list_schedule`; an op's time is asked for once for all microbatches.

    A backward whose unit is recomputed and has no R op takes the time of R as well.
    """
    known: dict[tuple[str, int, int, bool], float] = {}
    explicit = {op.unit for ops in program.ranks for op in ops if op.kind == "R"}
    recomputes = [bool(stage.recompute) for stage in program.stages]

    def op_time(op: Op) -> float:
        inside = op.kind in "BI" and recomputes[op.stage] and op.unit not in explicit
        key = (op.kind, op.stage, op.chunk, inside)
        if key not in known:
            known[key] = costs.op_time(program, op)
            if inside:
                known[key] += costs.op_time(program, op._replace(kind="R"))
        return known[key]

    return op_time, lambda message: costs.message_time(program, message)


def _project(graph: Graph, times: Times) -> list[list[Instruction]]:
    streams: list[list[Instruction]] = [[] for _ in graph.rank_tasks]
    waits: dict[Op, list[Instruction]] = {}
    unsent: dict[Op, int] = {}
    returned: list[list[tuple[float, Instruction]]] = [[] for _ in streams]  # gradients: arrival on paper, WAIT
    for message in graph.messages:
        if message.kind != "weight_gradients":
            waits.setdefault(message.consumer, []).append(Instruction(Action.WAIT, None, message))
        if not message.ships:
            unsent[message.producer] = unsent.get(message.producer, 0) + 1
    for task in times.order:
        if graph.is_message(task):
            message = graph.message(task)
            producer = message.producer
            streams[message.source].append(Instruction(Action.SEND, None, message))
            streams[message.target].append(Instruction(Action.RECV, None, message))
            if message.kind == "weight_gradients":
                returned[message.target].append((times.end[task], Instruction(Action.WAIT, None, message)))
            if message.ships:
                continue
            unsent[producer] -= 1
            if producer.kind == "F" and unsent[producer] == 0:
                streams[message.source].append(Instruction(Action.FREE, producer))
        else:
            op = graph.ops[task]
            stream = streams[graph.ranks[task]]
            arrivals = returned[graph.ranks[task]]
            stream.extend(wait for end, wait in arrivals if end <= times.start[task])
            arrivals[:] = [arrival for arrival in arrivals if arrival[0] > times.start[task]]
            stream.extend(waits.get(op, ()))
            stream.append(Instruction(Action.RUN, op))
            if op.kind in "BW":
                stream.append(Instruction(Action.FREE, op))
    for stream, arrivals in zip(streams, returned, strict=True):
        stream.extend(wait for _, wait in arrivals)
    return streams


def _post_receives_early(stream: list[Instruction], ahead: int) -> tuple[Instruction, ...]:
    """Move each RECV before the `ahead` ops that precede it. All move alike, so receives keep their order."""
    if ahead == 0:
        return tuple(stream)
    before_run: dict[int, list[Instruction]] = {}
    runs = 0
    for instruction in stream:
        if instruction.action is Action.RECV:
            before_run.setdefault(max(runs - ahead, 0), []).append(instruction)
        runs += instruction.action is Action.RUN
    moved: list[Instruction] = []
    runs = 0
    for instruction in stream:
        if runs in before_run:  # the first instruction after the run before
            moved.extend(before_run.pop(runs))
        if instruction.action is not Action.RECV:
            moved.append(instruction)
        runs += instruction.action is Action.RUN
    return tuple(moved)
