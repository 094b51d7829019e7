"""What rounds of ring attention ask kernels for: grouped queries, unequal lengths, windows, tensors in strides."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LogSumCase(NamedTuple):
    """queries of so many `heads` and keys of so many `groups`, and what `LogSumKernel` takes."""

    queries: int
    keys: int
    heads: int
    groups: int
    causal: bool
    reach: int | None = None
    channels: int = 64
    dtype: torch.dtype = torch.bfloat16

    @property
    def scale(self) -> float:
        return float(self.channels**-0.5)

    def tensors(self, device: str) -> list[Tensor]:
        """Query, key, value and the output's gradient, [b, heads, n, d], which lie as [n, b, heads, d], key and value
        one after the other in each row."""
        generator = torch.Generator().manual_seed(self.queries)

        def draw(rows: int, heads: int, channels: int) -> Tensor:
            return torch.randn((rows, 2, heads, channels), generator=generator).to(device, self.dtype)

        both = draw(self.keys, self.groups, 2 * self.channels)
        query, gradient = (draw(self.queries, self.heads, self.channels) for _ in range(2))
        return [each.permute(1, 2, 0, 3) for each in (query, *both.split(self.channels, dim=-1), gradient)]

    def shapes(self) -> list[list[int]]:
        """Of the output, the log-sums, and the gradients of query, key and value."""
        query = [2, self.heads, self.queries, self.channels]
        key = [2, self.groups, self.keys, self.channels]
        return [query, query[:-1], query, key, key]


CASES = (
    LogSumCase(128, 128, 8, 8, True),
    LogSumCase(129, 129, 8, 2, True),
    LogSumCase(64, 200, 8, 2, False),
    LogSumCase(37, 1, 8, 1, False),
    LogSumCase(1, 77, 8, 4, False, dtype=torch.float16),
    LogSumCase(96, 96, 8, 2, True, reach=10),
    LogSumCase(64, 130, 8, 2, False, reach=100),
    LogSumCase(65, 65, 4, 2, True, channels=128),
    LogSumCase(40, 80, 4, 4, False, channels=40),
)
