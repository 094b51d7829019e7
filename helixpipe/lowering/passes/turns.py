"""Turns: no rank begins one before all ranks have ended the one before (`Program.turns`).

Between two turns stands a collective of all ranks that moves nothing. It reads that the last ops of the turn have
ended, and each rank's next op reads that all have. Theorem: if a program's ops can run to their end one after another
so that every op of a turn comes before all ops of later turns, they can with these collectives. Put each right behind
the last op of its turn in that order.
"""

from __future__ import annotations

from helixpipe.lowering.graph import Draft
from helixpipe.program.tasks import Buffer


def turns(draft: Draft) -> None:
    """Add the collectives between the turns of a program that has any."""
    program = draft.program
    if not program.turns:
        return
    task_of = {op: task for task, op in enumerate(draft.ops)}
    following = [tasks.start for tasks in draft.rank_tasks]  # each rank's first op after the turns so far
    for ends in program.turns[:-1]:
        last = [task_of[op] for op in ends]
        ended = [draft.buffer(Buffer("turn", draft.ranks[task], *draft.ops[task].unit), task) for task in last]
        over = draft.transfer("turn", tuple(range(program.num_ranks)), ends[0].unit, last[0], takes=ended)
        for task in last:
            following[draft.ranks[task]] = task + 1
        for rank, task in enumerate(following):
            if task in draft.rank_tasks[rank]:
                draft.buffer(Buffer("turn", rank, *draft.ops[task].unit), over, (task,), task)
