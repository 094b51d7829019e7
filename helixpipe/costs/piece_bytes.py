"""Bytes that stages of a model keep and send, of one tensor-parallel rank; the rules are in `piece_kinds`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, pairwise

from helixpipe.common.bounded import FEW, BoundedDict
from helixpipe.costs.attention_kernels import UNFUSED
from helixpipe.costs.context_parallel import copies_of_groups
from helixpipe.costs.models import OFF, Chunk, Layout, ModelShape
from helixpipe.costs.piece_kind import Tensors
from helixpipe.costs.piece_kinds import KINDS, Mlp, steps
from helixpipe.costs.saved import kept, offloaded, staying
from helixpipe.costs.sizes import SENT, ChunkSizes
from helixpipe.costs.workspace import (
    AtPiece,
    InUnit,
    SavedInUnit,
    backward_moments,
    forward_moments,
    pair_most,
)
from helixpipe.program.costs import Leaving
from helixpipe.program.graphs import in_graphs
from helixpipe.program.stages import Piece, Segment

OF_QKV = frozenset({"q", "k", "v", "qkv"})
"""What attention gets of the pieces before it, or all of it as their linear layer leaves it."""

LayerTensors = dict[tuple[str, int], float]
"""Bytes of tensors by name and layer."""


class PieceBytes:
    """Bytes of a model in a layout. All methods are of one tensor-parallel rank and one chunk of a microbatch."""

    def __init__(self, model: ModelShape, layout: Layout):
        self.model, self.layout = model, layout
        self.tp = layout.tensor_parallel
        self.rows = model.padded_vocab(self.tp) // self.tp
        self._known_sizes: dict[tuple[Chunk, int], ChunkSizes] = BoundedDict(FEW)
        self._known_saved: dict[Chunk, dict[tuple[object, ...], Tensors]] = BoundedDict(FEW)
        self._known_units: dict[tuple[tuple[Segment, ...], Chunk], SavedInUnit] = BoundedDict(FEW)
        self._known_parameters: dict[tuple[Piece, ...], int] = {}  # searches ask again and again

    @cached_property
    def by_tokens(self) -> bool:
        """Whether the sizes of `BY_TOKENS` lie on lines over a chunk's tokens: not those of slices of fixed lengths, of
        attention that makes its scores, or of experts."""
        model, layout = self.model, self.layout
        sliced = layout.mlp_chunk or layout.loss_chunk or layout.context_parallel > 1
        return not (sliced or layout.attention_kernel == UNFUSED or model.kv_rank or model.windowed or model.experts)

    def sizes(self, chunk: Chunk, shares: int = 1) -> ChunkSizes:
        """shares: `Piece.shares`."""
        key = chunk, shares
        known = self._known_sizes.get(key)
        if known is None:
            known = self._known_sizes[key] = ChunkSizes(self.model, self.layout, chunk, shares)
        return known

    def stash(self, pieces: Sequence[Piece], chunk: Chunk) -> float:
        """Kept by one unit of a stage from F to B or I: what autograd saves, and the stage's inputs, but for a residual
        that only passes by."""
        return self.segments_stash((Segment(tuple(pieces), False),), chunk, "F")

    def segments_stash(self, segments: Sequence[Segment], chunk: Chunk, kind: str, outside: bool = False) -> float:
        """Kept by one unit of a stage once its op of that kind has run; see `saved.kept`. outside: of graphs."""
        known = self._saved_in(tuple(segments), chunk)
        if not outside:
            return kept(segments, known.whole, known.inputs, kind)
        saved = [self._saved_outside(segment, chunk) for segment in segments]
        return kept(
            segments, [{**own, **more} for own, more in zip(known.inputs, saved, strict=True)], known.inputs, kind
        )

    def offloaded(self, segments: Sequence[Segment], chunk: Chunk, leaving: Leaving) -> float:
        """Of that after F, what leaves the device."""
        inputs = [self._kept_inputs(s.pieces[0], chunk, not s.passes_residual) for s in segments]
        stays = staying(leaving.before, leaving.after)
        return offloaded(segments, lambda piece, inside: self.saved([piece], chunk, inside), inputs, leaving, stays)

    def keys_values(self, pieces: Sequence[Piece], tokens: float) -> float:
        """Buffers of a document's keys and values in all layers whose attention is among the pieces. tokens: of the
        whole document."""
        sizes = self.sizes(Chunk(tokens))
        return (
            self.layout.kv_copies * copies_of_groups(sizes) * sum(KINDS[piece.kind].stored(sizes) for piece in pieces)
        )

    def key_value_gradients(self, pieces: Sequence[Piece], tokens: float, in_float32: bool = False) -> float:
        """Buffers of their gradients. tokens: those before the last slice."""
        element = self.layout.element_bytes
        once = self.keys_values(pieces, tokens) / self.layout.kv_copies
        return once * (max(element, 4 if in_float32 else 0) / element)

    def deferred_stash(self, pieces: Sequence[Piece], chunk: Chunk) -> float:
        """Kept from I to W."""
        return sum(KINDS[piece.kind].deferred(self.sizes(chunk, piece.shares)) for piece in pieces)

    def saved(self, pieces: Sequence[Piece], chunk: Chunk, graph: Sequence[Piece] = ()) -> LayerTensors:
        """Return what autograd saves in the forward of consecutive pieces. graph: all that have one graph with them."""
        return LayerTensors(chain.from_iterable(each.items() for each in self._saved_by(pieces, chunk, graph)))

    def _saved_by(self, pieces: Sequence[Piece], chunk: Chunk, graph: Sequence[Piece] = ()) -> Iterator[LayerTensors]:
        """Yield the same of each piece. What is saved is asked once of layers that are alike, and of all ops."""
        inside: dict[int, list[str]] = {}
        for piece in graph or pieces:
            inside.setdefault(piece.layer, []).append(piece.kind)
        known = self._known_saved.get(chunk)
        if known is None:
            known = self._known_saved[chunk] = {}
        for piece in pieces:
            kind, layer, beside = piece.kind, piece.layer, inside.get(piece.layer, [])
            key = kind, piece.shares, *beside
            own = known.get(key)
            if own is None:
                own = known[key] = KINDS[kind].saved(self.sizes(chunk, piece.shares), beside)
            yield {(name, layer): size for name, size in own.items()}

    def _saved_outside(self, segment: Segment, chunk: Chunk) -> LayerTensors:
        """What a segment saves outside of CUDA graphs: what its other pieces do, but for what a run gives attention."""
        layers: dict[int, list[Piece]] = {}
        for piece in segment.pieces:
            layers.setdefault(piece.layer, []).append(piece)
        saved = LayerTensors()
        for before, piece in zip((None, *segment.pieces), segment.pieces, strict=False):
            if in_graphs(piece):
                continue
            own = self.saved([piece], chunk, layers[piece.layer])
            inside = piece.role == "attn" and before is not None and in_graphs(before)
            saved |= {name: size for name, size in own.items() if not (inside and name[0] in OF_QKV)}
        return saved

    def message(self, first: Piece, chunk: Chunk) -> float:
        """Bytes of a message that brings a stage that begins with `first` its inputs, or takes their gradients back."""
        sizes, split = self.sizes(chunk), self.layout.scatters_messages and not self.layout.sequence_parallel
        parts = self.tp if split else 1
        return sum(sizes.bytes(shape) for shape in KINDS[first.kind].inputs.values()) / parts

    def workspace(self, pieces: Sequence[Piece], chunk: Chunk, op: str = "B") -> float:
        """Needed by an op of that kind beside what one unit of a stage keeps."""
        return self.segments_workspace((Segment(tuple(pieces), False),), chunk, op)

    def segments_workspace(self, segments: Sequence[Segment], chunk: Chunk, op: str, inside: bool = True) -> float:
        """The same. inside: whether a backward recomputes what is recomputed, else an R has done so."""
        pieces = [piece for segment in segments for piece in segment.pieces]
        if op == "W":
            return self._weights_workspace(pieces, chunk)
        unit = self._unit(segments, chunk, op)
        if op in "FR":
            moments, counted = forward_moments(unit)
        else:
            moments, counted = backward_moments(unit, op, inside), self._counted(segments, chunk, inside)
        return max(*moments, counted) - counted

    def pair_workspace(
        self, segments: Sequence[Segment], chunk: Chunk, op: str, inside: bool,
        beside: Sequence[Segment], beside_chunk: Chunk,
    ) -> float:  # fmt: skip
        """Needed by a B or I and the F of another unit that run at the same time, with all that F will save, beside
        what the backward's unit keeps."""
        backward, forward = self._unit(segments, chunk, op), self._unit(beside, beside_chunk, "F")
        filled = forward.between_pauses(forward_moments(forward)[0])
        freed = backward.between_pauses(backward_moments(backward, op, inside), backward=True)
        counted = self._counted(segments, chunk, inside)
        return max(pair_most(filled, freed, self.layout.pauses) - counted, 0.0)

    def _counted(self, segments: Sequence[Segment], chunk: Chunk, inside: bool) -> float:
        """What a unit keeps when its backward begins, or, where that recomputes, the most at a time."""
        return self.segments_stash(segments, chunk, "B" if inside else "R")

    def _unit(self, segments: Sequence[Segment], chunk: Chunk, op: str) -> InUnit:
        """What is known of a unit's pieces for an op."""
        saved = self._saved_in(tuple(segments), chunk)
        after = dict(pairwise(piece for segment in segments for piece in segment.pieces))
        known: dict[tuple[str, int], tuple[float, float, int, float]] = {}
        messages: dict[str, float] = {}

        def at(piece: Piece) -> AtPiece:
            key = piece.kind, piece.shares
            if key not in known:
                kind, sizes = KINDS[piece.kind], self.sizes(chunk, piece.shares)
                deferred = kind.deferred(sizes) if op == "I" else 0.0
                needs = kind.workspace(sizes, "F" if op == "R" else op)
                if op != "I" and self._keeps_gathered(piece.role):
                    needs += sizes.gathered
                pauses = self._pauses(piece, chunk)
                known[key] = needs, deferred, pauses, kind.outside_pauses(sizes, op) if pauses else needs
            needs, deferred, pauses, outside = known[key]
            comes, next_one = 0.0, after.get(piece)
            if next_one is not None:
                if next_one.kind not in messages:
                    messages[next_one.kind] = self.message(next_one, chunk)
                comes = messages[next_one.kind]
            return AtPiece(needs, comes, deferred, pauses, outside)

        pieces = [[*map(at, segment.pieces)] for segment in segments]
        if op == "R":
            again = [segment._replace(recomputed=False, inputs_again=False) for segment in segments]
            saved = replace(saved, segments=again)
        return InUnit(saved, pieces)

    def _saved_in(self, segments: tuple[Segment, ...], chunk: Chunk) -> SavedInUnit:
        """What a unit saves; known for all ops on it."""
        known = self._known_units.get((segments, chunk))
        if known is None:
            inputs = [self._kept_inputs(s.pieces[0], chunk, not s.passes_residual) for s in segments]
            saved = [[*self._saved_by(segment.pieces, chunk)] for segment in segments]
            known = self._known_units[segments, chunk] = SavedInUnit(segments, inputs, saved)
        return known

    def _keeps_gathered(self, role: str) -> bool:
        """Whether what megatron-core gathers into, which it keeps, is beside what a piece needs. Where weight gradients
        are split off, or ops run in steps, each gather has memory of its own; slices count the same buffer."""
        sliced = {"mlp": self.layout.mlp_chunk, "head": self.layout.loss_chunk}.get(role, 0)
        return self.layout.overlap_tp_comm == OFF and not sliced

    def _pauses(self, piece: Piece, chunk: Chunk) -> int:
        """How often a piece pauses in a pair (`costs/steps.py`)."""
        if not self.layout.pairs or piece.role in ("embed", "head"):
            return 0
        _, ends = steps(self.model, self.layout, piece.kind, "F", chunk, halved=False)
        return sum(end != SENT for end in ends)

    def _weights_workspace(self, pieces: Sequence[Piece], chunk: Chunk) -> float:
        """Needed by W beside what was left to it: a weight's gradient, before it is added to its sum."""
        most = freed = 0.0
        for piece in reversed(pieces):
            kind, sizes = KINDS[piece.kind], self.sizes(chunk, piece.shares)
            gone = freed
            for linear in reversed(kind.linears(sizes)) if kind.deferred(sizes) else ():
                most = max(most, sizes.weight(linear) - gone)
                gone += sizes.tokens * sum(linear) * sizes.element
            freed += kind.deferred(sizes)
        return most

    def sums(self, pieces: Sequence[Piece], chunk: Chunk) -> float:
        """Return the bytes that the parts of a head exchange, of all parts: three float32 numbers of each token and
        part."""
        return sum(3 * 4 * self.sizes(chunk).tokens * piece.shares for piece in pieces)

    def mlp_slice(self, chunk: Chunk) -> Tensors:
        """Return what is kept during the backward of the largest slice of an MLP; nothing if it is not sliced."""
        return Mlp().slice(self.sizes(chunk))

    def parameters(self, pieces: Sequence[Piece]) -> int:
        """Weights of the pieces; a tied head beside the embedding has none of its own but its norm."""
        key = tuple(pieces)
        if key not in self._known_parameters:
            self._known_parameters[key] = self._parameters(key)
        return self._known_parameters[key]

    def _parameters(self, pieces: tuple[Piece, ...]) -> int:
        total = 0
        for piece in pieces:
            own = piece.rows(self.rows)
            total += KINDS[piece.kind].weights(self.model, self.tp, own.stop - own.start)
            total -= KINDS[piece.kind].expert_weights(self.model, self.tp)
        total += self.expert_parameters(pieces)
        roles = {piece.role for piece in pieces if piece.part is None}
        shared = self.model.tied and {"embed", "head"} <= roles
        if self.model.further and not self.model.tied and "head" in roles and "embed" not in roles:
            total += KINDS["embed"].weights(self.model, self.tp, self.rows)  # its copy, for further tokens
        return total - (self.rows * self.model.hidden if shared else 0)

    def expert_parameters(self, pieces: Sequence[Piece]) -> int:
        """Weights of a rank's share of the pieces' experts."""
        split = self.layout.expert_tensor_parallel
        every = sum(KINDS[piece.kind].expert_weights(self.model, split) for piece in pieces)
        return every // self.layout.expert_parallel

    def _kept_inputs(self, first: Piece, chunk: Chunk, residual: bool) -> LayerTensors:
        """Inputs, without the residual where it only passes by, and but for keys and values of a chunk, which have
        moved to the document's buffers."""
        kind, sizes = KINDS[first.kind], self.sizes(chunk)
        names = list(kind.inputs) if residual else list(kind.inputs)[:-1]
        moved = kind.in_store if chunk.stored and not self.layout.swaps else ()  # swapped, they are other tensors
        return {(name, first.layer): sizes.bytes(kind.inputs[name]) for name in names if name not in moved}
