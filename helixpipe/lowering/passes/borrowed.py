"""Weights that travel and the gradients that come back: messages of shipped and ring stages.

Which there are, and whose memory they take, `transfers` says; here they become tasks and buffers.
"""

from __future__ import annotations

from helixpipe.lowering.graph import Draft
from helixpipe.lowering.passes.transfers import Turn, WeightTransfer, transfers
from helixpipe.program.program import Op, Unit
from helixpipe.program.tasks import Buffer


def borrowed_weights(draft: Draft) -> None:
    """Add the messages of shipped and ring stages to a draft that has all others.

    Their turns: what every rank would run if any op took one time and no message any. Where ops wait for each other in
    a circle some never have a turn, and then there is nothing to add to.
    """
    program = draft.program
    if all(stage.owner is None for stage in program.stages):
        return
    order = draft.unit_order()
    if len(order) < len(draft.ops):
        return
    turns = [Turn(draft.ops[task], draft.ranks[task]) for task in order]
    task_of = {op: task for task, op in enumerate(draft.ops)}
    first = draft.num_transfers
    moved = transfers(program, turns)
    for transfer in moved:
        brings = transfer.kind == "weights"
        end = task_of[transfer.ops[0 if brings else -1]]
        follows = first + transfer.follows if transfer.follows >= 0 else -1
        ranks, unit = (transfer.source, transfer.target), Unit(draft.ops[end].stage, -1, -1)
        task = draft.transfer(transfer.kind, ranks, unit, end, end, follows=follows)
        for op in transfer.ops:
            (draft.lend if brings else draft.collect)(task_of[op], task)
    tasks = range(len(draft.ops) + first, len(draft.ops) + draft.num_transfers)
    brought = [_connect(draft, transfer, task, tasks, task_of) for task, transfer in zip(tasks, moved, strict=True)]
    for task, transfer in zip(tasks, moved, strict=True):
        if transfer.follows >= 0:  # it waits for that already
            draft.also_reads(task, brought[transfer.follows])


def _connect(draft: Draft, transfer: WeightTransfer, task: int, tasks: range, task_of: dict[Op, int]) -> int:
    """The buffers of one transfer, and what it waits for: what it passes on, and for its memory. tasks: of all of
    them. Returns the buffer that it brings."""
    stage = transfer.ops[0].stage
    for waited in transfer.after:
        draft.wait(task, task_of[waited] if isinstance(waited, Op) else tasks[waited])
    before = [task_of[op] for op in transfer.before]
    there = Buffer(transfer.kind, transfer.target, stage)
    if transfer.kind == "weights":
        return draft.buffer(there, task, before)
    brought = draft.buffer(there, task)
    for op in before:  # their rank has room for another sum once this one has left
        draft.wait(op, task)
    total = draft.buffer(Buffer(transfer.kind, transfer.source, stage), task_of[transfer.ops[0]], (), task)
    draft.also_reads(task, total)  # it waits for the last op that adds to it
    return brought
