"""The end of a step: gradients change the weights, at once or before their norm over all ranks is known.

The norm by which gradients are clipped, and whether one of them overflowed, depend on every rank's last backward, and
the first forward of the next step depends on them: all ranks wait for the slowest. Schedules whose ranks end one after
another pay for that once a step (`zb2p`, `zbv`, `wzb2`). Post-validation does not wait (Qi et al., "Zero Bubble
Pipeline Parallelism", ICLR 2024, section 4). A rank updates its weights as if nothing had to be clipped, and goes on to
the opening of the next step, its forwards before any backward. Then the norm has come. If it is too large, or anything
overflowed, every rank puts its weights back, updates them as it should have, and runs the opening again. No gradient is
ever made from weights that are not right, so results are those of the other way, up to the rounding of the norm.

While the norm comes, the gradients stay in their buffers, and weights and optimizer's state of before are kept as well:
12 bytes a weight of the rank's share, beside the activations of the opening. After a step that was clipped the next one
is likely to be, and its norm is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from helixpipe.model.device import redirect


@dataclass(frozen=True)
class Outcome:
    """What came of a step's gradients.

    confirmed: the weights had not to be put right. updated: False after an overflow, which leaves the weights alone.
    num_zeros: None where it was not asked for. sums: over all ranks, of the numbers that went along.
    """

    confirmed: bool
    updated: bool
    grad_norm: float | None
    num_zeros: float | None
    sums: Tensor


class ImmediateUpdate:
    """megatron-core's own step: the norm first."""

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer

    def start(self, numbers: Tensor) -> None:
        """Change the weights, and sum `numbers` (one dimension, float64) over all ranks. Collective."""
        dist.all_reduce(numbers)
        updated, norm, num_zeros = self._optimizer.step()
        self._outcome = Outcome(True, updated, norm, num_zeros, numbers)

    def finish(self) -> Outcome:
        return self._outcome


class UnconfirmedUpdate:
    """An update before the norm is known, which `finish` puts right. One is under way at a time.

    clip: the largest norm; 0: any. Gradients must stay in their buffers until `finish`.
    """

    def __init__(self, optimizer: Any, model: torch.nn.Module, clip: float):
        self._optimizer = optimizer
        self._each = [each for each in optimizer.chained_optimizers if not each.is_stub_optimizer]
        self._scaler = next((each.grad_scaler for each in self._each if getattr(each, "grad_scaler", None)), None)
        # An overflow is not followed by another update, which would write them anew.
        self._copied = list(model.parameters()) if self._scaler is not None else []
        self._clip = clip
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    @torch.no_grad()
    def start(self, numbers: Tensor) -> None:
        """Change the weights, and start to sum `numbers` (one dimension, float64) over all ranks. Does not wait for
        other ranks, but for those with shards of the same weights."""
        overflow = self._prepare(numbers)
        # Of ranks that hold the same gradients all but one have to be left out, or all to count for a part.
        group = self._optimizer.get_grad_stats_parallel_group()
        square = self._square().to(numbers) * dist.get_world_size(group) / dist.get_world_size()
        self._sums = torch.cat([square.reshape(1), overflow.to(numbers).reshape(1), numbers])
        self._work = dist.all_reduce(self._sums, async_op=True)
        if self._stream is not None:  # where the host can look at them without waiting for the opening's forwards
            with torch.cuda.stream(self._stream):
                self._work.wait()
                self._on_host = torch.empty_like(self._sums, device="cpu", pin_memory=True)
                self._on_host.copy_(self._sums, non_blocking=True)
        self._before = _Kept([each.optimizer for each in self._each], self._copied)
        with redirect():
            self._optimizer.step_with_ready_grads()

    @torch.no_grad()
    def finish(self) -> Outcome:
        """Wait for the sums, and put the weights right where the update was wrong. All ranks get the same outcome."""
        if self._stream is not None:
            self._stream.synchronize()
            self._sums = self._on_host
        else:
            self._work.wait()
        square, overflows, *_ = self._sums.tolist()
        norm, overflow = square**0.5, overflows > 0
        if self._scaler is not None:
            self._scaler.update(overflow)
        wrong = overflow or 0 < self._clip < norm + 1e-6  # as megatron-core decides to clip
        if wrong:
            self._before.restore()
            if not overflow:
                self._update_clipped(norm)
        del self._before
        return Outcome(not wrong, not overflow, None if overflow else norm, None, self._sums[2:])

    def _prepare(self, numbers: Tensor) -> Tensor:
        """Gradients to where the optimizer looks for them, without the loss scale. Whether one overflowed here."""
        overflow = numbers.new_zeros(1, dtype=torch.float32)
        with redirect():
            for each in self._each:
                if self._scaler is None:
                    each.prepare_grads()
                else:  # its prepare_grads would ask all ranks for overflows
                    each._copy_model_grads_to_main_grads()
                    gradients = each._collect_main_grad_data_for_unscaling()
                    torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, self._scaler.inv_scale)
        return overflow

    def _square(self) -> Tensor:
        """Of this rank's share in the norm of all gradients."""
        gradients = [gradient for each in self._each for gradient in each.get_main_grads_for_grad_norm()]
        if not gradients:
            return torch.zeros(())
        norms = torch.stack(torch._foreach_norm(gradients))
        return norms.double().square().sum()

    def _update_clipped(self, norm: float) -> None:
        with redirect():
            for each in self._each:
                clip_grad_by_total_norm_fp32(each.get_parameters(), self._clip, norm)
            self._optimizer.step_with_ready_grads()


class _Kept:
    """What an update changes, as it was before: the weights, `copied` among them, and the optimizers' state."""

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
