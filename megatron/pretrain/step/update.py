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

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from helixpipe.runtime.weights import WeightStore


@dataclass(frozen=True)
class UpdateResult:
    """The outcome of an update.

    confirmed: the weights did not have to be corrected. updated: False after an overflow, which leaves the weights
    unchanged. num_zeros: None unless requested. sums: over all ranks, of the numbers that were sent along.
    """

    confirmed: bool
    updated: bool
    grad_norm: float | None
    num_zeros: float | None
    sums: Tensor


class Kept(Protocol):
    """Weights and the optimizer's state as they were."""

    def restore(self) -> None: ...


class Updatable(Protocol):
    """The operations of weights that an update calls once their gradients are complete."""

    def step(self) -> tuple[bool, float | None, float | None]:
        """Clip by the norm over all ranks and change the weights. Collective. Returns whether it did (not after an
        overflow), the norm, and the zeros in gradients where they are asked for."""
        ...

    def prepare(self) -> Tensor:
        """Take gradients to where the optimizer looks for them, without the loss scale. Returns a float32 tensor of
        one element, above 0 where a gradient overflowed here."""
        ...

    def square_norm(self) -> Tensor:
        """Return this rank's share of the squared norm of the prepared gradients: in the sum over all ranks of the job,
        each weight counts once.
        """
        ...

    def keep(self) -> Kept:
        """Return a copy of the state that `update` changes."""
        ...

    def update(self) -> None:
        """Change the weights by the prepared gradients. Waits for no rank but those with shards of the same weights."""
        ...

    def clip(self, largest: float, norm: float) -> None:
        """Scale the prepared gradients, whose norm over all ranks this is, down to the largest."""
        ...

    def settle_loss_scale(self, overflow: bool) -> None:
        """Adjust the loss scale, once a step. overflow: whether any rank's gradients overflowed."""
        ...


class TrainedWeights(WeightStore, Updatable, Protocol):
    """The operations of weights that the training program calls."""


class ImmediateUpdate:
    """The norm first, then the weights."""

    def __init__(self, weights: Updatable):
        self._weights = weights

    def start(self, numbers: Tensor) -> None:
        """Change the weights, and sum `numbers` (one dimension, float64) over all ranks. Collective."""
        dist.all_reduce(numbers)
        updated, norm, num_zeros = self._weights.step()
        self._outcome = UpdateResult(True, updated, norm, num_zeros, numbers)

    def finish(self) -> UpdateResult:
        return self._outcome


class UnconfirmedUpdate:
    """An update before the norm is known, which `finish` puts right. One is under way at a time.

    largest: norm that is not clipped; 0: any. Gradients must stay in their buffers until `finish`.
    """

    def __init__(self, weights: Updatable, largest: float):
        self._weights = weights
        self._largest = largest
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    @torch.no_grad()
    def start(self, numbers: Tensor) -> None:
        """Change the weights, and start to sum `numbers` (one dimension, float64) over all ranks. Does not wait for
        other ranks, but for those with shards of the same weights."""
        overflow = self._weights.prepare()
        square = self._weights.square_norm()
        self._sums = torch.cat([square.to(numbers).reshape(1), overflow.to(numbers).reshape(1), numbers])
        self._work = dist.all_reduce(self._sums, async_op=True)
        if self._stream is not None:  # where the host can look at them without waiting for the opening's forwards
            with torch.cuda.stream(self._stream):
                self._work.wait()
                self._on_host = torch.empty_like(self._sums, device="cpu", pin_memory=True)
                self._on_host.copy_(self._sums, non_blocking=True)
        self._before = self._weights.keep()
        self._weights.update()

    @torch.no_grad()
    def finish(self) -> UpdateResult:
        """Wait for the sums, and put the weights right where the update was wrong. All ranks get the same outcome."""
        if self._stream is not None:
            self._stream.synchronize()
            self._sums = self._on_host
        else:
            self._work.wait()
        square, overflows, *_ = self._sums.tolist()
        norm, overflow = square**0.5, overflows > 0
        self._weights.settle_loss_scale(overflow)
        wrong = overflow or 0 < self._largest < norm + 1e-6  # as megatron-core decides to clip
        if wrong:
            self._before.restore()
            if not overflow:
                self._weights.clip(self._largest, norm)
                self._weights.update()
        del self._before
        return UpdateResult(not wrong, not overflow, None if overflow else norm, None, self._sums[2:])
