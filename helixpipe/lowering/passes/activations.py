"""Activations and gradients across cuts, and what a unit keeps between its own ops.

F(s, m, c) gives what crosses the cut after stage s to F(s+1, m, c); B or I(s+1, m, c) gives its gradient back to
B or I(s, m, c); F -> (R ->) B or I -> W pass on what the unit saved, recomputed and deferred. What the parts of a
divided head exchange comes with `split_head`.
"""

from __future__ import annotations

from helixpipe.lowering.graph import Draft
from helixpipe.program.tasks import Buffer


def activations(draft: Draft) -> None:
    """Add the buffers of every unit, and a message for each that crosses ranks."""
    program = draft.program
    last, per_stage = program.chain - 1, draft.per_stage
    forward, backward = draft.forward, draft.backward
    for task, (kind, stage, _, _) in enumerate(draft.ops):
        unit = draft.units[task]
        if kind == "F":
            if 0 < stage <= last:
                _cross(draft, "activation", forward[unit - per_stage], task)
        elif kind == "W":
            _defer(draft, backward[unit], task)
        elif kind in "BI":
            _save(draft, unit, task)
            if stage < last:
                _cross(draft, "gradient", backward[unit + per_stage], task)


def _cross(draft: Draft, kind: str, producer: int, consumer: int) -> None:
    """Add the buffer that `producer` writes and `consumer` reads; on different ranks a message carries it into a second
    buffer."""
    source, target = draft.ranks[producer], draft.ranks[consumer]
    op = draft.ops[consumer]
    there = Buffer(kind, target, *op[1:])
    if source == target:
        draft.crosses(draft.buffer(there, producer, (consumer,), consumer), producer, consumer)
        return
    here = draft.buffer(there._replace(rank=source), producer)
    draft.crosses(here, giver=producer)
    message = draft.transfer(kind, (source, target), op.unit, producer, consumer, takes=(here,))
    draft.crosses(draft.buffer(there, message, (consumer,), consumer), taker=consumer)


def _save(draft: Draft, unit: int, task: int) -> None:
    """Add the buffers of what F saves for a B or I, and of what an R, or the op itself, recomputes."""
    op, rank, recompute = draft.ops[task], draft.ranks[task], draft.recompute[unit]
    forward = draft.forward[unit]
    reader = recompute if recompute >= 0 else task
    number = draft.buffer(Buffer("saved", rank, *op[1:]), forward, (reader,), task)
    if recompute >= 0:
        draft.keep(number, forward, recompute, task)
        draft.buffer(Buffer("recomputed", rank, *op.unit), recompute, (task,), task)
    elif draft.program.activations_of(op.unit).recompute:
        draft.keep(number, forward, task, inside=True)
        draft.buffer(Buffer("recomputed", rank, *op.unit), task, (), task)
    else:
        draft.keep(number, forward, task)


def _defer(draft: Draft, backward: int, task: int) -> None:
    draft.buffer(Buffer("deferred", draft.ranks[task], *draft.ops[task].unit), backward, (task,), task)
