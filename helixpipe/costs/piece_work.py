"""Counts the work of a piece: FLOPs, bytes of device memory moved, bytes between tensor-parallel ranks.

Figures are those of one tensor-parallel rank and one chunk; the rules are in `piece_kinds`.
"""

from __future__ import annotations

from helixpipe.costs.models import Chunk, Layout, ModelShape
from helixpipe.costs.piece_kinds import KINDS
from helixpipe.costs.sizes import ChunkSizes, Kernel, OpKernels


def work(model: ModelShape, layout: Layout, piece: str, op: str, chunk: Chunk, alone: bool = False) -> list[Kernel]:
    """The kernels of one piece for an op of kind F, I, W, B or R (as F) on one chunk of a microbatch. alone: whether no
    backward follows an F."""
    sizes, found = ChunkSizes(model, layout, chunk), list[Kernel]()
    for part in {"B": "IW", "R": "F"}.get(op, op):
        kernels = OpKernels(sizes, part, alone)
        KINDS[piece].work(kernels)
        found += kernels.list
    return found


def flops(model: ModelShape, layout: Layout, piece: str, op: str, chunk: Chunk) -> float:
    """Floating-point operations, as executed, of one piece on one tensor-parallel rank."""
    return sum(kernel.flops for kernel in work(model, layout, piece, op, chunk))


def model_flops(model: ModelShape, layout: Layout, piece: str, chunk: Chunk) -> float:
    """Those that the mathematics needs, forward and backward: what utilization (MFU) counts. Causal attention counts
    the half of the square that is computed; recomputation, flash attention's too, does not count."""
    return 3 * sum(kernel.flops for kernel in work(model, layout, piece, "F", chunk, alone=True))
