"""Core attention (the `attn` piece) and rotary position embedding.

megatron-core's own unfused attention keeps the s x s scores in memory; here they never exist: flash-attn when it is
installed and the tensors are half precision on CUDA, else torch's scaled dot product attention, which has fused kernels
for the CPU too. Grouped queries are not expanded to one key per head where the kernel can do without.

A chunk of a sequence attends to all keys before it and causally to its own: of the n x (c + n) scores those are wanted
that lie below the diagonal which ends in the lower right corner. GPU kernels know that shape. The CPU's knows only the
square and the full rectangle, so it runs once on each, and the two results are merged (`_ChunkAttention`). Where no
fused kernel can be had, as for dropout on the CPU, torch makes the scores and the mask.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right

from helixpipe.model.options import GPTOptions
from helixpipe.runtime.device import device

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CoreAttention(torch.nn.Module):
    """Causal attention of a sequence, or of its last tokens; no weights, so a module only to carry its settings."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self._dropout = config.attention_dropout
        assert config.kv_channels is not None  # TransformerConfig fills it in
        self._scale = config.softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        half = config.params_dtype in (torch.float16, torch.bfloat16)
        self._flash = half and device().type == "cuda" and find_spec("flash_attn") is not None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, training: bool) -> Tensor:
        """[n, b, heads, d] query and [c + n, b, groups, d] key and value to [n, b, heads * d].

        The queries are those of the last n of the c + n tokens; c = 0 for a whole sequence.
        """
        dropout = self._dropout if training else 0.0
        if self._flash:
            from flash_attn import flash_attn_func

            query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
            output = flash_attn_func(query, key, value, dropout_p=dropout, softmax_scale=self._scale, causal=True)
            return output.flatten(2).transpose(0, 1).contiguous()
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        whole = query.size(2) == key.size(2)
        if not whole and _has_cpu_kernel(query, key, value, dropout):
            output = _ChunkAttention.apply(query, key, value, self._scale)
        else:
            output = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=None if whole else causal_lower_right(query.size(2), key.size(2)),
                dropout_p=dropout,
                is_causal=whole,
                scale=self._scale,
                enable_gqa=query.size(1) != key.size(1),
            )
        return output.permute(2, 0, 1, 3).flatten(2)


def _has_cpu_kernel(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether torch's fused kernel for the CPU can do this: not with dropout, nor grouped queries in older versions."""
    if query.device.type != "cpu":
        return False
    gqa = query.size(1) != key.size(1)
    choice = torch._fused_sdp_choice(query, key, value, None, dropout, False, enable_gqa=gqa)
    return choice == SDPBackend.FLASH_ATTENTION.value


class _ChunkAttention(torch.autograd.Function):
    """Attention of the last n of c + n tokens on the CPU, without a mask: c and n are both positive.

    [b, heads, n, d] query, [b, groups, c + n, d] keys and values. The kernel runs on the first c keys, all of which
    every query sees, and causally on the last n. Each result is a mean of values weighted by softmax over its part of
    the keys; with the logarithm of its sum of exponentials it is merged into that over all keys. Given the merged
    output and log-sum, the kernel's backward on each part gives the part's share of the gradients.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        earlier = keys.size(2) - query.size(2)
        results = []
        for rows, causal in ((slice(earlier), False), (slice(earlier, None), True)):
            results.append(_kernel(query, keys[:, :, rows], values[:, :, rows], 0.0, causal, scale=scale))
        (before, log_sum_before), (own, log_sum_own) = results
        share = torch.sigmoid(log_sum_own - log_sum_before)[..., None]
        output = torch.lerp(before.to(share.dtype), own.to(share.dtype), share).to(query.dtype)
        ctx.save_for_backward(query, keys, values, output, torch.logaddexp(log_sum_before, log_sum_own))
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, output, log_sum = ctx.saved_tensors
        earlier = keys.size(2) - query.size(2)
        query_gradient = None
        key_gradient, value_gradient = torch.empty_like(keys), torch.empty_like(values)
        for rows, causal in ((slice(earlier), False), (slice(earlier, None), True)):
            part = _kernel_backward(
                gradients[0], query, keys[:, :, rows], values[:, :, rows], output, log_sum, 0.0, causal, scale=ctx.scale
            )
            query_gradient = part[0] if query_gradient is None else query_gradient.add_(part[0])
            key_gradient[:, :, rows], value_gradient[:, :, rows] = part[1], part[2]
        return query_gradient, key_gradient, value_gradient, None


class Rotary:
    """RoPE at any offset in the sequence, from one table of cosines and sines that grows when it must."""

    def __init__(self, config: TransformerConfig, gpt: GPTOptions):
        self._embedding = RotaryEmbedding(
            kv_channels=config.kv_channels,
            rotary_percent=gpt.rotary_percent,
            rotary_base=gpt.rotary_base,
            use_cpu_initialization=True,  # a few numbers, moved to the device with the first table
        )
        self._length = gpt.max_sequence_length
        self._table: tuple[Tensor, Tensor] | None = None

    def table(self, offset: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions offset to offset + length - 1, each [length, 1, 1, rotated channels / 2]."""
        if self._table is None or offset + length > self._length or self._table[0].dtype != dtype:
            self._length = max(self._length, offset + length)
            self._embedding.inv_freq = self._embedding.inv_freq.to(device())
            frequencies = self._embedding.get_freqs_non_repeated(self._length)[:, None, None, :]
            self._table = frequencies.cos().to(dtype), frequencies.sin().to(dtype)
        cosine, sine = self._table
        return cosine[offset : offset + length], sine[offset : offset + length]

    def rotate(self, tensor: Tensor, offset: int) -> Tensor:
        """Rotate [s, b, heads, d] whose tokens begin at `offset`; channels of the first half pair with the second's."""
        cosine, sine = self.table(offset, tensor.size(0), tensor.dtype)
        half = cosine.size(-1)
        first, second, rest = tensor.split([half, half, tensor.size(-1) - 2 * half], dim=-1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine, rest), dim=-1)
