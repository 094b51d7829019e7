"""Core attention (the `attn` piece) and rotary position embedding.

megatron-core's own unfused attention keeps the s x s scores in memory; here they never exist: flash-attn when it is
installed and the tensors are half precision on CUDA, else torch's scaled dot product attention, which has fused kernels
for the CPU too. Grouped queries are not expanded to one key per head where the kernel can do without.
"""

from __future__ import annotations

import math
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from helixpipe.model.options import GPTOptions
from helixpipe.runtime.device import device


class CoreAttention(torch.nn.Module):
    """Causal attention of a whole sequence with itself; no weights, so a module only to carry its settings."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self._dropout = config.attention_dropout
        assert config.kv_channels is not None  # TransformerConfig fills it in
        self._scale = config.softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        half = config.params_dtype in (torch.float16, torch.bfloat16)
        self._flash = half and device().type == "cuda" and find_spec("flash_attn") is not None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, training: bool) -> Tensor:
        """[s, b, heads, d] query and [s, b, groups, d] key and value to [s, b, heads * d]."""
        dropout = self._dropout if training else 0.0
        if self._flash:
            from flash_attn import flash_attn_func

            query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
            output = flash_attn_func(query, key, value, dropout_p=dropout, softmax_scale=self._scale, causal=True)
            return output.flatten(2).transpose(0, 1).contiguous()
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=dropout,
            is_causal=True,
            scale=self._scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return output.permute(2, 0, 1, 3).flatten(2)


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
