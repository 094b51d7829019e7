"""Memory in blocks that is given out in parts: of the host, for what left the device, page-locked where a device copies
from it; of the device, for what is received.

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


class Allocation:
    """Memory that was given out: `tensor`, [bytes] of uint8."""

    def __init__(self, block: int, offset: int, size: int, tensor: Tensor):
        self.block, self.offset, self.size, self.tensor = block, offset, size, tensor


class Arena:
    """Blocks of memory.

    capacity: bytes of the first block, taken when the first part is asked for. growth: what is beyond it makes another,
    of this share of what there is, or what is needed. make_block: of so many bytes, [bytes] of uint8. `reserved`: bytes
    of all blocks; `used`, `peak`: given out now, and the most.
    """

    def __init__(self, capacity: int = 0, make_block: Callable[[int], Tensor] | None = None, growth: float = 0.5):
        self._capacity, self._make_block, self._growth = capacity, make_block or pageable, growth
        self._blocks: list[Tensor] = []
        self._gaps: list[list[tuple[int, int]]] = []  # of each block (offset, end) of what is free, by offset
        self.reserved = self.used = self.peak = 0

    def take(self, nbytes: int) -> Allocation:
        """Take the first gap that is large enough."""
        size = _aligned(nbytes)
        while True:
            for block, gaps in enumerate(self._gaps):
                for place, (offset, end) in enumerate(gaps):
                    if end - offset >= size:
                        gaps[place : place + 1] = [(offset + size, end)] if offset + size < end else []
                        self.used += size
                        self.peak = max(self.peak, self.used)
                        return Allocation(block, offset, size, self._blocks[block][offset : offset + nbytes])
            self._grow(size if not self._blocks else max(size, int(max(self._capacity, self.reserved) * self._growth)))

    @property
    def first(self) -> int:
        """Bytes of the first block."""
        return self._blocks[0].numel() if self._blocks else 0

    def give_back(self, part: Allocation) -> None:
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

    def merge(self, nbytes: int) -> None:
        """Take one block of so many bytes in place of all, when nothing is given out."""
        assert self.used == 0, "parts of the blocks are still given out"
        self._blocks.clear()
        self._gaps.clear()
        self.reserved = 0
        self._grow(nbytes)

    def _grow(self, least: int) -> None:
        size = _aligned(least if self._blocks else max(least, self._capacity))
        self._blocks.append(self._make_block(size))
        self._gaps.append([(0, size)])
        self.reserved += size


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
