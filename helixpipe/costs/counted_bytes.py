"""The memory half of `Costs` of a model: which bytes each kind of buffer has."""

from __future__ import annotations

from functools import cached_property, partial
from typing import ClassVar

from helixpipe.common.bounded import FEW, BoundedDict
from helixpipe.costs.graph_bytes import backward_memory, gradient_memory, slot, workspace_outside
from helixpipe.costs.lines import Lines
from helixpipe.costs.models import Chunk, chunk_of, tokens_of
from helixpipe.costs.piece_bytes import PieceBytes
from helixpipe.program.costs import Contents
from helixpipe.program.stages import LayerKinds, Segment
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
