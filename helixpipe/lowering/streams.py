"""A check of what lowering gives: each rank's stream is a projection of the one order, and finds what it needs.

Lowering is right by construction as long as its passes are; this is what a pass that is new, or that runs too early,
comes upon before anything is launched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from helixpipe.common.errors import ProgramError
from helixpipe.lowering.graph import Graph
from helixpipe.lowering.project import Action, Instruction, LoweredProgram
from helixpipe.program.transfer import TRANSFER_KINDS, Waited


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
    for task, transfer in enumerate(graph.transfers, start=graph.num_ops):
        for rank in transfer.ranks:
            starts[rank][task] = Action.START
        if transfer.resource == "link":
            starts[transfer.source][task], starts[transfer.target][task] = Action.SEND, Action.RECV
    return starts


def _faults(
    graph: Graph, stream: Sequence[Instruction], expected: dict[int, Action], position: Sequence[int]
) -> Iterator[str]:
    """Yield what is wrong with one rank's stream."""
    there: set[int] = set()
    coming: set[int] = set()
    last, pairs, reads, writes = -1, graph.pairs, graph.reads, graph.writes
    free, wait, run, send = Action.FREE, Action.WAIT, Action.RUN, Action.SEND
    for place, (action, _, transfer, task) in enumerate(stream):
        if action is free:
            continue
        row = TRANSFER_KINDS[transfer.kind] if transfer is not None else None
        if action is wait:
            if task not in coming:
                yield f"instruction {place}: {stream[place]} has no RECV or START before it, or comes a second time"
            coming.discard(task)
            there.update(writes[task])
            continue
        if task in pairs and stream[place + 1 : place + 2] != (
            (Action.RUN, graph.ops[pairs[task]], None, pairs[task]),
        ):
            yield f"instruction {place}: {stream[place]} does not have the op that runs beside it behind it"
        if expected.pop(task, None) is not action or position[task] <= last:
            yield f"instruction {place}: {stream[place]} is not at its place in the one order"
        last = position[task]
        # What is passed on may still be on its way in, and a copy waits itself for the one that it brings back.
        needs = (action is run or action is send) and not (row is not None and row.passed_on)
        if needs and not there.issuperset(reads[task]):
            missing = next(number for number in reads[task] if number not in there)
            yield f"instruction {place}: {stream[place]} needs {graph.buffers[missing]}, which is not there yet"
        if row is None or row.waited is Waited.USERS:
            there.update(writes[task])
        elif action is not send and row.waited is not Waited.STEP:
            coming.add(task)
    for task, action in expected.items():
        yield f"{action.value} of task {task} is missing"
    for task in coming:
        yield f"{graph.transfer(task)} is never waited for"
