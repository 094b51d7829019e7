"""Weights whole on each pipeline rank that holds them, as megatron-core keeps them: its DistributedDataParallel with
gradients in `main_grad`, and its optimizer, with `--use-distributed-optimizer` one whose state data-parallel ranks
share out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from helixpipe.model import PipelineModel
from helixpipe.program.stages import Piece
from helixpipe.runtime.replicas import holders
from helixpipe.runtime.weights import WholeWeights
from megatron.pretrain.process.parallel import Parallel
from megatron.pretrain.step.gradients import ReplicaSums, Sum
from megatron.pretrain.step.optimizer_update import OptimizerUpdate, is_shared_out


class MegatronWeights(OptimizerUpdate, WholeWeights):
    """The `TrainedWeights` of today. ddp: the model in megatron-core's wrapper; optimizer: its own for that.

    Collective over all ranks when made: they tell each other what they hold.
    """

    def __init__(self, ddp: Any, model: PipelineModel, optimizer: Any, parallel: Parallel, per_token: bool):
        super().__init__(optimizer, parallel, list(model.parameters()))
        self._ddp, self._model, self._per_token = ddp, model, per_token
        self._held: list[Any] = [None] * parallel.pp_size
        dist.all_gather_object(self._held, model.pieces, group=parallel.pp_group)
        self._partial = [weight for weight in model.parameters() if getattr(weight, "sequence_parallel", False)]
        partial = {id(weight) for weight in self._partial} if parallel.tp_size > 1 else set()
        self._replicas = ReplicaSums(model, self._held, parallel, partial)

    def holders(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        return holders(self._held, pieces)

    # ---------------------------------------------------------------------------------------------------- gradients

    def zero_gradients(self) -> None:
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()

    def sum_replicas(self, pieces: Sequence[Piece]) -> None:
        self._replicas.start(pieces)

    def reduce(self, tokens: Tensor | None) -> None:
        """Reduce the gradients in an order that is right for any placement: sums over replicas while every rank still
        holds whole gradients, then the data-parallel reduction, which may leave each rank only a shard.
        """
        if self._parallel.tp_size > 1:
            Sum(self._partial, self._parallel.tp_group).finish()
        self._replicas.finish()
        self._ddp.finish_grad_sync()
        if self._per_token and tokens is not None:
            self._ddp.scale_gradients(1.0 / tokens.clamp(min=1.0).reshape(()))

    # ------------------------------------------------------------------------------------------------------- counts

    def count(self) -> tuple[int, int]:
        own = sum(weight.numel() for weight in self._model.parameters())
        return own, int(self._over_model(lambda weight: weight.numel()))

    def norm(self) -> float:
        return math.sqrt(self._over_model(lambda weight: weight.detach().double().pow(2).sum()))

    def _over_model(self, value: Callable[[torch.nn.Parameter], Any]) -> float:
        """Sum a value of every weight of the model, each once; whole numbers exactly, up to 2^53."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._parallel.device)
        for weight in self._model.parameters():
            if self.counts_here(weight):
                sums[int(is_shared_out(weight))] += value(weight)
        dist.all_reduce(sums, group=self._parallel.tp_group)
        dist.all_reduce(sums, group=self._parallel.pp_group)
        # Experts are on some of the ranks that share the other weights, each as often as it has copies.
        dist.all_reduce(experts := sums[1:].clone(), group=self._parallel.dp_cp_group)
        return float(sums[0]) + float(experts) / self._parallel.expert_copies
