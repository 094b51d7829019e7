"""Keys and values of microbatches that run in several chunks, and their gradients.

Attention is causal, so a slice of a document needs the keys and values of all slices before it, in the layers of its
stage, and their gradients come from all slices after it. Both are one buffer a row (`Workload.rows`) and stage, on the
rank that runs it: forwards fill the one in the row's order, backwards add to the other in the reverse order. Documents
that share a row share the buffer, which is how variable-length attention wants them.

In blocks (`Program.kv_blocks`) there is one a chunk: keys and values from its forward to its backward, the sums of
their gradients from the first backward of a later chunk to its own. Then a row's chunks may be spread over ranks, which
`spread` adds the messages for.
"""

from __future__ import annotations

from itertools import pairwise

from helixpipe.lowering.graph import Draft
from helixpipe.lowering.passes.spread_rows import spread
from helixpipe.program.tasks import Buffer


def keys_values(draft: Draft) -> None:
    """Add the buffers of every row of several chunks, for every stage with attention."""
    program = draft.program
    for stage, placed in enumerate(program.stages):
        if not placed.has_attention:
            continue
        for places in program.workload.rows:
            row = places[0][0]
            units = [draft.unit(stage, *place) for place in places]
            forwards = [draft.forward[unit] for unit in units]
            backwards = [draft.backward[unit] for unit in reversed(units)]
            rank = draft.ranks[forwards[0]]
            last = forwards[-1] if program.forward_only else backwards[-1]
            if any(draft.ranks[task] != rank for task in forwards):
                spread(draft, stage, places)
            elif program.kv_blocks:
                _blocks(draft, forwards, backwards[::-1])
            else:
                draft.updated(Buffer("keys_values", rank, stage, row), forwards, last)
                if not program.forward_only:
                    draft.updated(Buffer("kv_gradients", rank, stage, row), backwards, last)


def _blocks(draft: Draft, forwards: list[int], backwards: list[int]) -> None:
    """Add the keys and values of a row's chunks in a stage, all of which run on one rank."""
    training = not draft.program.forward_only
    for before, task in pairwise(forwards):
        draft.wait(task, before)
    for task, after in pairwise(backwards if training else ()):
        draft.wait(task, after)
    for number, forward in enumerate(forwards):
        _, stage, microbatch, chunk = draft.ops[forward]
        block = Buffer("keys_values", draft.ranks[forward], stage, microbatch, chunk)
        draft.buffer(block, forward, (), backwards[number] if training else forwards[-1])
        if training and number + 1 < len(forwards):
            draft.buffer(block._replace(kind="kv_gradients"), backwards[-1], (), backwards[number])
