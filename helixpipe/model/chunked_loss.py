"""Output layer and cross entropy over slices of the sequence, so that logits are those of one slice.

The logits of a long sequence are the largest tensor of the last rank: with their float32 probabilities 6 bytes a token
and row of the vocabulary. Here the forward of a training step keeps the output layer's input and computes nothing. The
backward goes through the slices: logits, loss, and at once the gradients of input and weight, before the next slice. So
there is no matrix product more than without slices, nothing waits between the two but the input, and since the
backward is where the loss's own gradient is known, gradients are scaled in float32 as without slices. Liger's kernel
and its like do the same in the forward, from which every such gradient has to be kept, and which a step that is begun
before its weights are confirmed runs twice.

What that asks for: the value of the loss is there once the backward has run; until then it is NaN. Where no backward
comes (evaluation, a segment that is recomputed) the forward computes it, slice by slice as well.

The weight's gradient is computed with the slice, in I where I and W are apart: W would have to make the logits again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from helixpipe.model.ends import Targets, loss_sum, token_losses
from helixpipe.model.linear import add_weight_gradient
from helixpipe.model.slices import Slices


class ChunkedLoss:
    """The loss of a head, over slices. weight: [vocabulary / tp, h], the output layer's or, tied, the embedding's.
    fused: as in `add_weight_gradient`."""

    def __init__(self, slices: Slices, weight: torch.nn.Parameter, fused: bool):
        self.slices, self.weight, self._fused = slices, weight, fused

    def sum(self, hidden: Tensor, targets: Targets) -> Tensor:
        """Sum of the token losses times their weights, a scalar of the weights' type: NaN until its backward has run,
        if it has one. hidden: the normed hidden states [s, b, h], with sequence parallelism [s / tp, b, h]."""
        if torch.is_grad_enabled() and hidden.requires_grad:
            loss: Tensor = _Loss.apply(hidden, self, targets)
            return loss
        whole, total = self.slices.gathered(hidden), hidden.new_zeros((), dtype=targets.weights.dtype)
        for rows in self.slices.rows(whole.size(0)):
            total += loss_sum(torch.matmul(whole[rows], self.weight.t()), targets.of(rows))
        return total

    def backward_slice(self, tokens: Tensor, targets: Targets, root: Tensor, input_gradient: Tensor) -> Tensor:
        """A slice's loss sum. Adds to the weight's gradient, and writes this rank's share of the input's, which may be
        where the slice itself is. root: the gradient of the loss sum."""
        with torch.enable_grad():
            logits = torch.matmul(tokens.detach().requires_grad_(), self.weight.detach().t())
            losses, edge = token_losses(logits, targets), get_gradient_edge(logits)
        del logits  # the loss has a copy in float32
        (gradient,) = torch.autograd.grad(losses, (edge,), targets.weights * root)
        add_weight_gradient(self.weight, tokens, gradient, self._fused)
        torch.mm(gradient.flatten(0, 1), self.weight, out=input_gradient.flatten(0, 1))
        return torch.sum(losses.detach() * targets.weights)


class _Loss(torch.autograd.Function):
    """The sum over all slices. The weight's gradient is added to its sum directly, slice by slice."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: ChunkedLoss, targets: Targets) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.loss, ctx.targets = loss, targets
        ctx.value = hidden.new_full((), torch.nan, dtype=targets.weights.dtype)
        return ctx.value.detach()  # the same memory; the tensor itself would hold the graph that holds it

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,), loss, targets, (root,) = ctx.saved_tensors, ctx.loss, ctx.targets, gradients
        slices, value = loss.slices, ctx.value.zero_()
        whole = slices.gathered(hidden)
        # A slice of the gathered input is not needed once its gradient is there, which takes its place.
        input_gradient = whole if slices.sequence_parallel else torch.empty_like(whole)
        for rows in slices.rows(whole.size(0)):
            value += loss.backward_slice(whole[rows], targets.of(rows), root, input_gradient[rows])
        return slices.summed(input_gradient), None, None
