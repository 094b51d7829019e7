"""The memory half of `Costs` of a model: which bytes each kind of buffer has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import ClassVar

from helixpipe.common.bounded import FEW, BoundedDict
from helixpipe.costs.lines import Lines
from helixpipe.costs.models import Chunk, chunk_of, tokens_of
from helixpipe.costs.piece_bytes import OF_QKV, PieceBytes
from helixpipe.costs.piece_kinds import KINDS
from helixpipe.program.costs import Contents
from helixpipe.program.graphs import in_graphs
from helixpipe.program.stages import LayerKinds, Piece, Segment
from helixpipe.program.tasks import OF_WEIGHTS
from helixpipe.program.workload import Extents

BY_TOKENS = frozenset({"activation", "gradient", "saved", "recomputed", "deferred", "workspace"})
"""Kinds of buffers of a unit whose sizes follow from its chunk's tokens."""


class CountsBytes:
    """The memory half of `Costs` that know a model; figures are those of one tensor-parallel rank."""

    memory_unit: ClassVar[str] = "bytes"
    by_kind: ClassVar[bool] = True

    @property
    def bytes(self) -> PieceBytes:
        """Of the model's pieces."""
        raise NotImplementedError

    @property
    def captures(self) -> bool:
        """See `Costs`."""
        return self.bytes.layout.captures

    def layer_kinds(self, layers: int) -> tuple[LayerKinds, ...]:
        return self.bytes.model.kinds_of(layers)

    @property
    def head_kind(self) -> str:
        return self.bytes.model.head_kind

    def _sequence(self) -> tuple[int, bool]:
        """(tokens of a microbatch's sequence, whether gradients of keys and values are summed in float32)."""
        raise NotImplementedError

    @property
    def tokens(self) -> int:
        """Of a microbatch's sequence."""
        return self._sequence()[0]

    def chunk(self, extents: Extents, whole: float | None) -> Chunk:
        """In tokens."""
        return chunk_of(extents, whole, self._sequence()[0])

    def size(self, contents: Contents) -> float:
        kind, segments, extents, whole, in_backward, _, _, outside, op, beside = contents
        if kind in BY_TOKENS and beside is None and not outside and self.bytes.by_tokens:
            tokens, stored = tokens_of(extents, whole, self._sequence()[0])
            of_kind = kind, segments, stored, in_backward, op
            lines = self._size_lines.get(of_kind)
            if lines is None:
                lines = self._size_lines[of_kind] = Lines(partial(self._size_of_tokens, *of_kind))
            return lines(tokens)
        size = self._known_sizes.get(contents)
        if size is None:
            size = self._known_sizes[contents] = self._size(contents)
        return size

    def _size(self, contents: Contents) -> float:
        if contents.kind in OF_WEIGHTS:
            pieces = [piece for segment in contents.segments for piece in segment.pieces]
            given = contents.kind not in ("weights", "gathered")
            return self.bytes.parameters(pieces) * (
                contents.gradient_bytes if given else self.bytes.layout.element_bytes
            )
        return self._size_of(contents, self.chunk(contents.extents, contents.whole))

    def _size_of_tokens(
        self, kind: str, segments: tuple[Segment, ...], stored: bool, in_backward: bool, op: str, tokens: float
    ) -> float:
        contents = Contents(kind, segments, (), None, in_backward, op=op)
        return self._size_of(contents, Chunk(tokens, stored=stored))

    def _size_of(self, contents: Contents, chunk: Chunk) -> float:
        kind, segments, _, _, in_backward, _, leaving, outside, op, beside = contents
        pieces = [piece for segment in segments for piece in segment.pieces]
        match kind:
            case "activation" | "gradient":
                return self.bytes.message(pieces[0], chunk)
            case "sums":
                return self.bytes.sums(pieces, chunk)
            case "offloaded" if leaving is not None:
                return self.bytes.offloaded(segments, chunk, leaving)
            case "saved":
                return self.bytes.segments_stash(segments, chunk, "F", outside)
            case "recomputed":
                if not any(segment.recomputed for segment in segments):
                    return 0.0
                most = self.bytes.segments_stash(segments, chunk, "B" if in_backward else "R", outside)
                return most - self.bytes.segments_stash(segments, chunk, "F", outside)
            case "deferred":
                return self.bytes.deferred_stash(pieces, chunk)
            case "keys_values":
                return self.bytes.keys_values(pieces, chunk.tokens)
            case "kv_gradients":
                return self.bytes.key_value_gradients(pieces, chunk.tokens, self._sequence()[1])
            case "graph_slot":
                return slot(self.bytes, segments[0].pieces, segments[1].pieces[0], chunk)
            case "graph_backward":
                return backward_memory(self.bytes, segments[0].pieces, chunk)
            case "graph_gradients":
                firsts = [segment.pieces[0] for segment in segments]
                return gradient_memory(self.bytes, list(zip(firsts[::2], firsts[1::2], strict=True)), chunk)
        assert kind == "workspace", kind
        if outside:
            return workspace_outside(self.bytes, segments, chunk, op)
        if beside is not None:
            other = self.chunk(beside.extents, beside.whole)
            return self.bytes.pair_workspace(segments, chunk, op, in_backward, beside.segments, other)
        return self.bytes.segments_workspace(segments, chunk, op, in_backward)

    @cached_property
    def _known_sizes(self) -> dict[Contents, float]:
        return BoundedDict()  # schedules that search ask again and again

    @cached_property
    def _size_lines(self) -> dict[tuple[str, tuple[Segment, ...], bool, bool, str], Lines]:
        return BoundedDict(FEW)


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
    """Return the most bytes that a backward of a run needs at once, without saved tensors and the gradients it gets."""
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
    """Return the bytes that an op needs outside of CUDA graphs, besides what graphs keep.

    A forward that will be recomputed runs in no graph.
    """
    alone = [Segment((piece,), False) for part in parts for piece in part.pieces if not in_graphs(piece)]
    most = max((bytes_of.segments_workspace((each,), chunk, op) for each in alone), default=0.0)
    for at, part in enumerate(parts if op == "F" else ()):
        if part.recomputed:
            later = bytes_of.segments_stash(parts[at + 1 :], chunk, "F", outside=True) if parts[at + 1 :] else 0.0
            most = max(most, bytes_of.segments_workspace((part,), chunk, op) - later)
    return most
