"""A check of what lowering gives: each rank's stream is a projection of the one order, and finds what it needs.

Lowering is right by construction as long as its passes are; this is what a pass that is new, or that runs too early,
comes upon before anything is launched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from helixpipe.common.errors import ProgramError
from helixpipe.lowering.graph import Graph
from helixpipe.lowering.project import Action, Instruction, LoweredProgram, begins

_STARTS = frozenset(
    {
        Action.RUN,
        Action.SEND,
        Action.RECV,
        Action.REDUCE,
        Action.GATHER,
        Action.SCATTER,
        Action.OFFLOAD,
        Action.FETCH,
    }
)
"""The actions with which a task begins; the others wait for its end, or let go of memory."""


def check_streams(lowered: LoweredProgram) -> None:
    """Check the streams of a lowered program against its graph and its one order.

    Every task begins once on each rank that takes part in it (an op's, both ends of a message, all members of a
    collective), in the order of the list, and every message is waited for once, after its receive. An op finds the
    activation or gradient it takes and what its unit has saved; a message finds what it carries.

    Raises ProgramError, which names rank, place and instruction.
    """
    graph = lowered.graph
    position = [-1] * graph.num_tasks
    for place, task in enumerate(lowered.order):
        position[task] = place
    for rank, (stream, expected) in enumerate(zip(lowered.streams, _starts(graph), strict=True)):
        fault = next(_faults(graph, stream, expected, position), None)
        if fault is not None:
            name = lowered.program.schedule
            raise ProgramError(f"the streams of schedule {name} are inconsistent: rank {rank}, {fault}.")


def _starts(graph: Graph) -> list[dict[int, Action]]:
    """For each rank the tasks that it takes part in, with the action each begins with there."""
    starts: list[dict[int, Action]] = [dict.fromkeys(tasks, Action.RUN) for tasks in graph.rank_tasks]
    for task, message in enumerate(graph.messages, start=graph.num_ops):
        starts[message.source][task] = Action.SEND
        starts[message.target][task] = Action.RECV
    for task, collective in enumerate(graph.collectives, start=graph.num_ops + len(graph.messages)):
        for rank in collective.ranks:
            starts[rank][task] = begins(collective)
    for task, copy in enumerate(graph.copies, start=graph.first_copy):
        starts[copy.rank][task] = begins(copy)
    return starts


def _faults(
    graph: Graph, stream: Sequence[Instruction], expected: dict[int, Action], position: Sequence[int]
) -> Iterator[str]:
    """What is wrong with one rank's stream."""
    there: set[int] = set()
    coming: set[int] = set()
    last = -1
    for place, (action, op, message, _, task) in enumerate(stream):
        if action in _STARTS:
            if expected.pop(task, None) is not action or position[task] <= last:
                yield f"instruction {place}: {stream[place]} is not at its place in the one order"
            last = position[task]
        needed = -1
        if action is Action.RUN:
            assert op is not None
            needed = graph.saved[task] if op.kind != "F" and graph.saved[task] not in there else graph.takes[task]
        elif action is Action.SEND:
            assert message is not None
            # Borrowed weights may be passed on while they are still on their way in.
            passed_on = message.kind == "weights" and message.follows >= 0
            needed = -1 if passed_on else graph.sources[message.number]
        elif action is Action.RECV:
            coming.add(task)
        elif action is Action.WAIT:
            assert message is not None
            if task not in coming:
                yield f"instruction {place}: {stream[place]} has no RECV before it, or comes a second time"
            coming.discard(task)
            there.add(graph.targets[message.number])
        if needed >= 0 and needed not in there:
            yield f"instruction {place}: {stream[place]} needs {graph.buffers[needed]}, which is not there yet"
        if action is Action.RUN:
            there.update(graph.writes[task])
    for task, action in expected.items():
        yield f"{action.value} of task {task} is missing"
    for task in coming:
        yield f"{graph.message(task)} is received and never waited for"
