"""The model as a chain of pieces, and stages: contiguous runs of them, and the placement of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from helixpipe.common.errors import ScheduleError

LayerKinds = tuple[str, ...]
"""The kinds of the pieces of one layer, in order."""

Layers = int | tuple[LayerKinds, ...]
"""The layers of a model: so many plain ones (`LAYER_PIECES`), or the kinds of each."""

LAYER_PIECES: LayerKinds = ("norm", "qkv", "attn", "proj", "mlp")
"""The roles that the pieces of one transformer layer have, in order, and the kinds of a plain layer."""

PIECE_KINDS = ("embed", *LAYER_PIECES, "head")
"""The roles of all pieces. A kind of piece is called by its role, and where it is another than the plain one of that
role, by a point and what it is, as in `VARIANTS`."""

NO_ROPE, WINDOW = "qkv.norope", "attn.window"
"""Queries and keys that are not rotated, where others are; attention to a window of tokens."""

LATENT_QKV, LATENT = "qkv.latent", "attn.latent"
"""Multi-latent attention (DeepSeek-V2): queries, and of all keys and values one latent of few channels, with one key
for the positions; attention, which makes every head's keys and values of the latents."""

SINKS, WINDOW_SINKS = "attn.sinks", "attn.window.sinks"
"""Attention, to all tokens or to a window, whose softmax also has a learned logit of each head, the head's sink."""

WINDOWS = (WINDOW, WINDOW_SINKS)
"""The kinds that attend to a window."""

EXPERTS = "mlp.moe"
"""An MLP that is a mixture of experts: a router sends each token to some of them."""

HEAD_NORM, HEAD_PART = "head.norm", "head.part"
"""The two kinds that a head is made of where its vocabulary is divided over ranks (`split_head`): the final norm, and
some rows of the output layer with their part of the loss."""

HEAD_MTP = "head.mtp"
"""A head that also predicts tokens further on, each by a transformer layer of its own (multi-token prediction)."""

VARIANTS: tuple[str, ...] = (
    *(NO_ROPE, WINDOW, LATENT_QKV, LATENT, SINKS, WINDOW_SINKS, EXPERTS, HEAD_NORM, HEAD_PART, HEAD_MTP),
)
"""The kinds of piece that are not the plain ones of their roles."""

PLACEMENTS = ("resident", "shipped", "replicated", "ring")

OWNED = ("shipped", "ring")
"""Placements whose weights one rank owns and others run with copies of."""


