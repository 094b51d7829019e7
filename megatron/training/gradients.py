"""From the gradients each rank has summed over its microbatches to those the optimizer needs.

Everything happens once a step, after the last backward, in an order that any placement allows: sums over copies of a
weight first, while every rank still holds whole gradients, then the data-parallel reduction, which may leave each rank
a shard only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from helixpipe.model import PipelineModel
from megatron.training.parallel import Parallel


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
        self._copies = _copy_groups(model.replicated_parameters(), parallel)

    def reduce(self, tokens: torch.Tensor | None) -> None:
        """Sum and scale; collective over all ranks.

        tokens: with per-token loss, the unmasked tokens of the whole batch over all data-parallel ranks, by which the
        summed gradients are divided; else unused, since every microbatch's gradient was divided by its own tokens.
        """
        if self._parallel.tp_size > 1:
            _all_reduce_together(self._sequence_parallel, self._parallel.tp_group)
        for parameters, group in self._copies:
            _all_reduce_together(parameters, group)
        self._ddp.finish_grad_sync()
        if self._per_token and tokens is not None:
            self._ddp.scale_gradients(1.0 / max(float(tokens), 1.0))


def _copy_groups(
    own: dict[str, torch.nn.Parameter], parallel: Parallel
) -> list[tuple[list[torch.nn.Parameter], dist.ProcessGroup]]:
    """Parameters of which several pipeline ranks hold copies, with the group of those ranks, in one order."""
    keys: list[Any] = [None] * parallel.pp_size
    dist.all_gather_object(keys, sorted(own), group=parallel.pp_group)
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
                result.append(([own[key] for key in sorted(own) if holders[key] == ranks], group))
    return result


def _all_reduce_together(parameters: list[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum the gradients of matrices as they are, those of several vectors in one collective for each type."""
    gradients: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.main_grad  # type: ignore[attr-defined]  # DDP's
        if gradient.dim() > 1:
            dist.all_reduce(gradient, group=group)
        else:
            gradients.setdefault(gradient.dtype, []).append(gradient)
    for tensors in gradients.values():
        if len(tensors) == 1:
            dist.all_reduce(tensors[0], group=group)
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat, group=group)
        for tensor, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(piece.view_as(tensor))
