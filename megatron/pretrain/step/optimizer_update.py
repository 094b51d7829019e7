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


def is_shared_out(weight: torch.nn.Parameter) -> bool:
    """Whether it is an expert's, of which expert-parallel ranks have others."""
    return not getattr(weight, "allreduce", True)


class OptimizerUpdate:
    """`Updatable` implemented by megatron-core's optimizer. updated: the parameters that it writes."""

    def __init__(self, optimizer: Any, parallel: Parallel, updated: Sequence[Tensor]):
        self._optimizer, self._parallel, self._updated = optimizer, parallel, updated
        self._each = [each for each in optimizer.chained_optimizers if not each.is_stub_optimizer]
        self._scalers = [each.grad_scaler for each in self._each if getattr(each, "grad_scaler", None)]

    def counts_here(self, weight: torch.nn.Parameter) -> bool:
        """Whether the weight's gradient counts on this rank, as in the optimizer: weights split over tensor-parallel
        ranks count on each of them, all others on the first; replicas count on the first rank.
        """
        split = getattr(weight, "tensor_model_parallel", False)
        rank = self._parallel.expert_tp_rank if is_shared_out(weight) else self._parallel.tp_rank
        return not getattr(weight, "shared", False) and (split or rank == 0)

    def step(self) -> tuple[bool, float | None, float | None]:
        updated, norm, num_zeros = self._optimizer.step() if len(self._scalers) < 2 else self._step_with_scalers()
        return updated, norm, num_zeros

    @torch.no_grad()
    def _step_with_scalers(self) -> tuple[bool, float | None, float | None]:
        """megatron-core gives the optimizer of experts a loss scale of its own, which its step would adjust by the
        overflows of experts alone: here all scales follow every overflow, and stay alike."""
        overflow = self.prepare()
        dist.all_reduce(overflow)
        self.settle_loss_scale(bool(overflow))
        if overflow:
            return False, None, None
        norm, config = self._optimizer.get_grad_norm(), self._optimizer.config
        if config.clip_grad > 0:
            self.clip(config.clip_grad, norm)
        num_zeros = self._optimizer.count_zeros() if config.log_num_zeros_in_grad else None
        self.update()
        return True, norm, num_zeros

    def prepare(self) -> Tensor:
        overflow = torch.zeros(1, dtype=torch.float32, device=self._parallel.device)
        with redirect():
            for each in self._each:
                if not self._scalers:
                    each.prepare_grads()
                else:  # its prepare_grads would ask all ranks for overflows
                    each._copy_model_grads_to_main_grads()
                    gradients = each._collect_main_grad_data_for_unscaling()
                    torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, self._scalers[0].inv_scale)
        return overflow

    def square_norm(self) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._parallel.device)
        for each in self._each:
            if gradients := each.get_main_grads_for_grad_norm():
                # Of ranks that hold the same gradients all but one have to be left out, or all to count for a part.
                group = each.get_grad_stats_parallel_group()
                norms = torch.stack(torch._foreach_norm(gradients))
                total += norms.double().square().sum() * dist.get_world_size(group) / dist.get_world_size()
        return total

    def keep(self) -> KeptState:
        # An overflow is not followed by another update, which would write the model's weights anew.
        copied = self._updated if self._scalers else []
        return KeptState([each.optimizer for each in self._each], copied)

    def update(self) -> None:
        with redirect():
            self._optimizer.step_with_ready_grads()

    def clip(self, largest: float, norm: float) -> None:
        with redirect():
            for each in self._each:
                clip_grad_by_total_norm_fp32(each.get_parameters(), largest, norm)

    def settle_loss_scale(self, overflow: bool) -> None:
        for scaler in self._scalers:
            scaler.update(overflow)


class KeptState:
    """A copy of the state that an update changes: the weights, `copied` among them, and the optimizers' state."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], copied: Sequence[Tensor]):
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._states: list[tuple[torch.optim.Optimizer, Tensor, dict[str, Any]]] = []
        weights = {id(weight): weight for weight in copied}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                self._groups.append((group, {key: _copy(value) for key, value in group.items() if key != "params"}))
                for weight in group["params"]:
                    weights[id(weight)] = weight
                    state = {key: _copy(value) for key, value in optimizer.state.get(weight, {}).items()}
                    self._states.append((optimizer, weight, state))
        self._weights = [(weight, weight.detach().clone()) for weight in weights.values()]

    def restore(self) -> None:
        for group, values in self._groups:
            group.update(values)
        for weight, value in self._weights:
            weight.detach().copy_(value)
        for optimizer, weight, state in self._states:
            if state:
                optimizer.state[weight] = state
            else:
                optimizer.state.pop(weight, None)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
