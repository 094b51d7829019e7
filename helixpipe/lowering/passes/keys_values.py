"""Keys and values of documents that run in several chunks, and their gradients. No torch here.

Attention is causal, so a slice of a document needs the keys and values of all slices before it, in the layers of its
stage, and their gradients come from all slices after it. Both are one buffer a document and stage, on the rank that
runs it: forwards fill the one in the document's order, backwards add to the other in the reverse order.
"""

from __future__ import annotations

from helixpipe.lowering.graph import Draft
from helixpipe.program.tasks import Buffer


def keys_values(draft: Draft) -> None:
    """Add both buffers of every document that has slices in more than one chunk, for every stage with attention."""
    program, graph = draft.program, draft.graph
    documents: dict[int, list[tuple[int, int]]] = {}
    if program.workload.most_chunks == 1 and not program.workload.spans_microbatches:
        return
    for place in program.workload.units():
        for part in program.workload.chunks(place[0])[place[1]]:
            places = documents.setdefault(part.document, [])
            if place not in places[-1:]:
                places.append(place)
    split = [(document, places) for document, places in documents.items() if len(places) > 1]
    for stage, placed in enumerate(program.stages):
        if not placed.has_attention:
            continue
        for document, places in split:
            units = [draft.unit(stage, *place) for place in places]
            forwards = [draft.forward[unit] for unit in units]
            backwards = [draft.backward[unit] for unit in reversed(units)]
            rank = graph.ranks[forwards[0]]
            last = forwards[-1] if program.forward_only else backwards[-1]
            draft.updated(Buffer("keys_values", rank, stage, document), forwards, last)
            if not program.forward_only:
                draft.updated(Buffer("kv_gradients", rank, stage, document), backwards, last)
