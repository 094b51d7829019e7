"""Sums of gradients over the ranks that hold parts of them, once a step.

A sum over the replicas of a stage has its place in the one order of tasks, after their last backwards, and is on its
way while ranks run what is left of the step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from helixpipe.program.stages import Piece
from helixpipe.runtime.replicas import (
    Held,
    ReplicatedModel,
    ReplicatedWeight,
    holders,
    parts_of_head,
    replica_groups,
    replicated_weights,
    tied_ranks,
)
from megatron.pretrain.process.parallel import Parallel


class ReplicaSums:
    """The sums of a rank's gradients over the pipeline ranks that hold replicas of the same weights.

    held: the pieces of each pipeline rank. partial: weights, by id, whose gradients tensor-parallel ranks have to sum
    before. Collective over all ranks when made: they make process groups.
    """

    def __init__(self, model: ReplicatedModel, held: Held, parallel: Parallel, partial: Collection[int]):
        groups = _make_groups(replica_groups(held, model.share_embeddings_and_output_weights), parallel)
        weights = replicated_weights(model, held)
        self._tied = TiedRows(model, held, groups) if model.share_embeddings_and_output_weights else None
        # A weight of two stages, embedding and head, is summed on all its ranks with the later one, or at the end.
        apart = {
            id(each.parameter) for each in weights for piece in each.pieces if holders(held, {piece}) != each.ranks
        }
        self._batches = _batches(weights, groups, apart.union(partial))
        self._begin()

    def _begin(self) -> None:
        self._pending = list(self._batches)
        self._started: list[Sum] = []
        self._complete: set[Piece] = set()

    def start(self, pieces: Sequence[Piece]) -> None:
        """Start the sums that wait for no further pieces, after this rank's last backward of these pieces. All ranks
        that hold replicas of their weights call this in one order.
        """
        self._complete.update(pieces)
        pending = []
        for batch in self._pending:
            waiting = batch.waiting(self._complete)
            names = {weight.name for weight in waiting}
            ready = [weight for weight in batch.weights if weight.name not in names]
            if ready:
                self._start(replace(batch, weights=ready))
            if waiting:
                pending.append(replace(batch, weights=waiting))
        self._pending = pending

    def finish(self) -> None:
        """Start the remaining sums, and wait for all."""
        for batch in self._pending:
            self._start(batch)
        for each in self._started:
            each.finish()
        if self._tied is not None:
            self._tied.sum()
        self._begin()

    def _start(self, batch: _GradientBucket) -> None:
        self._started.append(Sum([weight.parameter for weight in batch.weights], batch.group))


class TiedRows:
    """The gradients of the rows that the embedding shares with the parts of a head which is divided: each part's are
    summed over the ranks that hold it or the embedding, and on one that holds both. groups: by their pipeline ranks."""

    def __init__(self, model: ReplicatedModel, held: Held, groups: Mapping[tuple[int, ...], dist.ProcessGroup]):
        own = ((model.tied_rows(part), groups.get(tied_ranks(held, part))) for part in parts_of_head(held))
        self._parts = [(weights, group) for weights, group in own if weights]

    def sum(self) -> None:
        """Sum them, and wait for the sums."""
        works, sums = [], []
        for weights, group in self._parts:
            total, *others = (weight.main_grad[rows] for weight, rows in weights)  # type: ignore[attr-defined]
            for other in others:
                total.add_(other)
            sums.append((total, others))
            if group is not None:
                works.append(dist.all_reduce(total, group=group, async_op=True))
        for work in works:
            work.wait()
        for total, others in sums:
            for other in others:
                other.copy_(total)


class Sum:
    """A started sum of gradients of parameters over the ranks of a group. Matrices are summed in place, vectors
    together in one collective for each type.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup):
        vectors: dict[torch.dtype, list[torch.Tensor]] = {}
        tensors = []
        self._gathered: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        for parameter in parameters:
            gradient = parameter.main_grad  # type: ignore[attr-defined]  # DDP's
            if gradient.dim() > 1:
                tensors.append(gradient)
            else:
                vectors.setdefault(gradient.dtype, []).append(gradient)
        for alike in vectors.values():
            if len(alike) > 1:
                self._gathered.append((torch.cat([vector.reshape(-1) for vector in alike]), alike))
            tensors.append(self._gathered[-1][0] if len(alike) > 1 else alike[0])
        self._works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]

    def finish(self) -> None:
        for work in self._works:
            work.wait()
        for flat, vectors in self._gathered:
            for vector, piece in zip(vectors, flat.split([vector.numel() for vector in vectors]), strict=True):
                vector.copy_(piece.view_as(vector))


_LAYERS, _EMBEDDING, _LATE = range(3)
"""Kinds of batches, in the order in which they start at the end of a step: gradients of the head and of layers, the
embedding's, and those that are never summed before."""


@dataclass(frozen=True)
class _GradientBucket:
    """Weights whose gradients are summed together."""

    weights: list[ReplicatedWeight]
    group: dist.ProcessGroup
    kind: int

    def waiting(self, complete: Collection[Piece]) -> list[ReplicatedWeight]:
        """Return the weights whose gradients are incomplete after the last backwards of these pieces."""
        return [each for each in self.weights if self.kind == _LATE or not each.pieces.issubset(complete)]


def _batches(
    weights: Sequence[ReplicatedWeight], groups: Mapping[tuple[int, ...], dist.ProcessGroup], late: Collection[int]
) -> list[_GradientBucket]:
    """Return the buckets in an order that is the same on all ranks. late: ids of parameters."""

    def kind(weight: ReplicatedWeight) -> int:
        return _LATE if id(weight.parameter) in late else (_LAYERS, _EMBEDDING)[Piece("embed") in weight.pieces]

    result = []
    for ranks, group in groups.items():
        alike = sorted((weight for weight in weights if weight.ranks == ranks), key=kind)
        result += [_GradientBucket(list(several), group, number) for number, several in groupby(alike, key=kind)]
    return sorted(result, key=lambda batch: batch.kind)


def _make_groups(several: Sequence[tuple[int, ...]], parallel: Parallel) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Return the process groups of this rank's own pipeline among these sets of its ranks, in their order. Those that
    are not there yet are made."""
    made = parallel.replica_groups
    missing = [ranks for ranks in several if ranks not in made]
    if missing:  # on all ranks alike
        # Every rank of the job makes every pipeline's groups, in one order, as new_group asks. Pipelines are alike.
        pipelines: list[Any] = [None] * parallel.world_size
        dist.all_gather_object(pipelines, tuple(dist.get_process_group_ranks(parallel.pp_group)))
        made.update(dict.fromkeys(missing))
        for pipeline in sorted(set(pipelines)):
            for ranks in missing:
                group = dist.new_group([pipeline[rank] for rank in ranks])
                if parallel.rank in pipeline and parallel.pp_rank in ranks:
                    made[ranks] = group
    return {ranks: group for ranks in several if (group := made[ranks]) is not None}
