"""A head that is divided over ranks: what its parts exchange for each chunk.

The last stages are then the parts, one on each rank, and each of them follows the one before the first of them: F of
every part reads the hidden states that F of that stage gives, and its backward needs the gradients of all parts. The
parts' forwards make sums over their logits, and each backward needs those of all (`model.split_head`). So there are
three collectives of all ranks: the hidden states to all parts, the sums of all to all, the gradients to the last
layers' rank.

Theorem. If the program's ops can run to their end with what they wait for, they can with these collectives: put each
right behind the last op that makes what it moves, in any one order of the ops that respects what they wait for. All
that it waits for is then before it, and all who wait for it come after, since they wait for each of those ops.
"""

from __future__ import annotations

from helixpipe.lowering.graph import Draft
from helixpipe.program.program import Unit
from helixpipe.program.tasks import Buffer


def split_head(draft: Draft) -> None:
    """Add the buffers and collectives of every chunk, where the head is divided."""
    program = draft.program
    parts = range(program.chain, len(program.stages))
    if not parts:
        return
    for place in program.workload.units():
        sums = _forward(draft, parts, place)
        if not program.forward_only:
            _backward(draft, parts, place, sums)


def _forward(draft: Draft, parts: range, place: tuple[int, int]) -> int:
    """Add what the forwards of a chunk exchange; returns the collective of their sums."""
    last = draft.forward[draft.unit(parts[0] - 1, *place)]
    forwards = [draft.forward[draft.unit(part, *place)] for part in parts]
    ranks = tuple(range(draft.program.num_ranks))
    unit = Unit(parts[0], *place)
    hidden = draft.buffer(Buffer("activation", draft.ranks[last], *unit), last)
    draft.crosses(hidden, giver=last)
    brought = draft.transfer("head_input", ranks, unit, producer=last, takes=(hidden,))
    made = []
    for part, task in zip(parts, forwards, strict=True):
        there = Buffer("activation", draft.ranks[task], part, *place)
        draft.crosses(draft.buffer(there, brought, (task,), task), taker=task)
        made.append(draft.buffer(there._replace(kind="sums"), task))
        draft.crosses(made[-1], giver=task)
    return draft.transfer("head_sums", ranks, unit, producer=forwards[0], takes=made)


def _backward(draft: Draft, parts: range, place: tuple[int, int], sums: int) -> None:
    """Add what the backwards exchange. sums: the collective whose outcome they read."""
    unit = Unit(parts[0] - 1, *place)
    taker = draft.backward[draft.unit(*unit)]
    made = []
    for part in parts:
        task = draft.backward[draft.unit(part, *place)]
        there = Buffer("sums", draft.ranks[task], part, *place)
        draft.crosses(draft.buffer(there, sums, (task,), task), taker=task)
        made.append(draft.buffer(Buffer("gradient", draft.ranks[task], *unit), task))
        draft.crosses(made[-1], giver=task)
    ranks = tuple(range(draft.program.num_ranks))
    summed = draft.transfer("head_gradient", ranks, unit, consumer=taker, takes=made)
    draft.crosses(draft.buffer(Buffer("gradient", draft.ranks[taker], *unit), summed, (taker,), taker), taker=taker)
