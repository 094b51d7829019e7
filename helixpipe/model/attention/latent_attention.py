"""Causal attention whose keys and values are made of latents: multi-latent attention (DeepSeek-AI, DeepSeek-V2, 2024).

What crosses cuts, and what chunks keep of earlier tokens, is of each token one latent [1, rank] in place of every
head's value and one rotated key [1, rope channels], which all heads share. A linear layer makes of a latent every
head's own key and value; a head's key is its own and the shared one side by side. They are made in each chunk's
attention, of all tokens that it sees, and again in its backward, so that no graph keeps them (DeepSeek-V3, 2024,
section 3.2.3, recomputes them as well).

torch's kernels that give log-sums run it, over tiles as in `tiled_attention.py`. They want queries, keys and values
of one width, so the narrower are padded with zeros. With attention dropout other kernels run, and graphs keep what is
made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.transformer import MLATransformerConfig
from torch import Tensor

from helixpipe.model.attention.core_attention import CoreAttention
from helixpipe.model.attention.log_sums import choose_kernel
from helixpipe.model.attention.tiled_attention import tiles_of
from helixpipe.model.attention.tiles import (
    KeyValue,
    Merged,
    Tile,
    add_gradients,
    gradient_of_sinks,
    merge,
    merged_nothing,
)
from helixpipe.model.documents import Spans


class Expansion(NamedTuple):
    """How keys and values are made. weight: [heads * (own + values), rank], head by head, a key's own channels first.
    own, shared, values: channels of a head's key that are its own, of that which all share, and of its value."""

    weight: torch.nn.Parameter
    own: int
    shared: int
    values: int

    @property
    def width(self) -> int:
        """Channels that queries, keys and values are padded to."""
        return max(self.own + self.shared, self.values)

    def pad(self, tensor: Tensor) -> Tensor:
        """[..., d] to [..., width]."""
        missing = self.width - tensor.size(-1)
        return F.pad(tensor, (0, missing)) if missing else tensor

    def expanded(self, key: Tensor, latent: Tensor) -> KeyValue:
        """[m, b, 1, shared] keys and [m, b, 1, rank] latents to every head's, each [m, b, heads, width]."""
        heads = F.linear(latent.squeeze(2), self.weight).unflatten(-1, (-1, self.own + self.values))
        own, value = heads.split([self.own, self.values], dim=-1)
        whole = torch.cat((own, key.expand(*own.shape[:-1], -1)), dim=-1)
        return KeyValue(self.pad(whole), self.pad(value))

    def gradients(self, latent: Tensor, every: KeyValue) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of key, latent and weight, from the latents and the gradients of what was made of them."""
        own, shared, _ = every.key.split([self.own, self.shared, self.width - self.own - self.shared], dim=-1)
        heads = torch.cat((own, every.value[..., : self.values]), dim=-1).flatten(2).to(self.weight.dtype)
        of_weight = heads.flatten(0, 1).t().matmul(latent.flatten(0, 2))
        of_key = shared.sum(dim=2, keepdim=True).to(self.weight.dtype)
        return of_key, heads.matmul(self.weight)[:, :, None], of_weight


class LatentAttention(torch.nn.Module):
    """Core attention of one layer. expansion: gives that of the layer, whose weight is none of this module's.
    with_dropout: core attention with dropout; None: there is none."""

    left: int | None = None

    def __init__(
        self,
        config: MLATransformerConfig,
        expansion: Callable[[], Expansion],
        with_dropout: CoreAttention | None = None,
    ):
        super().__init__()
        self.expansion = expansion
        self.scale = softmax_scale(config)
        self.with_dropout = with_dropout
        if with_dropout is not None:
            with_dropout.scale = self.scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        latent: Tensor,
        training: bool,
        chunked: bool = False,
        spans: Spans | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """[n, b, heads, d] query, [c + n, b, 1, shared] key and [c + n, b, 1, rank] latent to
        [n, b, heads * values]; see `CoreAttention.forward`."""
        expansion = self.expansion()
        if training and self.with_dropout is not None:
            every = expansion.expanded(key, latent)
            wide = self.with_dropout(expansion.pad(query), *every, training, chunked=chunked, spans=spans, sinks=sinks)
            values: Tensor = wide.unflatten(-1, (-1, expansion.width))[..., : expansion.values].flatten(2)
            return values
        work = _Tiled(tiles_of(query.size(0), key.size(0), self.left, spans), self.scale, expansion)
        output: Tensor = _LatentAttentionFunction.apply(query, key, latent, expansion.weight, sinks, work)
        return output


def softmax_scale(config: MLATransformerConfig) -> float:
    """What scores are multiplied by, as in megatron-core: with YaRN they grow with the extension of the context."""
    growth = 1.0
    if config.rotary_scaling_factor > 1:
        growth += 0.1 * config.mscale_all_dim * math.log(config.rotary_scaling_factor)
    return growth * growth / math.sqrt(config.qk_head_dim + config.qk_pos_emb_head_dim)


class _Tiled(NamedTuple):
    tiles: tuple[Tile, ...]
    scale: float
    expansion: Expansion


class _LatentAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        latent: Tensor,
        weight: torch.nn.Parameter,
        sinks: Tensor | None,
        work: _Tiled,
    ) -> Tensor:
        expansion = work.expansion
        wide, every = expansion.pad(query), expansion.expanded(key, latent)
        output, log_sum = merged_nothing(wide, sinks)
        kernel = choose_kernel(wide, every.key)
        for tile in work.tiles:
            merge(kernel, work.scale, tile, wide, every, output, log_sum)
        attended = output[..., : expansion.values].to(query.dtype).flatten(2)
        ctx.save_for_backward(query, key, latent, attended, log_sum, sinks)
        ctx.work, ctx.kernel = work, kernel
        return attended

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, latent, attended, log_sum, sinks = ctx.saved_tensors
        work, expansion = ctx.work, ctx.work.expansion
        shape = (*query.shape[:3], expansion.values)
        output, gradient = (expansion.pad(tensor.reshape(shape)) for tensor in (attended, gradients[0]))
        merged = Merged(expansion.pad(query), output, gradient, log_sum)
        every = expansion.expanded(key, latent)
        total = torch.zeros_like(merged.query, dtype=log_sum.dtype)
        sums = KeyValue(*(torch.zeros_like(tensor, dtype=log_sum.dtype) for tensor in every))
        for tile in work.tiles:
            add_gradients(ctx.kernel, work.scale, tile, merged, every, total, sums)
        del every
        own = total[..., : query.size(-1)].to(query.dtype)
        return own, *expansion.gradients(latent, sums), gradient_of_sinks(sinks, merged), None
