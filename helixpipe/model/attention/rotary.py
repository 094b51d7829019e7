"""Rotary position embedding (RoPE, Su et al., 2021), at any offset in a sequence and by places in documents.

Queries and keys are rotated on their way out of the QKV layer's output, into memory of their own, and values are copied
out beside them; so that output, which would be as large again, goes as soon as they are there. The gradients of all
three are rotated back into one tensor, that output's gradient. Each way is one autograd function, which keeps no tensor
that is not kept anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from torch import Tensor

from helixpipe.model.attention.context_parallel import select
from helixpipe.model.backends import ENGINE, TORCH, load_engine
from helixpipe.model.device import device
from helixpipe.model.documents import Documents
from helixpipe.model.options import GPTOptions
from helixpipe.model.rope_scaling import frequencies

FUSED_SPAN = 2**31
"""Transformer Engine's kernel counts elements in 32 bits: what spans as many is rotated in plain torch."""


class Rotation(NamedTuple):
    """How the tokens of a tensor turn. cosines, sines: [positions, 1, 1, 1, *pairs], sines with the sign with which a
    channel takes in the one that it pairs with. axis: along which of `pairs` the two of a pair lie: -1 for neighbours,
    -2 for channels of the two halves. places: [s, b], positions of tokens; None: those of the tables, one after
    another."""

    cosines: Tensor
    sines: Tensor
    axis: int
    places: Tensor | None = None

    def turned(self, source: Tensor, back: bool = False) -> Tensor:
        """[s, b, groups, heads of a group, channels], rotated, in memory of its own."""
        cosines, sines = self._tables()
        pairs = self._pairs(source)
        taken = pairs.flip(self.axis).mul_(sines)
        turned = pairs * cosines
        turned = (turned.sub_(taken) if back else turned.add_(taken)).flatten(-2)
        rotated = turned.size(-1)
        return turned if rotated == source.size(-1) else torch.cat((turned, source[..., rotated:]), -1)

    def turn_back(self, gradient: Tensor) -> None:
        """The same of a gradient, back, in its own memory."""
        cosines, sines = self._tables()
        pairs = self._pairs(gradient)
        taken = pairs.flip(self.axis).mul_(sines)
        pairs.mul_(cosines).sub_(taken)

    def _tables(self) -> tuple[Tensor, Tensor]:
        """Those of the tensor's tokens, looked up anew each time, so that nothing but the places is kept."""
        if self.places is None:
            return self.cosines, self.sines
        return self.cosines[:, 0][self.places], self.sines[:, 0][self.places]

    def _pairs(self, tensor: Tensor) -> Tensor:
        """The channels that turn, [..., *pairs]: the first ones."""
        first, second = self.cosines.shape[-2:]
        if first * second < tensor.size(-1):
            tensor = tensor[..., : first * second]
        return tensor.view(*tensor.shape[:-1], first, second)


