"""Memory of the host for what left the device: a block, page-locked where a device copies from it, given out in parts.

Each new piece of page-locked memory stops the device, and torch's own comes in powers of two. So a block is taken once,
as large as it has to be, and parts of it are given out here. A step asks for the same parts in the same order as the
one before, so the layout is the same in every step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ALIGNMENT = 512
"""Bytes; as the allocators of devices align."""


def pageable(nbytes: int) -> Tensor:
    """Memory of the host, [bytes] of uint8."""
    return torch.empty(nbytes, dtype=torch.uint8)


class HostAllocation:
    """Memory that was given out: `tensor`, [bytes] of uint8."""

    def __init__(self, block: int, offset: int, size: int, tensor: Tensor):
        self.block, self.offset, self.size, self.tensor = block, offset, size, tensor


class HostArena:
    """Blocks of the host's memory.

    capacity: bytes of the first block, taken when the first part is asked for; what is beyond it makes another, of
    half that size or what is needed. make_block: of so many bytes, [bytes] of uint8. `reserved`: bytes of all blocks;
    `used`, `peak`: given out now, and the most.
    """

    def __init__(self, capacity: int = 0, make_block: Callable[[int], Tensor] | None = None):
        self._capacity, self._make_block = capacity, make_block or pageable
        self._blocks: list[Tensor] = []
        self._gaps: list[list[tuple[int, int]]] = []  # of each block (offset, end) of what is free, by offset
        self.reserved = self.used = self.peak = 0

    def take(self, nbytes: int) -> HostAllocation:
        """Take the first gap that is large enough."""
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        while True:
            for block, gaps in enumerate(self._gaps):
                for place, (offset, end) in enumerate(gaps):
                    if end - offset >= size:
                        gaps[place : place + 1] = [(offset + size, end)] if offset + size < end else []
                        self.used += size
                        self.peak = max(self.peak, self.used)
                        return HostAllocation(block, offset, size, self._blocks[block][offset : offset + nbytes])
            self._grow(size)

    def give_back(self, part: HostAllocation) -> None:
        gaps = self._gaps[part.block]
        gaps.append((part.offset, part.offset + part.size))
        gaps.sort()
        joined = gaps[:1]
        for offset, end in gaps[1:]:
            if offset == joined[-1][1]:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((offset, end))
        gaps[:] = joined
        self.used -= part.size

    def _grow(self, least: int) -> None:
        size = max(least, self._capacity if not self._blocks else max(self._capacity, self.reserved) // 2)
        size = -(-size // ALIGNMENT) * ALIGNMENT
        self._blocks.append(self._make_block(size))
        self._gaps.append([(0, size)])
        self.reserved += size
