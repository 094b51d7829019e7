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
    program, graph = draft.program, draft.graph
    last, per_stage = program.chain - 1, draft.per_stage
    forward, backward = draft.forward, draft.backward
    for task, (kind, stage, _, _) in enumerate(graph.ops):
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
    graph, ranks = draft.graph, draft.graph.ranks
    source, target = ranks[producer], ranks[consumer]
    op = graph.ops[consumer]
    there = Buffer(kind, target, *op[1:])
    if source == target:
        graph.gives[producer] = graph.takes[consumer] = draft.buffer(there, producer, (consumer,), consumer)
        return
    here = graph.gives[producer] = draft.buffer(there._replace(rank=source), producer)
    message = draft.transfer(kind, (source, target), op.unit, graph.ops[producer], op, takes=(here,))
    graph.takes[consumer] = draft.buffer(there, message, (consumer,), consumer)


def _save(draft: Draft, unit: int, task: int) -> None:
    """Add the buffers of what F saves for a B or I, and of what an R, or the op itself, recomputes."""
    graph = draft.graph
    op, rank, recompute = graph.ops[task], graph.ranks[task], draft.recompute[unit]
    forward = draft.forward[unit]
    reader = recompute if recompute >= 0 else task
    number = draft.buffer(Buffer("saved", rank, *op[1:]), forward, (reader,), task)
    graph.saved[forward] = graph.saved[task] = number
    if recompute >= 0:
        graph.saved[recompute] = number
        draft.buffer(Buffer("recomputed", rank, *op.unit), recompute, (task,), task)
    elif draft.program.activations_of(op.unit).recompute:
        graph.recomputes.add(task)
        draft.buffer(Buffer("recomputed", rank, *op.unit), task, (), task)


def _defer(draft: Draft, backward: int, task: int) -> None:
    graph = draft.graph
    draft.buffer(Buffer("deferred", graph.ranks[task], *graph.ops[task].unit), backward, (task,), task)