class Rotary:
    """RoPE from one table of angles, or of cosines and sines, that grows when it must.

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
        self._axis = -1 if config.rotary_interleaved or config.multi_latent_attention else -2
        self._length = gpt.max_sequence_length
        self._table: tuple[Tensor, Tensor] | None = None
        self._angles: Tensor | None = None
        self._last: tuple[tuple[tuple[range, ...], torch.dtype], Rotation] | None = None
        fused = kernel == ENGINE and self._axis == -2 and self._scale == 1
        self._fused = load_engine().fused_apply_rotary_pos_emb if fused else None

    def constants(self) -> Iterator[Tensor]:
        """Tables that are kept."""
        yield from self._table or ()
        if self._angles is not None:
            yield self._angles

    def heads(
        self,
        mixed: Tensor,
        groups: int,
        channels: int,
        runs: tuple[range, ...],
        documents: Documents | None = None,
        gated: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the QKV layer gives, [s, b, groups * (queries of a group + 2) * channels], as query [s, b, heads,
        channels], key and value [s, b, groups, channels], each with memory of its own; query and key are rotated, as
        these runs of a microbatch's tokens, by positions in documents where there are several. gated: behind the
        queries of a group lie as many gates, each of which comes beside its query, in 2 * channels, unrotated."""
        if documents is None and not gated and self._fused is not None and mixed.numel() < FUSED_SPAN:
            grouped = mixed.unflatten(-1, (groups, -1, channels))
            query, key, value = grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :]
            return self.rotate(query, runs), self.rotate(key, runs), value.contiguous()
        result: tuple[Tensor, Tensor, Tensor] = _Heads.apply(
            mixed, self._rotation(runs, documents, mixed.dtype), groups, channels, gated
        )
        return result

    def rotate(self, tensor: Tensor, runs: tuple[range, ...], documents: Documents | None = None) -> Tensor:
        """Rotate [s, b, heads, channels] that are these runs of a microbatch's tokens, likewise."""
        if documents is None and self._fused is not None and tensor.size(0) * tensor.stride(0) < FUSED_SPAN:
            parts = tensor.split([len(run) for run in runs]) if len(runs) > 1 else (tensor,)
            turned = [self._fused(part, self._angles_of(run)) for part, run in zip(parts, runs, strict=True)]
            return turned[0] if len(turned) == 1 else torch.cat(turned)
        rotated: Tensor = _Rotated.apply(tensor, self._rotation(runs, documents, tensor.dtype))
        return rotated

    def _rotation(self, runs: tuple[range, ...], documents: Documents | None, dtype: torch.dtype) -> Rotation:
        """That of a chunk, which is the same in all layers."""
        if documents is not None:
            table = self._tables(documents.longest, dtype)
            return Rotation(*table, self._axis, select(documents.positions(), runs, 0))
        asked = runs, dtype
        if self._last is None or self._last[0] != asked:
            table = self._tables(max(run.stop for run in runs), dtype)
            cosines, sines = (select(each, runs, 0) for each in table)
            self._last = asked, Rotation(cosines, sines, self._axis)
        return self._last[1]

    def _tables(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines, as `Rotation` has them, of the first positions, `length` of them at least."""
        if self._table is None or length > self._length or self._table[0].dtype != dtype:
            self._length = max(self._length, length)
            angles = self._first_angles(self._length).unsqueeze(1)
            cosine, sine = (angles.cos() * self._scale).to(dtype), (angles.sin() * self._scale).to(dtype)
            self._table = torch.stack((cosine, cosine), self._axis), torch.stack((-sine, sine), self._axis)
        return self._table

    def _angles_of(self, run: range) -> Tensor:
        """Of a run of positions, float32 [length, 1, 1, rotated channels], both halves alike."""
        if self._angles is None or run.stop > self._angles.size(0):
            angles = self._first_angles(max(self._length, run.stop))
            self._angles = torch.cat((angles, angles), dim=-1)
        return self._angles[run.start : run.stop]

    def _first_angles(self, length: int) -> Tensor:
        """Of positions 0 to length - 1, float32 [length, 1, 1, rotated channels / 2]."""
        self._frequencies = self._frequencies.to(device())
        positions = torch.arange(length, dtype=torch.float32, device=self._frequencies.device)
        return torch.outer(positions, self._frequencies)[:, None, None, :]


class _Heads(torch.autograd.Function):
    """`Rotary.heads` in plain torch."""

    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, rotation: Rotation, groups: int, channels: int, gated: bool
    ) -> tuple[Tensor, ...]:
        grouped = mixed.contiguous().view(*mixed.shape[:2], groups, -1, channels)
        own = (grouped.size(3) - 2) // (1 + gated)
        parts = [own] * (1 + gated) + [1, 1]
        ctx.parts = rotation, parts
        query, *gate, key, value = grouped.split_with_sizes(parts, 3)
        query, key = rotation.turned(query), rotation.turned(key)
        if gated:
            query = torch.cat((query, gate[0]), -1)
        return query.flatten(2, 3), key.squeeze(3), value.squeeze(3).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = gradients
        rotation, parts = ctx.parts
        *rows, channels = key.shape
        own = query.view(*rows, parts[0], -1)
        of_heads = own.split(channels, -1) if len(parts) > 3 else (own,)  # with the gates'
        gradient = torch.cat((*of_heads, key.unsqueeze(3), value.unsqueeze(3)), 3)
        into_query, *_, into_key, _ = gradient.split_with_sizes(parts, 3)
        rotation.turn_back(into_query)
        rotation.turn_back(into_key)
        return gradient.flatten(2), None, None, None, None


class _Rotated(torch.autograd.Function):
    """`Rotary.rotate` in plain torch."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rotation: Rotation, back: bool = False) -> Tensor:
        ctx.rotation = rotation
        return rotation.turned(tensor.unsqueeze(2), back).squeeze(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _Rotated.forward(ctx, gradients[0], ctx.rotation, back=True), None
