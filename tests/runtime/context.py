"""Sums for test_equality.py over context-parallel ranks: each has the loss and gradients of its rows."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from torch import Tensor


def over_context(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums by name, which are the same on all ranks of the group."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return values
    group = parallel_state.get_context_parallel_group()
    summed = {name: value.clone() for name, value in values.items()}
    for name in sorted(summed):
        torch.distributed.all_reduce(summed[name], group=group)
    return summed


def losses_over_context(losses: dict[int, float]) -> dict[int, float]:
    summed = over_context({str(index): torch.tensor(value, dtype=torch.float64) for index, value in losses.items()})
    return {int(name): value.item() for name, value in summed.items()}
