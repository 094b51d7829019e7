"""The cost model of times given by hand: op times from the time of each piece, message times, and textbook memory.

B = I + W. A piece whose weights are linear layers splits its backward: I (gradient of its input) takes as long as F
(but no longer than B), W (gradient of its weights) the rest. A piece without linear layers (attention, norms,
embedding) does all its backward in I. R takes as long as F. Memory is counted in microbatch-layers, in the textbook's
elements, whatever the times come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import lcm
from typing import ClassVar

from helixpipe.common.errors import UserError
from helixpipe.common.flags import nearest_name
from helixpipe.costs.models import Chunk, Layout, ModelShape
from helixpipe.costs.piece_kinds import KINDS
from helixpipe.costs.saved import kept, offloaded, staying
from helixpipe.costs.sizes import ChunkSizes
from helixpipe.program.costs import Contents, Leaving, Load, Work
from helixpipe.program.program import Program
from helixpipe.program.stages import HEAD_NORM, LAYER_PIECES, PIECE_KINDS, LayerKinds, Piece, Segment, layer_kinds
from helixpipe.program.workload import Extent, Extents, Workload, attention_pairs

_TEXTBOOK = ChunkSizes(
    ModelShape("", 1, 1, 1, 1, 4, False, 1, False, "LayerNorm", "none", False, 1), Layout(element_bytes=1), Chunk(1)
)
"""Of one element of b·s·h, and an MLP of 4 h."""

SPLIT_BACKWARD = frozenset(name for name, kind in KINDS.items() if kind.linears(_TEXTBOOK))
"""Pieces made of linear layers: their weight gradients may be computed later than their input gradients."""

LAYER_ELEMENTS = sum({name: size for kind in LAYER_PIECES for name, size in KINDS[kind].textbook.items()}.values())
"""Elements of b·s·h that a whole layer keeps: 16. From I to W it keeps as many again."""

_Elements = dict[tuple[str, int], float]
"""Elements of b·s·h of tensors, by name and layer."""

PIECE_ALIASES = {"pre": "qkv", "post": "mlp"}


class _LayerMemory:
    """Memory counted in microbatch-layers, and that of units alone. copy: time of copying one of them one way."""

    memory_unit: ClassVar[str] = "microbatch-layers"
    head_kind: ClassVar[str] = "head"
    message: float
    copy: float

    def layer_kinds(self, layers: int) -> tuple[LayerKinds, ...]:
        return layer_kinds(layers)

    def transfer_time(self, load: Load) -> float:
        """Of a copy by what it moves; any other takes the time of a message."""
        return self.size(load.contents) * self.copy if load.contents.kind == "offloaded" else self.message

    def handling_time(self, load: Load, sends: bool) -> float:
        return 0.0

    def size(self, contents: Contents) -> float:
        segments, share = contents.segments, _share(contents.extents, contents.whole)
        if contents.kind == "saved":
            return segments_stash(segments, "F") * share
        if contents.kind == "recomputed":
            most = segments_stash(segments, "B" if contents.in_backward else "R")
            return (most - segments_stash(segments, "F")) * share
        if contents.kind == "offloaded" and contents.leaving is not None:
            return offloaded_stash(segments, contents.leaving) * share
        return deferred_stash(segments) * share if contents.kind == "deferred" else 0.0

    def static_memory(self, pieces: Sequence[Piece]) -> float:
        return 0.0

    def static_host_memory(self, pieces: Sequence[Piece]) -> float:
        return 0.0

    def update_memory(self, pieces: Sequence[Piece]) -> float:
        return 0.0


@dataclass(frozen=True)
class PieceTimes(_LayerMemory):
    """Costs given by hand: the forward time of each piece for a whole microbatch; missing pieces take no time.

    backward_ratio: full backward over forward, for every piece. message: time of any message between ranks. copy: time
    of copying to the host, or back, what one layer keeps of one microbatch. op_overhead: time that every op takes
    beside its pieces; one that recomputes takes it once.
    """

    by_kind: ClassVar[bool] = True
    forward: Mapping[str, float] = field(default_factory=lambda: {"mlp": 1.0})
    backward_ratio: float = 2.0
    message: float = 0.0
    copy: float = 0.0
    op_overhead: float = 0.0

    def __post_init__(self) -> None:
        others = (("backward ratio", self.backward_ratio), ("message", self.message), ("copy", self.copy))
        for name, value in (*self.forward.items(), *others):
            if value < 0 or value != value or value == float("inf"):
                raise UserError(f"the time of {name} must be a finite number and not negative, not {value}.")

    def op_time(self, work: Work) -> float:
        extents, whole = _in_whole_numbers(work.extents) if work.whole is None else (work.extents, work.whole)
        share = sum(part.tokens for part in extents) / whole
        attention = attention_pairs(extents) / (whole * whole / 2)
        pieces = sum(
            self._piece_time(piece.role, work.kind, attention if piece.role == "attn" else share) / piece.shares
            for piece in work.pieces
            if piece.kind != HEAD_NORM  # all of a head's time is that of its output layer
        )
        return pieces if work.kind == "R" else pieces + self.op_overhead

    def _piece_time(self, piece: str, op: str, share: float) -> float:
        forward = self.forward.get(piece, 0.0) * share
        if op in "FR":
            return forward
        backward = forward * self.backward_ratio
        if op == "B":
            return backward
        inputs = min(forward, backward) if piece in SPLIT_BACKWARD else backward
        return inputs if op == "I" else backward - inputs


def unit_costs() -> PieceTimes:
    """Every piece takes 1, backward twice that, a message 0.1: only their order matters here."""
    return PieceTimes(dict.fromkeys(PIECE_KINDS, 1.0), message=0.1)


@dataclass(frozen=True)
class OpTimes(_LayerMemory):
    """Costs measured on a program: the time of each (kind, stage, chunk), the chunk by its number among those that are
    unlike (`chunk_numbers`), of any message between ranks, and of copying a microbatch-layer. Where R was part of the
    backward, its time is there, and R takes none."""

    program: Program
    times: Mapping[tuple[str, int, int], float]
    message: float = 0.0
    copy: float = 0.0

    def op_time(self, work: Work) -> float:
        stage = next(index for index, stage in enumerate(self.program.stages) if work.pieces[0] in stage.pieces)
        key = (work.kind, stage, self._numbers[_place(work.extents, work.whole)])
        return self.times.get(key, 0.0) if work.kind == "R" else self.times[key]

    @cached_property
    def _numbers(self) -> dict[_Place, int]:
        return _unlike(self.program.workload)


_Place = tuple[tuple[float, float], ...]


def chunk_numbers(workload: Workload) -> tuple[tuple[int, ...], ...]:
    """For each chunk of each microbatch its number among the step's unlike ones: where all microbatches are one
    document each and cut alike, its number in the microbatch."""
    unlike, whole = _unlike(workload), workload.mean_tokens
    return tuple(tuple(unlike[_place(extents, whole)] for extents in chunks) for chunks in workload.extents)


def _unlike(workload: Workload) -> dict[_Place, int]:
    whole = workload.mean_tokens
    places = dict.fromkeys(_place(extents, whole) for chunks in dict.fromkeys(workload.extents) for extents in chunks)
    return {place: number for number, place in enumerate(places)}


def _place(extents: Extents, whole: float | None) -> _Place:
    """Of a chunk in its microbatch, whatever the unit of the extents."""
    unit = 1.0 if whole is None else whole
    return tuple((round(part.tokens / unit, 9), round(part.earlier / unit, 9)) for part in extents)


def _share(extents: Extents, whole: float | None) -> float:
    """Of a chunk in its microbatch; see `Work.whole`."""
    return sum(part.tokens for part in extents) / (1.0 if whole is None else whole)


def _in_whole_numbers(parts: Extents) -> tuple[Extents, int]:
    """Extents in parts of a microbatch, as multiples of one such part, and how many of these it has: sums of whole
    numbers are exact, and ties between times decide orders."""
    scale = lcm(*(_denominator(value) for part in parts for value in part[:2]))
    return tuple(Extent(round(part.tokens * scale), round(part.earlier * scale)) for part in parts), scale


def _denominator(value: float) -> int:
    """Of the fraction that a number stands for, which has one of at most 2^20."""
    if (exact := value.as_integer_ratio()[1]) <= 1 << 20:
        return exact
    from fractions import Fraction  # takes long to import

    return Fraction(value).limit_denominator(1 << 20).denominator


def segments_stash(segments: Sequence[Segment], kind: str) -> float:
    """Microbatch-layers that one whole microbatch keeps in a stage once its op of that kind has run (see `saved.kept`);
    a stage of n whole layers that keeps everything keeps exactly n."""
    saved: list[_Elements] = []
    for segment in segments:
        saved.append({})
        for piece in segment.pieces:
            saved[-1] |= _saved(piece)
    return kept(segments, saved, [_inputs(segment) for segment in segments], kind) / LAYER_ELEMENTS


def offloaded_stash(segments: Sequence[Segment], leaving: Leaving) -> float:
    """Microbatch-layers of that, after F, which leave the device of one whole microbatch."""
    inputs, stays = [_inputs(segment) for segment in segments], staying(leaving.before, leaving.after)
    anything = leaving._replace(min_bytes=0)  # nothing has a size in bytes here
    return offloaded(segments, lambda piece, _: _saved(piece), inputs, anything, stays) / LAYER_ELEMENTS


def _inputs(segment: Segment) -> _Elements:
    first = segment.pieces[0]
    crossing = [(name, first.layer) for name in KINDS[first.kind].inputs]
    return dict.fromkeys(crossing[:-1] if segment.passes_residual else crossing, 1)


def _saved(piece: Piece) -> _Elements:
    return {(name, piece.layer): size for name, size in KINDS[piece.kind].textbook.items()}


def deferred_stash(segments: Sequence[Segment]) -> float:
    """Microbatch-layers that one whole microbatch keeps in a stage's layers from I to W."""
    pieces = (piece for segment in segments for piece in segment.pieces if piece.role in LAYER_PIECES)
    return sum(KINDS[piece.kind].deferred(_TEXTBOOK) for piece in pieces) / LAYER_ELEMENTS


def parse_piece_times(text: str) -> dict[str, float]:
    """`pre=1,attn=3,post=2,embed=0.5` as a table; `pre` means qkv, `post` mlp. Raises UserError with what is valid."""
    known = (*PIECE_KINDS, *PIECE_ALIASES)
    times: dict[str, float] = {}
    for part in text.split(","):
        name, separator, value = part.partition("=")
        name = name.strip()
        if not separator or name not in known:
            near = nearest_name(name, known) if separator else None
            hint = f"; did you mean {near}?" if near else "."
            raise UserError(f"--piece-times: {part.strip()!r} is not NAME=TIME with a name of {', '.join(known)}{hint}")
        try:
            seconds = float(value)
        except ValueError:
            raise UserError(f"--piece-times: {value.strip()!r} is not a number (in {part.strip()!r}).") from None
        if not 0 <= seconds < float("inf"):
            raise UserError(f"--piece-times: the time of {name} must be a finite number and not negative, not {value}.")
        piece = PIECE_ALIASES.get(name, name)
        if piece in times:
            raise UserError(f"--piece-times gives {piece} twice ({name} means {piece}).")
        times[piece] = seconds
    return times
