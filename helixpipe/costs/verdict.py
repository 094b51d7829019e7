"""Decides whether a step fits into a GPU, and estimates what torch's allocator reserves for it.

Every command asks this module, with bytes counted by the cost model. Both constants follow from published runs, see
docs/reproduction.md: of 324 cells these predict the most failures without a false one that is not understood.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from helixpipe.costs.hardware import GIB

FRAGMENTATION = 1.08
"""Bytes that torch's allocator takes from a GPU for each byte of tensors: blocks are rounded up and split, and the rest
of a block stays with it."""

CONTEXT = 1 * GIB
"""Bytes of a GPU that are not torch's: CUDA's context and NCCL's buffers."""

ROUNDING = 1e-9
"""Tolerance for rounding, as a fraction of the limit."""


def tensor_limit(gpu: float, limit: float | None = None) -> float:
    """Return the bytes of tensors that fit into a GPU.

    Args:
        gpu: bytes of the GPU's memory; infinite if unknown.
        limit: bytes of tensors that --memory-limit allows. It can only lower the result.
    """
    room = max(gpu - CONTEXT, 0.0) / FRAGMENTATION
    return room if limit is None else min(room, limit)


def gpu_for(allocated: float) -> float:
    """Return the bytes of the smallest GPU that so many bytes of tensors fit into."""
    return FRAGMENTATION * allocated + CONTEXT


@dataclass(frozen=True)
class MemoryVerdict:
    """The memory of a step on the GPU that needs most, and whether it fits.

    Attributes:
        allocated: bytes of tensors at the peak.
        cached: bytes of workspaces of other sizes, which the allocator keeps until it needs their memory.
        gpu: bytes of the GPU's memory; infinite if unknown.
        limit: bytes of tensors that may be allocated (`tensor_limit`).
        host: bytes of the host's memory that one GPU needs.
        host_limit: bytes of the host's memory for each GPU.
    """

    allocated: float
    cached: float
    gpu: float
    limit: float
    host: float = 0.0
    host_limit: float = math.inf

    @property
    def fits(self) -> bool:
        """Whether the step fits into the GPUs and their hosts."""
        return self.allocated <= self.limit * (1 + ROUNDING) and self.host <= self.host_limit * (1 + ROUNDING)

    @property
    def reserved(self) -> float:
        """Bytes that the allocator is estimated to reserve. It frees cached blocks before it fails, so they never add
        to what does not fit."""
        needed = FRAGMENTATION * self.allocated
        return max(needed, min(needed + self.cached, self.gpu - CONTEXT))

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        size = "" if math.isinf(self.gpu) else f" of {self.gpu / GIB:.4g}"
        figures = f"{self.allocated / GIB:.1f} GiB allocated, about {self.reserved / GIB:.1f} reserved{size}"
        if self.fits:
            return f"fits, with {max(self.limit - self.allocated, 0.0) / GIB:.1f} GiB to spare ({figures})"
        over = {"": self.allocated - self.limit, " of host memory": self.host - self.host_limit}
        missing = " and ".join(f"{amount / GIB:.1f} GiB{where}" for where, amount in over.items() if amount > 0)
        return f"does NOT fit: {missing} too much ({figures}; {self.limit / GIB:.1f} may be allocated)"
