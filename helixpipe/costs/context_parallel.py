"""Computes the traffic between context-parallel ranks around core attention, and the memory that it costs them.

With cp ranks each has 1/cp of a chunk's rows outside core attention.

- `a2a`: an all-to-all for query, key and value and one for the output, in F as in the backward. A rank sends all of its
  rows but those of its own heads; packing and joining pass over them once each. In between it has heads / cp of all
  rows: as many elements as before, and of keys and values copies where there are fewer groups than ranks. These are
  tensors of their own, which attention keeps.
- `p2p`: cp - 1 messages with the keys and values so far of a rank, each behind the attention of a round, which is 1/cp
  of all; in the backward again, and the gradients with them, in cp messages. What is kept is what one rank would keep.
"""

from __future__ import annotations

from math import lcm

from helixpipe.costs.sizes import TO_HEADS, ChunkSizes, Kernel, OpKernels


def copies_of_groups(sizes: ChunkSizes) -> float:
    """How many times each key and value is held by the ranks that share out its heads."""
    if not sizes.layout.swaps:
        return 1
    groups = sizes.model.groups // sizes.tp
    return lcm(groups, sizes.cp) // groups


def keys_read(sizes: ChunkSizes) -> float:
    """Elements of keys, and as many of values, that a rank's attention reads."""
    seen = sizes.chunk.seen * sizes.layout.micro_batch_size * sizes.kv
    return seen * copies_of_groups(sizes) / sizes.cp if sizes.layout.swaps else seen


def saved_of_own_heads(sizes: ChunkSizes) -> dict[str, float]:
    """Return what attention keeps of a rank's own heads: no tensor of another piece, since rows were swapped for
    heads.
    """
    tensors = {
        "attention of own heads": sizes.bytes("attention"),
        "log-sum": sizes.tokens * sizes.model.heads / sizes.tp * 4,
        "q of own heads": sizes.bytes("attention"),
    }
    if not sizes.chunk.stored:
        tensors["k and v of own heads"] = 2 * sizes.bytes("key") * copies_of_groups(sizes)
    return tensors


def swap(kernels: OpKernels, where: str) -> None:
    """Rows for heads before core attention, or back after it; the mirror image in I."""
    sizes = kernels.sizes
    if not sizes.layout.swaps:
        return
    moved = swapped(sizes, where)
    packing = 2 * moved if kernels.op != "W" else 0.0
    kernels.move(packing)
    if kernels.stepped:
        kernels.end_step(where)
    elif kernels.op != "W":
        kernels.add("all-to-all", 0.0, sent(sizes, where))
    kernels.move(packing)


def swapped(sizes: ChunkSizes, where: str) -> float:
    """Bytes of a rank that are swapped, its own among them."""
    return sizes.bytes("attention") + (2 * sizes.bytes("key") * copies_of_groups(sizes) if where == TO_HEADS else 0.0)


def sent(sizes: ChunkSizes, where: str) -> float:
    """Those of them that go to other ranks."""
    return swapped(sizes, where) * (sizes.cp - 1) / sizes.cp


def ring(kernels: OpKernels, flops: float) -> None:
    """flops: of the attention itself. In steps its rounds are where its time is (`steps.py`)."""
    sizes = kernels.sizes
    if sizes.layout.rings and kernels.op != "W" and not kernels.stepped:
        messages = sizes.cp - 1 if kernels.op == "F" else 2 * sizes.cp - 1
        rounds = Kernel("attention", flops * (sizes.cp - 1) / sizes.cp, 0.0)
        kernels.add("ring", 0.0, messages * block(sizes), behind=(rounds,))


def block(sizes: ChunkSizes) -> float:
    """Bytes of a rank's keys and values so far."""
    return 2 * sizes.chunk.seen / sizes.cp * sizes.layout.micro_batch_size * sizes.kv * sizes.element


def on_its_way(sizes: ChunkSizes) -> float:
    """Bytes beside what attention itself needs: what is packed and what comes; of a ring the block at hand and the one
    that comes, and their gradients, found here and passed on."""
    if sizes.layout.swaps:
        return 2 * swapped(sizes, TO_HEADS)
    return 5 * block(sizes) if sizes.layout.rings else 0.0


def nearest_sizes(heads: int, size: int) -> str:
    """The context-parallel sizes next to `size` that can share so many heads."""
    valid = [each for each in range(1, heads + 1) if heads % each == 0]
    below = [each for each in valid if each < size][-1:]
    above = [each for each in valid if each > size][:1]
    return " and ".join(map(str, below + above))
