"""What an op takes and what a message weighs. No torch here.

B = I + W. A piece whose weights are linear layers splits its backward: I (gradient of its input) takes as long as F
(but no longer than B), W (gradient of its weights) the rest. A piece without linear layers (attention, norms,
embedding) does all its backward in I. R takes as long as F.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

from helixpipe.common.errors import UserError
from helixpipe.costs.saved import kept
from helixpipe.program.message import Message
from helixpipe.program.program import PIECE_KINDS, Op, Piece, Program, Stage

SPLIT_BACKWARD = frozenset({"qkv", "proj", "mlp", "head"})
"""Pieces made of linear layers: their weight gradients may be computed later than their input gradients."""

SAVED: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "embed": {},
        "norm": {"residual": 1},
        "qkv": {"normed": 1},
        "attn": {"queries, keys, values": 3},
        "proj": {"attention": 1},
        "mlp": {"after attention": 1, "mlp input": 1, "inner": 4, "activated": 4},
        "head": {},
    }
)
"""Activations each piece keeps from F to backward, by name, in elements of b·s·h: a whole layer 16, with flash
attention and no dropout (HelixPipe; Korthikanti et al., 2022)."""

INPUTS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "embed": {},
        "norm": {"residual": 1},
        "qkv": {"normed": 1, "residual": 1},
        "attn": {"queries, keys, values": 3, "residual": 1},
        "proj": {"attention": 1, "residual": 1},
        "mlp": {"after attention": 1},
        "head": {"last": 1},
    }
)
"""What crosses the cut before each piece: what a stage that begins there keeps, but for a residual that passes by."""

LAYER_ELEMENTS = 16
"""Elements of b·s·h that a whole layer keeps."""

DEFERRED_STASH = {"embed": 0.0, "norm": 0.0, "qkv": 4 / 16, "attn": 0.0, "proj": 2 / 16, "mlp": 10 / 16, "head": 0.0}
"""What each piece keeps from I to W, in microbatch-layers: input and output gradient of each linear layer. QKV 1 + 3,
output 1 + 1, MLP 1 + 4 and 4 + 1, in b·s·h elements: a whole layer 16, as much as it kept from F to I."""

PIECE_ALIASES = {"pre": "qkv", "post": "mlp"}


class _LayerStash:
    """Memory counted in microbatch-layers, whatever the times come from."""

    memory_unit: ClassVar[str] = "microbatch-layers"

    def stash(self, program: Program, op: Op) -> float:
        return stage_stash(program.stages[op.stage], op.kind) * chunk_share(program, op.chunk)

    def deferred_stash(self, program: Program, op: Op) -> float:
        return stage_deferred_stash(program.stages[op.stage]) * chunk_share(program, op.chunk)

    def keys_values(self, program: Program, stage: int) -> tuple[float, float]:
        return 0.0, 0.0  # they are in `SAVED`, chunk by chunk

    def static_memory(self, pieces: Sequence[Piece]) -> float:
        return 0.0

    def copy_memory(self, program: Program, stage: int) -> tuple[float, float]:
        return 0.0, 0.0


@dataclass(frozen=True)
class PieceTimes(_LayerStash):
    """Costs given by hand: the forward time of each piece for a whole microbatch; missing pieces take no time.

    backward_ratio: full backward over forward, for every piece. message: time of any message between ranks.
    """

    forward: Mapping[str, float] = field(default_factory=lambda: {"mlp": 1.0})
    backward_ratio: float = 2.0
    message: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (*self.forward.items(), ("backward ratio", self.backward_ratio), ("message", self.message)):
            if value < 0 or value != value or value == float("inf"):
                raise UserError(f"the time of {name} must be a finite number and not negative, not {value}.")

    def op_time(self, program: Program, op: Op) -> float:
        return sum(self._piece_time(program, piece, op) for piece in op_pieces(program, op))

    def message_time(self, program: Program, message: Message) -> float:
        return self.message

    def _piece_time(self, program: Program, piece: Piece, op: Op) -> float:
        share = chunk_share(program, op.chunk) if piece.kind != "attn" else attention_share(program, op.chunk)
        forward = self.forward.get(piece.kind, 0.0) * share
        if op.kind in "FR":
            return forward
        backward = forward * self.backward_ratio
        if op.kind == "B":
            return backward
        inputs = min(forward, backward) if piece.kind in SPLIT_BACKWARD else backward
        return inputs if op.kind == "I" else backward - inputs


def unit_costs() -> PieceTimes:
    """Every piece takes 1, backward twice that, a message 0.1: only their order matters here."""
    return PieceTimes(dict.fromkeys(PIECE_KINDS, 1.0), message=0.1)


@dataclass(frozen=True)
class OpTimes(_LayerStash):
    """Costs measured: the time of each (kind, stage, chunk), and of any message between ranks. Where R was part of the
    backward, its time is there, and R takes none."""

    times: Mapping[tuple[str, int, int], float]
    message: float = 0.0

    def op_time(self, program: Program, op: Op) -> float:
        key = (op.kind, op.stage, op.chunk)
        return self.times.get(key, 0.0) if op.kind == "R" else self.times[key]

    def message_time(self, program: Program, message: Message) -> float:
        return self.message


def op_pieces(program: Program, op: Op) -> tuple[Piece, ...]:
    """The pieces an op works on: its stage's, for R those that are recomputed."""
    stage = program.stages[op.stage]
    return stage.pieces if op.kind != "R" else tuple(piece for run in stage.recompute for piece in run)


