"""Weights that travel and the gradients that come back: messages of shipped and ring stages.

Which there are, and whose memory they take, `transfers` says; here they become tasks and buffers.
"""

from __future__ import annotations

from helixpipe.lowering.graph import Draft
from helixpipe.lowering.order import unit_order
from helixpipe.lowering.passes.transfers import Turn, WeightTransfer, transfers
from helixpipe.program.message import Message
from helixpipe.program.program import Op
from helixpipe.program.tasks import Buffer


def borrowed_weights(draft: Draft) -> None:
    """Add the messages of shipped and ring stages to a draft that has all others.

    Their turns: what every rank would run if any op took one time and no message any. Where ops wait for each other in
    a circle some never have a turn, and then there is nothing to add to.
    """
    program, graph = draft.program, draft.graph
    if all(stage.owner is None for stage in program.stages):
        return
    order = unit_order(graph)
    if len(order) < graph.num_ops:
        return
    turns = [Turn(graph.ops[task], graph.ranks[task]) for task in order]
    task_of = {op: task for task, op in enumerate(graph.ops)}
    first = len(graph.messages)
    moved = transfers(program, turns)
    for place, transfer in enumerate(moved):
        end = transfer.ops[0 if transfer.kind == "weights" else -1]
        follows = first + transfer.follows if transfer.follows >= 0 else -1
        message = Message(first + place, transfer.kind, end, end, transfer.source, transfer.target, follows)
        draft.transfer(message)
        of = graph.weights_of if transfer.kind == "weights" else graph.sum_of
        of.update(dict.fromkeys(transfer.ops, message))
    for place, transfer in enumerate(moved):
        _connect(draft, transfer, first + place, task_of, first)


def _connect(draft: Draft, transfer: WeightTransfer, number: int, task_of: dict[Op, int], first: int) -> None:
    """The buffers of one message, and what it waits for: what it passes on, and for its memory."""
    graph = draft.graph
    task, stage = graph.num_ops + number, transfer.ops[0].stage
    for waited in transfer.after:
        draft.wait(task, task_of[waited] if isinstance(waited, Op) else graph.num_ops + first + waited)
    before = [task_of[op] for op in transfer.before]
    graph.targets[number] = draft.buffer(Buffer(transfer.kind, transfer.target, stage), task, before)
    if transfer.kind == "weights":
        graph.sources[number] = graph.targets[first + transfer.follows] if transfer.follows >= 0 else -1
    else:
        graph.sources[number] = draft.buffer(
            Buffer(transfer.kind, transfer.source, stage), task_of[transfer.ops[0]], (), task
        )
