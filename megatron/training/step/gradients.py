"""From the gradients each rank has summed over its microbatches to those the optimizer needs.

Everything happens once a step, in an order that any placement allows: sums over copies of a weight first, while every
rank still holds whole gradients, then the data-parallel reduction, which may leave each rank a shard only. A sum over
copies starts when a rank has run its last backward of them, and is on its way while the rank runs the others; over NCCL
after the last backward of all, since it could hold up messages that other ranks wait for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from helixpipe.model import PipelineModel
from helixpipe.model.layers import piece_of
from helixpipe.program.program import Piece
from megatron.training.process.parallel import Parallel


class GradientReducer:
    """Finishes a step's gradients. `ddp`: the model in megatron-core's DistributedDataParallel, gradients in
    `main_grad`.

    Collective over all ranks when made: they tell each other which weights they hold copies of.
    """

    def __init__(self, ddp: Any, model: PipelineModel, parallel: Parallel, per_token: bool):
        self._ddp = ddp
        self._parallel = parallel
        self._per_token = per_token
        self._sequence_parallel = [
            parameter for parameter in model.parameters() if getattr(parameter, "sequence_parallel", False)
        ]
        partial = {id(parameter) for parameter in self._sequence_parallel} if parallel.tp_size > 1 else set()
        self._sums = _sums_over_copies(model, parallel, partial)
        self._complete: set[Piece] = set()
        self._started = 0

    def complete(self, pieces: Collection[Piece]) -> None:
        """This rank has run its last backward of these pieces: start the sums that wait for no other, in the order of
        all ranks."""
        self._complete.update(pieces)
        for each in self._sums[self._started :]:
            if each.pieces is None or not each.pieces <= self._complete:
                break
            each.start()
            self._started += 1

    def reduce(self, tokens: torch.Tensor | None) -> None:
        """Sum and scale; collective over all ranks.

        tokens: with per-token loss, the unmasked tokens of the whole batch over all data-parallel ranks, by which the
        summed gradients are divided; else unused, since every microbatch's gradient was divided by its own tokens.
        """
        if self._parallel.tp_size > 1:
            partial = _Sum(self._sequence_parallel, self._parallel.tp_group)
            partial.start()
            partial.finish()
        for each in self._sums[self._started :]:
            each.start()
        for each in self._sums:
            each.finish()
        self._complete, self._started = set(), 0
        self._ddp.finish_grad_sync()
        if self._per_token and tokens is not None:
            self._ddp.scale_gradients(1.0 / tokens.clamp(min=1.0).reshape(()))


@dataclass
class _Sum:
    """Of the gradients of some parameters over the ranks of a group: of matrices as they are, of several vectors in one
    collective for each type. pieces: those whose backwards add to the gradients; None: something else does, too."""

    parameters: list[torch.nn.Parameter]
    group: dist.ProcessGroup
    pieces: frozenset[Piece] | None = None

    def start(self) -> None:
        vectors: dict[torch.dtype, list[torch.Tensor]] = {}
        tensors = []
        self._gathered: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        for parameter in self.parameters:
            gradient = parameter.main_grad  # type: ignore[attr-defined]  # DDP's
            if gradient.dim() > 1:
                tensors.append(gradient)
            else:
                vectors.setdefault(gradient.dtype, []).append(gradient)
        for alike in vectors.values():
            if len(alike) > 1:
                self._gathered.append((torch.cat([vector.reshape(-1) for vector in alike]), alike))
            tensors.append(self._gathered[-1][0] if len(alike) > 1 else alike[0])
        self._works = [dist.all_reduce(tensor, group=self.group, async_op=True) for tensor in tensors]

    def finish(self) -> None:
        for work in self._works:
            work.wait()
        for flat, vectors in self._gathered:
            for vector, piece in zip(vectors, flat.split([vector.numel() for vector in vectors]), strict=True):
                vector.copy_(piece.view_as(vector))


def _sums_over_copies(model: PipelineModel, parallel: Parallel, partial: Collection[int]) -> list[_Sum]:
    """For the parameters of which several pipeline ranks hold copies, in an order alike on all ranks: the head's, which
    are complete first, the embedding's, and those that tensor-parallel ranks have to sum before (`partial`, by id)."""
    own = model.replicated_parameters()
    tied = model.share_embeddings_and_output_weights

    def phase(name: str) -> int:
        return 2 if id(own[name]) in partial else int(piece_of(name).kind == "embed")

    result = []
    for names, group in _copy_groups(sorted(own), parallel):
        for number, alike in groupby(sorted(names, key=phase), key=phase):
            parameters = [(name, own[name]) for name in alike]
            pieces = frozenset(piece_of(name) for name, _ in parameters)
            if number == 1 and tied:
                pieces |= {Piece("head")}
            known = pieces if number < 2 else None
            result.append((number, _Sum([parameter for _, parameter in parameters], group, known)))
    return [each for _, each in sorted(result, key=lambda pair: pair[0])]


def _copy_groups(own: list[str], parallel: Parallel) -> list[tuple[list[str], dist.ProcessGroup]]:
    """Names of parameters of which several pipeline ranks hold copies, with the group of those ranks, in one order."""
    keys: list[Any] = [None] * parallel.pp_size
    dist.all_gather_object(keys, own, group=parallel.pp_group)
    holders: dict[str, tuple[int, ...]] = {}
    for key in sorted({key for each in keys for key in each}):
        holders[key] = tuple(rank for rank, each in enumerate(keys) if key in each)
    if all(len(ranks) == 1 for ranks in holders.values()):
        return []
    # Every rank of the job makes every pipeline's groups, in one order, as new_group asks. Pipelines are alike.
    pipelines: list[Any] = [None] * parallel.world_size
    dist.all_gather_object(pipelines, tuple(dist.get_process_group_ranks(parallel.pp_group)))
    result = []
    for pipeline in sorted(set(pipelines)):
        for ranks in sorted(set(holders.values())):
            group = dist.new_group([pipeline[rank] for rank in ranks]) if len(ranks) > 1 else None
            if group is not None and parallel.rank in pipeline and parallel.pp_rank in ranks:
                result.append(([key for key in own if holders[key] == ranks], group))
    return result
