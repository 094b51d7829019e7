"""The update of weights by megatron-core's optimizer, in the steps that `update` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from helixpipe.model.device import redirect
from megatron.pretrain.process.parallel import Parallel
from megatron.pretrain.step.kept import KeptState


class OptimizerUpdate:
    """`Updatable` implemented by megatron-core's optimizer. updated: the parameters that it writes."""

    def __init__(self, optimizer: Any, parallel: Parallel, updated: Sequence[Tensor]):
        self._optimizer, self._parallel, self._updated = optimizer, parallel, updated
        self._each = [each for each in optimizer.chained_optimizers if not each.is_stub_optimizer]
        self._scaler = next((each.grad_scaler for each in self._each if getattr(each, "grad_scaler", None)), None)

    def counts_here(self, weight: torch.nn.Parameter) -> bool:
        """Whether the weight's gradient counts on this rank, as in the optimizer: weights split over tensor-parallel
        ranks count on each of them, all others on the first; replicas count on the first rank.
        """
        split = getattr(weight, "tensor_model_parallel", False)
        return not getattr(weight, "shared", False) and (split or self._parallel.tp_rank == 0)

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
        copied = self._updated if self._scaler is not None else []
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
