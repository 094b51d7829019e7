"""Bytes of pieces that run as CUDA graphs: what lies in the graphs' memory, and what units keep outside of it.

A captured run of pieces (`program.graphs`) has, in a slot, copies of the inputs that it reads, what it saves and what
it gives, and what its forward needed beside for a moment, which stays its own. A backward is replayed with all that was
saved still there and every gradient of a weight until its end; its memory is shared by all backwards, and so is that of
gradients of runs' inputs and outputs (`helixpipe.model.graphs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from helixpipe.costs.models import Chunk
from helixpipe.costs.piece_bytes import OF_QKV, PieceBytes
from helixpipe.costs.piece_kinds import KINDS
from helixpipe.program.graphs import in_graphs
from helixpipe.program.stages import Piece, Segment


def slot(bytes_of: PieceBytes, run: Sequence[Piece], after: Piece, chunk: Chunk) -> float:
    """Return the bytes of a run's slot. after: the piece that gets what the run gives."""
    first, sizes = run[0], bytes_of.sizes(chunk)
    taken = {(name, first.layer): sizes.bytes(shape) for name, shape in KINDS[first.kind].inputs.items()}
    unread = {list(taken)[-1]} if first.role == "qkv" else set()
    saved = bytes_of.saved(run, chunk)
    given = {(name, after.layer): sizes.bytes(shape) for name, shape in KINDS[after.kind].inputs.items()}
    if after.role == "attn":  # some of which may be views
        known = bytes_of.saved([after], chunk, [*run, after])
        views = {name: size for name, size in known.items() if name[0] in OF_QKV}
        if ("qkv", after.layer) in views:
            given = views | {name: size for name, size in given.items() if name[0] not in OF_QKV}
    left = {name: size for name, size in given.items() if name not in saved and name not in taken}
    most = bytes_of.workspace(run, chunk, "F")  # which has at its end what is given
    kept = sum(size for name, size in (taken | saved).items() if name not in unread)
    return kept + max(most, sum(left.values()))


def backward_memory(bytes_of: PieceBytes, run: Sequence[Piece], chunk: Chunk) -> float:
    """Return the most bytes that a backward of a run has, beside what was saved and the gradients that are given."""
    after, sizes = dict(pairwise(run)), bytes_of.sizes(chunk)
    most = weights = 0.0
    for piece in reversed(run):
        kind = KINDS[piece.kind]
        weights += sum(map(sizes.weight, kind.linears(sizes)))
        comes = bytes_of.message(after[piece], chunk) if piece in after else 0.0
        most = max(most, comes + weights + kind.workspace(sizes, "I"))
    return most


def gradient_memory(bytes_of: PieceBytes, ends: Sequence[tuple[Piece, Piece]], chunk: Chunk) -> float:
    """Return the bytes of the gradients of inputs and outputs, which runs have in common where place and size are the
    same. ends: of each run the first piece, and the piece after it."""
    sizes = bytes_of.sizes(chunk)
    places = {
        (end, number, sizes.bytes(shape))
        for both in ends
        for end, piece in enumerate(both)
        for number, shape in enumerate(KINDS[piece.kind].inputs.values())
    }
    return sum(size for _, _, size in places)


def workspace_outside(bytes_of: PieceBytes, parts: Sequence[Segment], chunk: Chunk, op: str) -> float:
    """Return what an op needs outside of graphs beside what is kept. A forward that will be recomputed runs in none."""
    alone = [Segment((piece,), False) for part in parts for piece in part.pieces if not in_graphs(piece)]
    most = max((bytes_of.segments_workspace((each,), chunk, op) for each in alone), default=0.0)
    for at, part in enumerate(parts if op == "F" else ()):
        if part.recomputed:
            later = bytes_of.segments_stash(parts[at + 1 :], chunk, "F", outside=True) if parts[at + 1 :] else 0.0
            most = max(most, bytes_of.segments_workspace((part,), chunk, op) - later)
    return most
