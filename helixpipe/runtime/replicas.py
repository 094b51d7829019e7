"""The weights that several pipeline ranks hold, on which ranks, and whose backwards add to their gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import torch

from helixpipe.program.stages import HEAD_MTP, Piece

_TIED = frozenset({Piece("embed"), Piece("head")})

_FURTHER = frozenset({Piece("embed"), Piece(HEAD_MTP)})
"""The pieces that use the embedding where the head predicts further tokens."""


class ReplicatedModel(Protocol):
    """The interface of a model with replicated weights; `helixpipe.model.PipelineModel` is one."""

    share_embeddings_and_output_weights: bool

    def replicated_parameters(self) -> dict[str, torch.nn.Parameter]: ...

    def tied_rows(self, part: Piece) -> Sequence[tuple[torch.nn.Parameter, slice]]: ...

    def piece_of(self, parameter: str) -> Piece: ...


class ReplicatedWeight(NamedTuple):
    """A weight of this rank of which others hold replicas.

    name: equal on all of them. pieces: whose backwards add to its gradient. ranks: the pipeline ranks, in order.
    """

    name: str
    parameter: torch.nn.Parameter
    pieces: frozenset[Piece]
    ranks: tuple[int, ...]


Held = Sequence[Collection[Piece]]
"""The pieces of each pipeline rank."""


def holders(held: Held, pieces: Collection[Piece]) -> tuple[int, ...]:
    """Return the pipeline ranks with one of these pieces."""
    return tuple(rank for rank, own in enumerate(held) if not set(pieces).isdisjoint(own))


def parts_of_head(held: Held) -> list[Piece]:
    """Return the parts of a head that is divided, in their order; none of any other."""
    return sorted({piece for own in held for piece in own if piece.part is not None})


def tied_ranks(held: Held, part: Piece) -> tuple[int, ...]:
    """Return the pipeline ranks that hold the rows of a part of a head tied to the embedding: there or here."""
    return holders(held, {Piece("embed"), part})


class NamesPieces(Protocol):
    """The interface of a model that knows the pieces of its weights."""

    share_embeddings_and_output_weights: bool

    def piece_of(self, parameter: str) -> Piece: ...


def used_by(weight: str, model: NamesPieces) -> frozenset[Piece]:
    """Return the pieces whose ops use a weight, by its name, and whose backwards add to its gradient."""
    shared = model.share_embeddings_and_output_weights and weight.endswith("word_embeddings.weight")
    return _TIED if shared else frozenset({model.piece_of(weight)})


def replicated_weights(model: ReplicatedModel, held: Held) -> list[ReplicatedWeight]:
    """Return the replicated weights of this rank's model by name, which is one order on all ranks."""
    own = model.replicated_parameters()
    weights, further = [], bool(holders(held, {Piece(HEAD_MTP)}))
    for name in sorted(own):
        pieces = _FURTHER if further and name.startswith("embedding.") else used_by(name, model)
        weights.append(ReplicatedWeight(name, own[name], pieces, holders(held, pieces)))
    return weights


def replica_groups(held: Held, tied: bool) -> list[tuple[int, ...]]:
    """Return every set of ranks of the pipeline that may hold replicas of a weight, in one order. tied: whether the
    embedding and the head share a weight.
    """
    pieces = {piece for own in held for piece in own if piece.has_weights}
    shared = [frozenset({piece}) for piece in pieces] + ([_TIED] if tied else [])
    shared += [_FURTHER] * (Piece(HEAD_MTP) in pieces)
    groups = {holders(held, each) for each in shared}
    if tied:
        groups |= {tied_ranks(held, part) for part in parts_of_head(held)}
    return sorted(ranks for ranks in groups if len(ranks) > 1)
