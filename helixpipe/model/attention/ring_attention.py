"""Causal attention over rows that context-parallel ranks share in zigzag: keys and values go round the ring.

In cp rounds each rank attends to every rank's keys and values, which it passes on to the next rank meanwhile, and
merges what it finds (`tiles.py`). Gradients of keys and values go round with them, and after the last round home.

While keys and values are on their way, and no tile is left to do, another unit may run: the forward yields, and the
backward lets a forward beside it take a step.

With a sequence in chunks every rank stores its own rows of the chunks before, and the ring passes them along as well.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from helixpipe.model.attention.context_parallel import ContextParallel
from helixpipe.model.attention.log_sums import LogSumKernel
from helixpipe.model.attention.tiles import (
    KeyValue,
    Merged,
    Rows,
    Tile,
    add_gradients,
    document_starts,
    gradient_of_sinks,
    merge,
    merged_nothing,
    tiles,
)
from helixpipe.model.collectives import ForwardBeside
from helixpipe.model.documents import Documents


def ring_rounds(
    context: ContextParallel, chunks: Sequence[int], end: int, documents: Documents | None, left: int | None = None
) -> tuple[tuple[Tile, ...], ...]:
    """Return what each round of a chunk has to do. chunks: first tokens of all chunks so far, the last of which ends at
    `end`; keys of which a rank's lie in that order. left: tokens before its own that a token sees; None: all."""
    starts = document_starts(documents)

    def rows(rank: int) -> Rows:
        edges = pairwise((*chunks, end))
        return Rows(tuple(run for first, last in edges for run in context.runs(first, last - first, rank)))

    queries = Rows(context.runs(chunks[-1], end - chunks[-1]))
    sources = [(context.rank - number) % context.size for number in range(context.size)]
    return tuple(tiles(queries, rows(source), source == context.rank, starts, left) for source in sources)


class Ring(NamedTuple):
    """All that a unit's ring attention depends on. rounds: the tiles of each round, the first with this rank's keys."""

    parallel: ContextParallel
    rounds: tuple[tuple[Tile, ...], ...]
    kernel: LogSumKernel
    scale: float


def ring_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    ring: Ring,
    beside: ForwardBeside | None = None,
    sinks: Tensor | None = None,
) -> Generator[None, None, Tensor]:
    """[n, b, heads, d] query and [m, b, groups, d] keys and values of this rank's rows to [n, b, heads * d]. sinks:
    logits [heads] beside those of the keys; None: there are none.

    Yields before each wait. Collective: ranks of the group run the same units in one order.
    """
    group, (output, log_sum) = ring.parallel.group, merged_nothing(query, sinks)
    assert group is not None
    own, block = query.detach(), [keys.detach(), values.detach()]
    for number, work in enumerate(ring.rounds):
        passing = _Passing(group, block) if number + 1 < len(ring.rounds) else None
        for tile in work:
            merge(ring.kernel, ring.scale, tile, own, KeyValue(*block), output, log_sum)
        if passing is not None:
            yield
            block = passing.wait()
    found = output.to(query.dtype).flatten(2)
    attention: Tensor = _RingAttention.apply(query, keys, values, sinks, found, log_sum, ring, beside)
    return attention


class _Passing:
    """Tensors on their way to the next rank, while as many of the same shapes come from the one before."""

    def __init__(self, group: dist.ProcessGroup, tensors: Sequence[Tensor]):
        rank, size = group.rank(), group.size()
        # gloo sends from the host's memory alone.
        self._device = tensors[0].device
        on_host = dist.get_backend(group) == "gloo" and self._device.type != "cpu"
        self._sent = [(tensor.cpu() if on_host else tensor).contiguous() for tensor in tensors]
        self._received = [torch.empty_like(tensor) for tensor in self._sent]
        ops = []
        for sent, received in zip(self._sent, self._received, strict=True):
            ops.append(dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % size))
            ops.append(dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size))
        self._works = dist.batch_isend_irecv(ops)

    def wait(self) -> list[Tensor]:
        """Wait for what comes, and return it."""
        for work in self._works:
            work.wait()
        return [tensor.to(self._device) for tensor in self._received]


class _RingAttention(torch.autograd.Function):
    """What the rounds have found, and in the backward the rounds of the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        sinks: Tensor | None,
        attention: Tensor,
        log_sum: Tensor,
        ring: Ring,
        beside: ForwardBeside | None,
    ) -> Tensor:
        ctx.save_for_backward(query, keys, values, attention, log_sum, sinks)
        ctx.ring, ctx.beside = ring, beside or ForwardBeside()
        return attention.view_as(attention)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, attention, log_sum, sinks = ctx.saved_tensors
        ring = ctx.ring
        merged = Merged(query, attention.reshape(query.shape), gradients[0].reshape(query.shape), log_sum)
        query_gradient = torch.zeros_like(query, dtype=log_sum.dtype)
        block, passed = [keys, values], None
        for number, work in enumerate(ring.rounds):
            passing = _Passing(ring.parallel.group, block) if number + 1 < len(ring.rounds) else None
            own = [torch.zeros_like(tensor) for tensor in block]
            for tile in work:
                add_gradients(ring.kernel, ring.scale, tile, merged, KeyValue(*block), query_gradient, KeyValue(*own))
            if passing is not None:
                ctx.beside.step()
                block = passing.wait()
            if passed is not None:
                own = [total.add_(share) for total, share in zip(passed.wait(), own, strict=True)]
            passed = _Passing(ring.parallel.group, own)
        assert passed is not None
        ctx.beside.step()
        key_gradient, value_gradient = passed.wait()
        of_sinks = gradient_of_sinks(sinks, merged)
        return query_gradient.to(query.dtype), key_gradient, value_gradient, of_sinks, None, None, None, None
