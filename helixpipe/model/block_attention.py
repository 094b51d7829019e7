"""Causal attention of a chunk to keys and values that lie in a block for each chunk (`kv_blocks`).

As ring attention does with what comes round (`ring_attention`), a kernel's output on one block is merged into that of
all by the logarithms of sums of exponentials, and in the backward gives the block's share of the gradients. Those of
earlier blocks are added to their sums in the store; to those of the chunk's own block comes what later chunks have
summed up, which leaves the store. Blocks are looked up again in the backward, so the graph keeps the query, the output
and the log-sums.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from helixpipe.model.documents import Documents
from helixpipe.model.kv_blocks import Block, Pair, UnitBlocks
from helixpipe.model.log_sums import LogSumKernel, choose_kernel
from helixpipe.model.ring_attention import Rows, Tile, TileViews, merge, tiles


class BlockAttention(NamedTuple):
    """What a unit's attention depends on in one layer."""

    unit: UnitBlocks
    layer: int
    documents: Documents | None
    scale: float

    def work(self, first: int, length: int) -> tuple[Tile, ...]:
        """What of the chunk's attention reads the block of so many rows from `first` on."""
        starts = None
        if self.documents is not None:
            starts = [tuple(accumulate(each[:-1], initial=0)) for each in self.documents.lengths]
        unit = self.unit
        own = range(unit.offset, unit.offset + unit.length)
        return tiles(Rows((own,)), Rows((range(first, first + length),)), first == unit.offset, starts)


def block_attention(query: Tensor, key: Tensor, value: Tensor, attention: BlockAttention) -> Tensor:
    """[n, b, heads, d] query and [n, b, groups, d] key and value of a chunk to [n, b, heads * d]. The key and value are
    kept in the store if they are not there yet."""
    attention.unit.keep(attention.layer, key, value)
    output: Tensor = _BlockAttention.apply(query, key, value, attention)
    return output


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, attention: BlockAttention) -> Tensor:
        views = TileViews(query.shape)
        log_sum = torch.full(
            (query.size(1), query.size(2), query.size(0)),
            -torch.inf,
            dtype=torch.promote_types(query.dtype, torch.float32),
            device=query.device,
        )
        output = torch.zeros(query.shape, dtype=log_sum.dtype, device=query.device)
        kernel, scale = choose_kernel(query, key), attention.scale
        for first, keys, values in attention.unit.blocks(attention.layer):
            for tile in attention.work(first, keys.size(0)):
                q, k, v = views.queries(query, tile), views.keys(keys, tile), views.keys(values, tile)
                merge(views, tile, output, log_sum, *kernel.forward(q, k, v, tile.causal, scale))
        found = output.to(query.dtype).flatten(2)
        ctx.save_for_backward(query, found, log_sum)
        ctx.attention, ctx.kernel = attention, kernel
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, found, log_sum = ctx.saved_tensors
        attention, views = ctx.attention, TileViews(query.shape)
        unit, layer = attention.unit, attention.layer
        output, gradient = (tensor.reshape(query.shape) for tensor in (found, gradients[0]))
        total = torch.zeros_like(query, dtype=log_sum.dtype)
        *before, own = unit.blocks(layer)
        later = unit.store.take_gradients(unit.microbatch, layer, unit.offset)
        sums: Pair = (torch.zeros_like(own.key), torch.zeros_like(own.value)) if later is None else later
        for block in (*before, own):
            pair = sums if block is own else unit.store.gradients(unit.microbatch, layer, block.first)
            for tile in attention.work(block.first, block.key.size(0)):
                _add(ctx.kernel, attention.scale, views, tile, (query, output, gradient, log_sum), block, total, pair)
        return total.to(query.dtype), sums[0].to(query.dtype), sums[1].to(query.dtype), None


def _add(
    kernel: LogSumKernel,
    scale: float,
    views: TileViews,
    tile: Tile,
    of_queries: tuple[Tensor, Tensor, Tensor, Tensor],
    block: Block,
    total: Tensor,
    pair: Pair,
) -> None:
    """A tile's share of the gradients. of_queries: query, output, gradient of the output, log-sums."""
    query, output, gradient, log_sum = of_queries
    found = kernel.backward(
        views.queries(gradient, tile),
        views.queries(query, tile),
        views.keys(block.key, tile),
        views.keys(block.value, tile),
        views.queries(output, tile),
        views.sums(log_sum, tile).contiguous(),
        tile.causal,
        scale,
    )
    views.queries(total, tile).add_(found.query)
    views.keys(pair[0], tile).add_(found.key)
    views.keys(pair[1], tile).add_(found.value)
