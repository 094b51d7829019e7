"""Sums of weight gradients over the ranks that hold a replicated stage.

Each is a collective of these ranks, as early as the last of them has run its last backward of the stage. Nothing waits
for it before the step ends.
"""

from __future__ import annotations

from helixpipe.lowering.graph import Draft
from helixpipe.program.program import Unit


def replica_sums(draft: Draft) -> None:
    """Add the collective of every replicated stage that several ranks hold."""
    program = draft.program
    if program.forward_only:
        return
    for index, stage in enumerate(program.stages):
        holders = program.holders(index) if stage.placement == "replicated" else ()
        if len(holders) < 2:
            continue
        first = index * draft.per_stage
        ends: dict[int, int] = {}  # the last backward of the stage on each rank
        for unit in range(first, first + draft.per_stage):
            task = draft.weight[unit] if draft.weight[unit] >= 0 else draft.backward[unit]
            rank = draft.ranks[task]
            ends[rank] = max(ends.get(rank, task), task)
        total = draft.transfer("replica_sum", holders, Unit(index, -1, -1))
        draft.replica_sums.append((total, holders, index))
        for last in ends.values():
            draft.wait(total, last)
