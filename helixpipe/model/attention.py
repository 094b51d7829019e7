"""Core attention (the `attn` piece) and rotary position embedding.

megatron-core's own unfused attention keeps the s x s scores in memory; here they exist only where someone asks for them
(`--attention-backend unfused`) or no fused kernel can be had, as for dropout on the CPU. Which kernel runs is decided
in `backends.py`, how it is called in `attention_kernels.py`.
"""

from __future__ import annotations

import math

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from helixpipe.model.attention_kernels import make_attend
from helixpipe.model.backends import Kernels, Machine, choose
from helixpipe.model.device import device
from helixpipe.model.options import GPTOptions


class CoreAttention(torch.nn.Module):
    """Causal attention of a sequence, or of its last tokens; no weights, so a module only to carry its kernels.

    kernels: which to run on; None: those for this machine. layer: index of the layer; tp_group: of the ranks that share
    its heads.
    """

    def __init__(
        self,
        config: TransformerConfig,
        kernels: Kernels | None = None,
        layer: int = 0,
        tp_group: torch.distributed.ProcessGroup | None = None,
    ):
        super().__init__()
        kernels = kernels if kernels is not None else choose(config, Machine.here())
        self._dropout = config.attention_dropout
        assert config.kv_channels is not None  # TransformerConfig fills it in
        self._scale = config.softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self._whole = make_attend(kernels.attention, config, layer, tp_group)
        self._chunk = make_attend(kernels.chunk_attention, config, layer, tp_group)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, training: bool, chunked: bool = False) -> Tensor:
        """[n, b, heads, d] query and [c + n, b, groups, d] key and value to [n, b, heads * d].

        The queries are those of the last n of the c + n tokens; c = 0 for a whole sequence. chunked: the sequence runs
        chunk by chunk, also where this is its first one.
        """
        attend = self._chunk if chunked or query.size(0) != key.size(0) else self._whole
        return attend(query, key, value, self._scale, self._dropout if training else 0.0)


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
