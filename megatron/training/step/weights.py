"""Weights whole on each pipeline rank that holds them, as megatron-core keeps them: its DistributedDataParallel with
gradients in `main_grad`, and its optimizer, with `--use-distributed-optimizer` one whose state data-parallel ranks
share out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from helixpipe.model import PipelineModel
from helixpipe.model.device import redirect
from helixpipe.program.stages import Piece
from helixpipe.runtime.replicas import holders
from helixpipe.runtime.weights import WholeWeights
from megatron.training.process.parallel import Parallel
from megatron.training.step.gradients import ReplicaSums, Sum
from megatron.training.step.kept import KeptState


class MegatronWeights(WholeWeights):
    """The `TrainedWeights` of today. ddp: the model in megatron-core's wrapper; optimizer: its own for that.

    Collective over all ranks when made: they tell each other what they hold.
    """

    def __init__(self, ddp: Any, model: PipelineModel, optimizer: Any, parallel: Parallel, per_token: bool):
        self._ddp, self._model, self._optimizer = ddp, model, optimizer
        self._parallel, self._per_token = parallel, per_token
        self._each = [each for each in optimizer.chained_optimizers if not each.is_stub_optimizer]
        self._scaler = next((each.grad_scaler for each in self._each if getattr(each, "grad_scaler", None)), None)
        self._held: list[Any] = [None] * parallel.pp_size
        dist.all_gather_object(self._held, model.pieces, group=parallel.pp_group)
        self._partial = [weight for weight in model.parameters() if getattr(weight, "sequence_parallel", False)]
        partial = {id(weight) for weight in self._partial} if parallel.tp_size > 1 else set()
        self._replicas = ReplicaSums(model, self._held, parallel, partial)

    def holders(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        return holders(self._held, pieces)

    def counts_here(self, weight: torch.nn.Parameter) -> bool:
        """As the optimizer counts gradients: what is split over tensor-parallel ranks on each of them, the rest on the
        first; of replicas the first."""
        split = getattr(weight, "tensor_model_parallel", False)
        return not getattr(weight, "shared", False) and (split or self._parallel.tp_rank == 0)

    # ---------------------------------------------------------------------------------------------------- gradients

    def zero_gradients(self) -> None:
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()

    def sum_replicas(self, pieces: Sequence[Piece]) -> None:
        self._replicas.start(pieces)

    def reduce(self, tokens: Tensor | None) -> None:
        """In an order that any placement allows: sums over replicas while every rank still holds whole gradients, then
        the data-parallel reduction, which may leave each rank a shard only."""
        if self._parallel.tp_size > 1:
            Sum(self._partial, self._parallel.tp_group).finish()
        self._replicas.finish()
        self._ddp.finish_grad_sync()
        if self._per_token and tokens is not None:
            self._ddp.scale_gradients(1.0 / tokens.clamp(min=1.0).reshape(()))

    # ------------------------------------------------------------------------------------------------------- counts

    def count(self) -> tuple[int, int]:
        own = sum(weight.numel() for weight in self._model.parameters())
        counted = sum(weight.numel() for weight in self._model.parameters() if self.counts_here(weight))
        total = self._over_model(torch.tensor(counted, dtype=torch.int64, device=self._parallel.device))
        return own, int(total)

    def norm(self) -> float:
        square = torch.zeros((), dtype=torch.float64, device=self._parallel.device)
        for weight in self._model.parameters():
            if self.counts_here(weight):
                square += weight.detach().double().pow(2).sum()
        return math.sqrt(float(self._over_model(square)))

    def _over_model(self, value: Tensor) -> Tensor:
        dist.all_reduce(value, group=self._parallel.tp_group)
        dist.all_reduce(value, group=self._parallel.pp_group)
        return value

    # ------------------------------------------------------------------------------------------------------- update

    def step(self) -> tuple[bool, float | None, float | None]:
        updated, norm, num_zeros = self._optimizer.step()
        return updated, norm, num_zeros

    def prepare(self) -> Tensor:
        overflow = torch.zeros(1, dtype=torch.float32, device=self._parallel.device)
        with redirect():
            for each in self._each:
                if self._scaler is None:
                    each.prepare_grads()
                else:  # its prepare_grads would ask all ranks for overflows
                    each._copy_model_grads_to_main_grads()
                    gradients = each._collect_main_grad_data_for_unscaling()
                    torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, self._scaler.inv_scale)
        return overflow

    def square_norm(self) -> Tensor:
        gradients = [gradient for each in self._each for gradient in each.get_main_grads_for_grad_norm()]
        if not gradients:
            return torch.zeros(())
        # Of ranks that hold the same gradients all but one have to be left out, or all to count for a part.
        group = self._optimizer.get_grad_stats_parallel_group()
        norms = torch.stack(torch._foreach_norm(gradients))
        return norms.double().square().sum() * dist.get_world_size(group) / dist.get_world_size()

    def keep(self) -> KeptState:
        # An overflow is not followed by another update, which would write the model's weights anew.
        copied = list(self._model.parameters()) if self._scaler is not None else []
        return KeptState([each.optimizer for each in self._each], copied)

    def update(self) -> None:
        with redirect():
            self._optimizer.step_with_ready_grads()

    def clip(self, largest: float, norm: float) -> None:
        with redirect():
            for each in self._each:
                clip_grad_by_total_norm_fp32(each.get_parameters(), largest, norm)

    def settle_loss_scale(self, overflow: bool) -> None:
        if self._scaler is not None:
            self._scaler.update(overflow)