def stage_stash(stage: Stage, kind: str = "R") -> float:
    """Microbatch-layers that one whole microbatch keeps in this stage once its op of that kind has run (B, I: at most
    while it runs; see `Costs`); a stage of n whole layers that keeps everything keeps exactly n."""
    segments = stage.segments
    inputs = [_tensors(segment.pieces[:1], INPUTS) for segment in segments]
    for segment, own in zip(segments, inputs, strict=True):
        if segment.passes_residual:
            del own["residual", segment.pieces[0].layer]
    return kept(segments, [_tensors(s.pieces, SAVED) for s in segments], inputs, kind) / LAYER_ELEMENTS


def _tensors(pieces: Sequence[Piece], table: Mapping[str, Mapping[str, int]]) -> dict[tuple[str, int], int]:
    """The tensors of pieces by name and layer: one that several keep is kept once."""
    return {(name, piece.layer): size for piece in pieces for name, size in table[piece.kind].items()}


def stage_deferred_stash(stage: Stage) -> float:
    """Microbatch-layers that one whole microbatch keeps in this stage from I to W."""
    return sum(DEFERRED_STASH[piece.kind] for piece in stage.pieces)


def chunk_share(program: Program, chunk: int) -> float:
    """The part of a microbatch's tokens in this chunk."""
    if program.chunk_lengths is None:
        return 1.0 / program.num_chunks
    return program.chunk_lengths[chunk] / sum(program.chunk_lengths)


def attention_share(program: Program, chunk: int) -> float:
    """The part of a microbatch's causal attention in this chunk: n tokens after c earlier ones cost n(c + n/2)."""
    lengths = program.chunk_lengths or (1,) * program.num_chunks
    tokens, earlier, total = lengths[chunk], sum(lengths[:chunk]), sum(lengths)
    return tokens * (earlier + tokens / 2) / (total * total / 2)


def parse_piece_times(text: str) -> dict[str, float]:
    """`pre=1,attn=3,post=2,embed=0.5` as a table; `pre` means qkv, `post` mlp. Raises UserError with what is valid."""
    known = (*PIECE_KINDS, *PIECE_ALIASES)
    times: dict[str, float] = {}
    for part in text.split(","):
        name, separator, value = part.partition("=")
        name = name.strip()
        if not separator or name not in known:
            raise UserError(f"--piece-times: {part.strip()!r} is not NAME=TIME with a name of {', '.join(known)}.")
        try:
            seconds = float(value)
        except ValueError:
            raise UserError(f"--piece-times: {value.strip()!r} is not a number (in {part.strip()!r}).") from None
        piece = PIECE_ALIASES.get(name, name)
        if piece in times:
            raise UserError(f"--piece-times gives {piece} twice ({name} means {piece}).")
        times[piece] = seconds
    return times
