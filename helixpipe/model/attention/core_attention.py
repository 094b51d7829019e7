"""Core attention (the `attn` piece) and rotary position embedding.

megatron-core's own unfused attention keeps the s x s scores in memory; here they exist only where someone asks for them
(`--attention-backend unfused`) or no fused kernel can be had, as for dropout on the CPU. Which kernel runs is decided
in `backends.py`, how it is called in `kernels.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from torch import Tensor

from helixpipe.model.attention.context_parallel import select
from helixpipe.model.attention.document_attention import make_attend_documents
from helixpipe.model.attention.kernels import make_attend
from helixpipe.model.backends import ENGINE, TORCH, Kernels, Machine, choose, load_engine
from helixpipe.model.device import device
from helixpipe.model.documents import Documents, Spans
from helixpipe.model.options import GPTOptions
from helixpipe.model.rope_scaling import frequencies


class CoreAttention(torch.nn.Module):
    """Causal attention of a sequence, or of its last tokens; no weights, so a module only to carry its kernels.

    kernels: which to run on; None: those for this machine. layer: index of the layer; tp_group: of the ranks that share
    its heads. left: tokens before its own that a token sees; None: all.
    """

    def __init__(
        self,
        config: TransformerConfig,
        kernels: Kernels | None = None,
        layer: int = 0,
        tp_group: torch.distributed.ProcessGroup | None = None,
        left: int | None = None,
    ):
        super().__init__()
        self.left = left
        kernels = kernels if kernels is not None else choose(config, Machine.here())
        self._dropout = config.attention_dropout
        assert config.kv_channels is not None  # TransformerConfig fills it in
        self.scale = config.softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self._whole = make_attend(kernels.attention, config, layer, tp_group, left)
        self._chunk = make_attend(kernels.chunk_attention, config, layer, tp_group, left)
        self._documents = make_attend_documents(kernels.chunk_attention, config, self._chunk, left)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        training: bool,
        chunked: bool = False,
        spans: Spans | None = None,
    ) -> Tensor:
        """[n, b, heads, d] query and [c + n, b, groups, d] key and value to [n, b, heads * d].

        The queries are those of the last n of the c + n tokens; c = 0 for a whole sequence. chunked: the sequence runs
        chunk by chunk, also where this is its first one. spans: the parts of documents that the chunk is made of; None:
        one document.
        """
        if spans is not None:
            dropout = self._dropout if training else 0.0
            return self._documents(query, key, value, spans, self.scale, dropout)
        attend = self._chunk if chunked or query.size(0) != key.size(0) else self._whole
        return attend(query, key, value, self.scale, self._dropout if training else 0.0)


FUSED_SPAN = 2**31
"""Transformer Engine's kernel counts elements in 32 bits: what spans as many is rotated in plain torch."""


