"""Causal attention of a chunk to keys and values that lie in a block for each chunk (`kv_blocks`).

Attention on one block is merged into that on all, and in the backward gives the block's share of the gradients, as in
ring attention (`tiles.py`). Those of earlier blocks are added to their sums in the store; to those of the chunk's own
block comes what later chunks have summed up, which leaves the store. Blocks are looked up again in the backward, so the
graph keeps the query, the output and the log-sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from helixpipe.model.attention.kv_blocks import Block, UnitBlocks
from helixpipe.model.attention.latent_attention import Expansion
from helixpipe.model.attention.log_sums import choose_kernel
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
from helixpipe.model.documents import Documents


class BlockAttention(NamedTuple):
    """All that a unit's attention depends on in one layer."""

    unit: UnitBlocks
    layer: int
    documents: Documents | None
    scale: float
    left: int | None = None
    """Tokens before its own that a token sees; None: all of its document."""
    expansion: Expansion | None = None
    """How keys and values are made of what blocks have, which are latents then."""
    sinks: Tensor | None = None
    """Logits [heads] beside those of the keys; None: there are none."""

    def work(self, first: int, length: int) -> tuple[Tile, ...]:
        """Return what of the chunk's attention reads the block of so many rows from `first` on."""
        unit, starts = self.unit, document_starts(self.documents)
        own = range(unit.offset, unit.offset + unit.length)
        return tiles(Rows((own,)), Rows((range(first, first + length),)), first == unit.offset, starts, self.left)

    def part(self, block: Block) -> KeyValue:
        """The keys and values that attention reads."""
        if self.expansion is None:
            return KeyValue(block.key, block.value)
        return self.expansion.expanded(block.key, block.value)

    def padded(self, tensor: Tensor) -> Tensor:
        """A tensor [..., d] of heads, as wide as kernels want it."""
        return tensor if self.expansion is None else self.expansion.pad(tensor)


def block_attention(query: Tensor, key: Tensor, value: Tensor, attention: BlockAttention) -> Tensor:
    """[n, b, heads, d] query and [n, b, groups, d] key and value of a chunk to [n, b, heads * d]. The key and value are
    kept in the store if they are not there yet."""
    attention.unit.keep(attention.layer, key, value)
    weight = None if attention.expansion is None else attention.expansion.weight
    output: Tensor = _BlockAttentionFunction.apply(query, key, value, weight, attention.sinks, attention)
    return output


class _BlockAttentionFunction(torch.autograd.Function):
    """weight: of the expansion; None where blocks are of keys and values. sinks: as of `BlockAttention`."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weight: Tensor | None,
        sinks: Tensor | None,
        attention: BlockAttention,
    ) -> Tensor:
        wide, kernel = attention.padded(query), None
        output, log_sum = merged_nothing(wide, sinks)
        for block in attention.unit.blocks(attention.layer):
            part = attention.part(block)
            kernel = kernel or choose_kernel(wide, part.key)
            for tile in attention.work(block.first, block.key.size(0)):
                merge(kernel, attention.scale, tile, wide, part, output, log_sum)
        values = query.size(-1) if attention.expansion is None else attention.expansion.values
        attended = output[..., :values].to(query.dtype).flatten(2)
        ctx.save_for_backward(query, attended, log_sum, sinks)
        ctx.attention, ctx.kernel = attention, kernel
        return attended

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, attended, log_sum, sinks = ctx.saved_tensors
        attention, of_weight = ctx.attention, None
        unit, layer, expansion = attention.unit, attention.layer, attention.expansion
        own_shape = (*query.shape[:3], -1)
        merged = Merged(
            attention.padded(query),
            attention.padded(attended.reshape(own_shape)),
            attention.padded(gradients[0].reshape(own_shape)),
            log_sum,
        )
        total = torch.zeros_like(merged.query, dtype=log_sum.dtype)
        *before, own = unit.blocks(layer)
        later = unit.store.take_gradients(unit.microbatch, layer, unit.offset)
        own_sums = (torch.zeros_like(own.key), torch.zeros_like(own.value)) if later is None else later
        for block in (*before, own):
            pair = own_sums if block is own else unit.store.gradients(unit.microbatch, layer, block.first)
            part = attention.part(block)
            target = KeyValue(*pair) if expansion is None else KeyValue(*map(torch.zeros_like, part))
            for tile in attention.work(block.first, block.key.size(0)):
                add_gradients(ctx.kernel, attention.scale, tile, merged, part, total, target)
            if expansion is not None:
                of_shared, of_latent, share = expansion.gradients(block.value, target)
                pair[0].add_(of_shared)
                pair[1].add_(of_latent)
                of_weight = share if of_weight is None else of_weight.add_(share)
        of_query = total[..., : query.size(-1)].to(query.dtype)
        of_key, of_value = (each.to(query.dtype) for each in own_sums)
        return of_query, of_key, of_value, of_weight, gradient_of_sinks(sinks, merged), None
