"""Lowering: a program with every receive, wait, send and free made explicit. No torch here.

The program is list-scheduled once; ops and messages by start time form one linear order that extends the dependencies
and every rank's own order. Each rank's stream is the projection of that one order: a message appears at its place in
the streams of both its ends.

Theorem. Streams projected from one linear order cannot deadlock, even when messages are unbuffered rendezvous (a send
ends only when its receive runs) and each rank has a single communication stream that runs in the order issued.
Proof. Take the earliest event of the order that has not finished. Everything before it has. If it is an op, its rank
has finished all that precedes it in its stream, and all messages it waits for are earlier in the order, so finished:
it runs. If it is a message, both ends have issued it, because all earlier ops of both ranks have finished, and it is
at the head of both communication streams, because all earlier messages have finished, what it passes on among them: it
runs. So there is never an earliest event that is stuck. (Tested with random programs.)

Weights that travel. The handlers of an executor need no more than the instruction and three tables of the graph, all by
message (`Message.number`), so copies of one stage on a rank are never mixed up:

- RUN of an op in `Graph.weights_of` runs with the copy that message brought, any other with the rank's own parameters;
  of an op in `Graph.sum_of` the weight gradient is added to that message's sum (zero before its first op), any other's
  to the rank's own parameters.
- `weights`: RECV takes a place and receives into it; WAIT comes right before the first op that runs with the copy; FREE
  of the message gives the place back. SEND sends the rank's own parameters, or, if it `follows` a message, what that
  message brings: its RECV is earlier in the stream, but its WAIT need not be, so the transport starts the transfer when
  that one is complete. A copy that is passed on may still be on its way out at its FREE; the transport keeps its memory
  until then. A RECV posted ahead may come before the FREE of its place, and then needs a buffer more.
- `weight_gradients`: right before a SEND that `follows` a message comes the WAIT for that message, whose payload is
  added to the sum; SEND sends the sum and drops it. A WAIT for one that nothing follows is the stage's owner's, which
  adds the payload to its own parameters' gradients.

`receive_ahead` posts receives earlier than their place, by that many ops, so that the transfer overlaps the op before
the one that needs it even where the receiver must have posted first (gloo). That is safe where a posted receive holds
up nothing but later receives from the same rank, which `Transport.independent_channels` states; otherwise it must be 0.
On a GPU it is not, whatever the communicators: streams share hardware queues, and there a receive that has to wait for
the one before it holds up ops too, which those two may need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from helixpipe.costs.by_hand import unit_costs
from helixpipe.lowering.graph import Graph, Times, collector_paused, list_schedule
from helixpipe.lowering.validate import validate
from helixpipe.program.costs import Costs
from helixpipe.program.message import Message
from helixpipe.program.program import Op, Program


class Action(str, Enum):
    """What one instruction does; the executor has one handler each."""

    RECV = "RECV"
    """Post the receive of a message: take a buffer and start listening."""
    WAIT = "WAIT"
    """Wait until a received message is there. No op needs gradients of weights: those that another message follows are
    waited for right before its SEND; the others, which are their owner's, before the first op that starts, on paper,
    after they have come, or at the end."""
    RUN = "RUN"
    """Run an op."""
    SEND = "SEND"
    """Start sending a message; its tensors belong to the transport from here on. Weights that were received are sent as
    they are, maybe before they have arrived, and stay in use."""
    FREE = "FREE"
    """Of a B or W: its unit stashes nothing any more. Of a message: the copy of weights it brought has had its last op
    and has been passed on."""


class Instruction(NamedTuple):
    """One step of a rank's stream. RUN names an op, FREE an op or a message, the others a message."""

    action: Action
    op: Op | None = None
    message: Message | None = None

    def __str__(self) -> str:
        return f"{self.action.value} {self.op if self.op is not None else self.message}"


@dataclass(frozen=True)
class LoweredProgram:
    """What the executor and the simulator both read.

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


@collector_paused()
def lower(program: Program, costs: Costs | None = None, receive_ahead: int = 0) -> LoweredProgram:
    """Validate and lower a program. Every rank computes the same result from the same arguments.

    costs: decide the order of messages relative to ops; unit costs when None. Raises ProgramError when the program is
    not valid.
    """
    graph = validate(program)
    times = list_schedule(graph, *timers(program, costs or unit_costs()))
    projected, openings = _project(graph, times)
    streams = tuple(
        (*_post_receives_early(stream[:opening], receive_ahead), *_post_receives_early(stream[opening:], receive_ahead))
        for stream, opening in zip(projected, openings, strict=True)
    )
    return LoweredProgram(program, graph, tuple(times.order), streams, openings)


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


def _project(graph: Graph, times: Times) -> tuple[list[list[Instruction]], tuple[int, ...]]:
    """The streams of the ranks, and how much of each is the opening."""
    openings: tuple[int, ...] | None = None
    streams: list[list[Instruction]] = [[] for _ in graph.rank_tasks]
    waits: dict[Op, list[Instruction]] = {}
    returned: list[list[tuple[float, Instruction]]] = [[] for _ in streams]  # gradients: arrival on paper, WAIT
    unused = Counter(message.number for message in graph.weights_of.values())  # of a copy: ops to run, SENDs
    unused.update(m.follows for m in graph.messages if m.kind == "weights" and m.follows >= 0)
    joined = {m.follows for m in graph.messages if m.kind == "weight_gradients"}
    for message in graph.messages:
        if message.kind != "weight_gradients":
            waits.setdefault(message.consumer, []).append(Instruction(Action.WAIT, None, message))

    def use(message: Message) -> None:
        unused[message.number] -= 1
        if not unused[message.number]:
            streams[message.target].append(Instruction(Action.FREE, None, message))

    for task in times.order:
        if graph.is_message(task):
            message = graph.message(task)
            before = graph.messages[message.follows] if message.follows >= 0 else None
            if before is not None and message.kind == "weight_gradients":
                streams[message.source].append(Instruction(Action.WAIT, None, before))
            streams[message.source].append(Instruction(Action.SEND, None, message))
            streams[message.target].append(Instruction(Action.RECV, None, message))
            if message.kind == "weight_gradients" and message.number not in joined:
                returned[message.target].append((times.end[task], Instruction(Action.WAIT, None, message)))
            if before is not None and message.kind == "weights":
                use(before)
        else:
            op = graph.ops[task]
            if op.kind in "BI" and openings is None:
                openings = tuple(map(len, streams))
            stream = streams[graph.ranks[task]]
            arrivals = returned[graph.ranks[task]]
            stream.extend(wait for end, wait in arrivals if end <= times.start[task])
            arrivals[:] = [arrival for arrival in arrivals if arrival[0] > times.start[task]]
            stream.extend(waits.get(op, ()))
            stream.append(Instruction(Action.RUN, op))
            if op.kind in "BW":
                stream.append(Instruction(Action.FREE, op))
            if op in graph.weights_of:
                use(graph.weights_of[op])
    for stream, arrivals in zip(streams, returned, strict=True):
        stream.extend(wait for _, wait in arrivals)
    return streams, openings or tuple(map(len, streams))


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