class Rotary:
    """RoPE at any offset in the sequence, from one table of angles, or of cosines and sines, that grows when it must.

    kernel: `backends.ENGINE` for Transformer Engine's, else plain torch, which rounds cosines and sines to the type of
    what it rotates. Neighbouring channels as pairs, and rotations that change lengths, are plain torch's.
    """

    def __init__(self, config: TransformerConfig, gpt: GPTOptions, kernel: str = TORCH):
        channels = config.kv_channels
        if isinstance(config, MLATransformerConfig):
            channels = config.qk_pos_emb_head_dim
        assert channels is not None  # TransformerConfig fills it in
        channels = int(channels * gpt.rotary_percent)
        self._frequencies = frequencies(channels, gpt.rotary_base, gpt.rope_scaling)
        self._scale = gpt.rope_scaling.length
        self._neighbours = config.rotary_interleaved or config.multi_latent_attention
        self._length = gpt.max_sequence_length
        self._table: tuple[Tensor, Tensor] | None = None
        self._angles: Tensor | None = None
        fused = kernel == ENGINE and not self._neighbours and self._scale == 1
        self._fused = load_engine().fused_apply_rotary_pos_emb if fused else None

    def constants(self) -> Iterator[Tensor]:
        """Tables that are kept."""
        yield from self._table or ()
        if self._angles is not None:
            yield self._angles

    def table(self, offset: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions offset to offset + length - 1, each [length, 1, 1, rotated channels / 2]."""
        if self._table is None or offset + length > self._length or self._table[0].dtype != dtype:
            self._length = max(self._length, offset + length)
            angles = self._first_angles(self._length)
            self._table = (angles.cos() * self._scale).to(dtype), (angles.sin() * self._scale).to(dtype)
        cosine, sine = self._table
        return cosine[offset : offset + length], sine[offset : offset + length]

    def rotate(self, tensor: Tensor, runs: tuple[range, ...], documents: Documents | None = None) -> Tensor:
        """Rotate [s, b, heads, d] that are these runs of a microbatch's tokens; by positions in documents where there
        are several."""
        if documents is not None:
            tables = self.table(0, documents.longest, tensor.dtype)
            rotated: Tensor = _RotatedAt.apply(tensor, select(documents.positions(), runs, 0), tables, self._neighbours)
            return rotated
        parts = tensor.split([len(run) for run in runs]) if len(runs) > 1 else (tensor,)
        turned = [self.rotate_from(part, run.start) for part, run in zip(parts, runs, strict=True)]
        return turned[0] if len(turned) == 1 else torch.cat(turned)

    def angles(self, offset: int, length: int) -> Tensor:
        """Of positions offset to offset + length - 1, float32 [length, 1, 1, rotated channels], both halves alike."""
        if self._angles is None or offset + length > self._angles.size(0):
            angles = self._first_angles(max(self._length, offset + length))
            self._angles = torch.cat((angles, angles), dim=-1)
        return self._angles[offset : offset + length]

    def _first_angles(self, length: int) -> Tensor:
        """Of positions 0 to length - 1, float32 [length, 1, 1, rotated channels / 2]."""
        self._frequencies = self._frequencies.to(device())
        positions = torch.arange(length, dtype=torch.float32, device=self._frequencies.device)
        return torch.outer(positions, self._frequencies)[:, None, None, :]

    def rotate_from(self, tensor: Tensor, offset: int) -> Tensor:
        """Rotate [s, b, heads, d] whose tokens begin at `offset`; channels of the first half pair with the second's, or
        each with its neighbour."""
        if self._fused is not None and tensor.size(0) * tensor.stride(0) < FUSED_SPAN:
            rotated: Tensor = self._fused(tensor, self.angles(offset, tensor.size(0)))
            return rotated
        return _rotated(tensor, *self.table(offset, tensor.size(0), tensor.dtype), self._neighbours)


def _rotated(tensor: Tensor, cosine: Tensor, sine: Tensor, neighbours: bool) -> Tensor:
    half = cosine.size(-1)
    turned, rest = tensor.split([2 * half, tensor.size(-1) - 2 * half], dim=-1)
    if neighbours:
        first, second = turned.unflatten(-1, (half, 2)).unbind(-1)
        pairs = torch.stack((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
        return torch.cat((pairs.flatten(-2), rest), dim=-1)
    first, second = turned.split(half, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine, rest), dim=-1)


class _RotatedAt(torch.autograd.Function):
    """[s, b, heads, d] rotated by positions [s, b]. Cosines and sines are looked up again in the backward, which
    rotates back, so nothing but the positions is kept; these are the microbatch's."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, positions: Tensor, tables: tuple[Tensor, Tensor], neighbours: bool) -> Tensor:
        ctx.positions, ctx.tables, ctx.neighbours = positions, tables, neighbours
        cosine, sine = (table[:, 0][positions] for table in tables)
        return _rotated(tensor, cosine, sine, neighbours)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = (table[:, 0][ctx.positions] for table in ctx.tables)
        return _rotated(gradients[0], cosine, -sine, ctx.neighbours), None, None, None
