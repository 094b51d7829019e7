"""The gate of attention's output: each channel of a head times the sigmoid of one that the QKV layer gives (Qiu et al.,
"Gated Attention for Large Language Models", 2025; megatron-core's `attention_output_gate`).

A gate travels beside its query, in twice the channels, so that whatever a query crosses or waits for it does as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def gated(attention: Tensor, gate: Tensor) -> Tensor:
    """[n, b, heads * d] attention and its [n, b, heads, d] gate to the product, [n, b, heads * d]. The graph keeps
    both, and the sigmoid is computed again in the backward, in float32 at least."""
    output: Tensor = _Gated.apply(attention, gate)
    return output


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, attention: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(attention, gate)
        return (attention * _opening(gate).flatten(2)).to(attention.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        attention, gate = ctx.saved_tensors
        share = _opening(gate)
        of_gate = (gradients[0] * attention).unflatten(2, gate.shape[2:]) * share * (1 - share)
        return (gradients[0] * share.flatten(2)).to(attention.dtype), of_gate.to(gate.dtype)


def _opening(gate: Tensor) -> Tensor:
    """Which share goes through."""
    return torch.sigmoid(gate.to(torch.promote_types(gate.dtype, torch.float32)))
