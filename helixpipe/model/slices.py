"""Slices of a sequence that run one after another: where they lie, and what tensor-parallel ranks exchange for all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch.distributed as dist
from megatron.core.parallel_state import get_global_memory_buffer
from torch import Tensor

INPUT = "mpu"
"""Name of the buffer that inputs are gathered into: megatron-core's linear layers gather into it as well."""


class Slices:
    """Slices of `size` tokens; the last, and one of a shorter sequence, is what there is. Tokens are those of the whole
    chunk, also with sequence parallelism. Ranks exchange once for all slices, as where there are none."""

    def __init__(self, size: int, sequence_parallel: bool, tp_group: dist.ProcessGroup):
        self._size = size
        self.sequence_parallel = sequence_parallel
        self._group = tp_group

    def rows(self, tokens: int) -> Iterator[slice]:
        """Rows of each slice of a sequence."""
        for start in range(0, tokens, self._size):
            yield slice(start, start + self._size)

    def gathered(self, part: Tensor, name: str = INPUT) -> Tensor:
        """The whole sequence, in a buffer of that name if this rank holds a part of it."""
        if not self.sequence_parallel:
            return part
        whole = self.buffer((part.size(0) * self._group.size(), *part.shape[1:]), part, name)
        dist.all_gather_into_tensor(whole, part.contiguous(), group=self._group)
        return whole

    def summed(self, shares: Tensor) -> Tensor:
        """Sums over the tensor-parallel ranks: with sequence parallelism this rank's part, else in place."""
        if self.sequence_parallel:
            part = shares.new_empty((shares.size(0) // self._group.size(), *shares.shape[1:]))
            dist.reduce_scatter_tensor(part, shares, group=self._group)
            return part
        if self._group.size() > 1:
            dist.all_reduce(shares, group=self._group)
        return shares

    def buffer(self, shape: tuple[int, ...], like: Tensor, name: str) -> Tensor:
        """Memory that every layer uses in turn: megatron-core's."""
        return cast(Tensor, get_global_memory_buffer().get_tensor(shape, like.dtype, name))
