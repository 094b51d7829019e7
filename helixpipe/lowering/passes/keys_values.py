"""Keys and values of microbatches that run in several chunks, and their gradients. No torch here.

Attention is causal, so a slice of a document needs the keys and values of all slices before it, in the layers of its
stage, and their gradients come from all slices after it. Both are one buffer a row (`Workload.rows`) and stage, on the
rank that runs it: forwards fill the one in the row's order, backwards add to the other in the reverse order. Documents
that share a row share the buffer, which is how variable-length attention wants them.
"""

from __future__ import annotations

from helixpipe.lowering.graph import Draft
from helixpipe.program.tasks import Buffer


def keys_values(draft: Draft) -> None:
    """Add both buffers of every row of several chunks, for every stage with attention."""
    program, graph = draft.program, draft.graph
    for stage, placed in enumerate(program.stages):
        if not placed.has_attention:
            continue
        for places in program.workload.rows:
            row = places[0][0]
            units = [draft.unit(stage, *place) for place in places]
            forwards = [draft.forward[unit] for unit in units]
            backwards = [draft.backward[unit] for unit in reversed(units)]
            rank = graph.ranks[forwards[0]]
            last = forwards[-1] if program.forward_only else backwards[-1]
            draft.updated(Buffer("keys_values", rank, stage, row), forwards, last)
            if not program.forward_only:
                draft.updated(Buffer("kv_gradients", rank, stage, row), backwards, last)