class Piece(NamedTuple):
    """The smallest part of the model that can sit on a rank alone. `layer` is the global layer index, -1 for embed and
    head. `part`: of a `HEAD_PART`, its number and how many there are."""

    kind: str
    layer: int = -1
    part: tuple[int, int] | None = None

    @property
    def shares(self) -> int:
        """The number of pieces that divide the vocabulary among them."""
        return 1 if self.part is None else self.part[1]

    def rows(self, vocabulary: int) -> slice:
        """The rows of a vocabulary of so many that it has; parts differ by one row at most."""
        number, count = self.part or (0, 1)
        return slice(vocabulary * number // count, vocabulary * (number + 1) // count)

    @property
    def role(self) -> str:
        """Return the piece's place in a layer, and what crosses the cuts beside it: the same for all kinds that stand
        there."""
        return role_of(self.kind)

    @property
    def has_weights(self) -> bool:
        """Whether it has any: core attention has none, but where it makes keys and values of latents, or has sinks."""
        return self.role != "attn" or self.kind in (LATENT, SINKS, WINDOW_SINKS)

    def __str__(self) -> str:
        if self.part is not None:
            return f"{self.kind}[{self.part[0]}/{self.part[1]}]"
        return self.kind if self.layer < 0 else f"{self.kind}[{self.layer}]"


class Segment(NamedTuple):
    """Consecutive pieces of a stage with one autograd graph.

    recomputed: its activations, all but its inputs, are dropped after F and recomputed before the backward.
    inputs_again: attention that is kept, after a recomputed run that makes its queries, keys and values: these are
    dropped after F, too, and come back when that run is recomputed, which is then before attention's own backward.
    """

    pieces: tuple[Piece, ...]
    recomputed: bool
    inputs_again: bool = False

    @property
    def passes_residual(self) -> bool:
        """Whether the segment starts inside a layer and needs nothing of the residual but its gradient."""
        first = self.pieces[0]
        inside = first.role in ("qkv", "attn", "proj")
        ends = any(piece.role == "proj" and piece.layer == first.layer for piece in self.pieces)
        return inside and not (self.recomputed and ends)


@dataclass(frozen=True)
class Activations:
    """Says what is done with a unit's activations between its F and its backward; what no field names is kept.

    recompute: runs of the stage's pieces, in order, each recomputed from its inputs: by the unit's R op, or where the
    program has none, run by run, in the unit's B or I as it comes to them.
    offload: runs of pieces whose saved tensors go to the host's memory after F and come back before the backward, each
    with the share of their bytes that goes, above 0 and at most 1. Of a piece that is recomputed these are the inputs
    of its run, if it is the run's first.
    ahead: ops that its rank may run while they come back, before the first op that needs them.
    """

    recompute: tuple[tuple[Piece, ...], ...] = ()
    offload: tuple[tuple[tuple[Piece, ...], float], ...] = ()
    ahead: int = 1


@dataclass(frozen=True)
class Stage:
    """A contiguous run of pieces run as one operation, and how its weights are placed.

    `placement`: `resident` (all its units on one rank), `shipped`, `replicated` or `ring` (see docs/architecture.md).
    `owner`: of a shipped or ring stage, the rank that holds its weights; every other rank that runs units of it gets
    copies of them and returns their gradients (see `transfers`).
    `recompute`: runs of its pieces, in order, each recomputed from its inputs: by the unit's R op, or where the
    program has none, run by run, in the unit's B or I as it comes to them.
    """

    pieces: tuple[Piece, ...]
    placement: str = "resident"
    recompute: tuple[tuple[Piece, ...], ...] = ()
    owner: int | None = None

    @cached_property
    def activations(self) -> Activations:
        """Return what is done with the activations of the stage's units, unless the program says otherwise."""
        return Activations(self.recompute)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The stage in order: the runs that are recomputed and what is kept between them."""
        return segments(self.pieces, self.activations)

    @property
    def has_weights(self) -> bool:
        """Core attention has none, so a stage of nothing else is placed nowhere: its microbatches may run anywhere."""
        return any(piece.has_weights for piece in self.pieces)

    @property
    def has_attention(self) -> bool:
        return any(piece.role == "attn" or piece.kind == HEAD_MTP for piece in self.pieces)

    @property
    def part(self) -> tuple[int, int] | None:
        """Of a stage that is one part of a divided head, its number and how many there are; None for any other."""
        return self.pieces[0].part if len(self.pieces) == 1 else None


@dataclass(frozen=True)
class RingOptions:
    """Options of how the weights of ring stages travel; see `transfers`.

    slots: copies of weights, and sums of gradients, that a rank has room for. gradient_bytes: of an element of the
    gradients, 4 (float32) or 2 (bfloat16).
    """

    slots: int = 3
    gradient_bytes: int = 4


def segments(pieces: tuple[Piece, ...], activations: Activations) -> tuple[Segment, ...]:
    """A stage's pieces in order: the runs that are recomputed and what is kept between them."""
    parts: list[Segment] = []
    start = 0

    def keep(end: int) -> None:
        if end > start:  # attention that is kept, after a recomputed run, gets its inputs from that
            parts.append(Segment(pieces[start:end], False, start > 0 and pieces[start].role == "attn"))

    for run in activations.recompute:
        at = pieces.index(run[0])
        keep(at)
        parts.append(Segment(run, True))
        start = at + len(run)
    keep(len(pieces))
    return tuple(parts)


def split_head(count: int) -> tuple[Piece, ...]:
    """The pieces of a head whose vocabulary is divided into `count` parts: the final norm, then the parts in order."""
    return (Piece(HEAD_NORM), *(Piece(HEAD_PART, part=(number, count)) for number in range(count)))


def joined_head(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """The same pieces with the plain head at the end where they end in one that is divided."""
    shares = pieces[-1].shares if pieces else 0
    divided = split_head(min(shares, len(pieces)))  # a file may say that there are millions
    return (*pieces[: -len(divided)], Piece("head")) if tuple(pieces[-len(divided) :]) == divided else tuple(pieces)


def role_of(kind: str) -> str:
    """The role of a kind of piece."""
    return kind.partition(".")[0]


def layer_kinds(layers: Layers) -> tuple[LayerKinds, ...]:
    """The kinds of the pieces of each layer."""
    return (LAYER_PIECES,) * layers if isinstance(layers, int) else layers


def model_pieces(layers: Layers) -> tuple[Piece, ...]:
    """The whole model as a chain: embed, then norm, qkv, attn, proj, mlp of each layer, or of what kinds it is, then
    head."""
    return (Piece("embed"), *layer_pieces(layer_kinds(layers)), Piece("head"))


def layer_pieces(layers: Sequence[LayerKinds], first: int = 0) -> tuple[Piece, ...]:
    """The pieces of some layers one after another, numbered from `first`."""
    return tuple(Piece(kind, layer) for layer, kinds in enumerate(layers, first) for kind in kinds)


def even_stages(layers: Layers, num_stages: int) -> tuple[Stage, ...]:
    """`num_stages` stages of equally many whole layers; embed in the first, head in the last.

    Raises ScheduleError when the layers cannot be divided evenly.
    """
    kinds = layer_kinds(layers)
    num_layers = len(kinds)
    if num_layers < num_stages or num_layers % num_stages:
        below = num_layers - num_layers % num_stages
        valid = f"values are {below} and {below + num_stages}" if below else f"value is {num_stages}"
        raise ScheduleError(
            f"--num-layers {num_layers} cannot be divided evenly over {num_stages} pipeline stages; "
            f"the nearest valid {valid}."
        )
    return uneven_stages([num_layers // num_stages] * num_stages, kinds)


def uneven_stages(counts: Sequence[int], layers: Sequence[LayerKinds]) -> tuple[Stage, ...]:
    """Stages of so many whole layers each; embed in the first, head in the last, which may be all that these have."""
    stages, first, last = [], 0, len(counts) - 1
    for index, count in enumerate(counts):
        pieces = list(layer_pieces(layers[first : first + count], first))
        if index == 0:
            pieces.insert(0, Piece("embed"))
        if index == last:
            pieces.append(Piece("head"))
        stages.append(Stage(tuple(pieces)))
        first += count
    return tuple(stages)


def layers_of(stages: Sequence[Stage]) -> tuple[int, ...]:
    """Return the number of layers that each stage has a piece of."""
    return tuple(len({piece.layer for piece in stage.pieces} - {-1}) for stage in stages)


def ring_stages(layers: Layers, num_ranks: int, direction: int = -1) -> tuple[Stage, ...]:
    """embed, `num_ranks` ring stages of whole layers that differ by one at most, and head; embed and head replicated.

    Stage c of the ring belongs to rank -c mod p, so that weights which travel from rank to rank + 1 come in the order
    of their use (WeiPipe, Lin et al., PPoPP 2025); with direction 1 to rank c. Raises ScheduleError for fewer layers
    than ranks.
    """
    kinds = layer_kinds(layers)
    num_layers = len(kinds)
    if num_layers < num_ranks:
        raise ScheduleError(
            f"--num-layers {num_layers} cannot be divided over {num_ranks} pipeline ranks; "
            f"the nearest valid value is {num_ranks}."
        )
    cuts = [num_layers * c // num_ranks for c in range(num_ranks + 1)]
    ring = (
        Stage(layer_pieces(kinds[cuts[c] : cuts[c + 1]], cuts[c]), "ring", owner=direction * c % num_ranks)
        for c in range(num_ranks)
    )
    return (Stage((Piece("embed"),), "replicated"), *ring, Stage((Piece("head"),), "replicated"))
