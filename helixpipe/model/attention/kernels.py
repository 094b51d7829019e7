"""The kernels of core attention behind one signature: what `CoreAttention` calls, and how each library wants it.

A chunk of a sequence attends to all keys before it and causally to its own: of the n x (c + n) scores those are wanted
that lie below the diagonal which ends in the lower right corner. flash-attn and torch's GPU kernels know that shape.
The CPU's knows only the square and the full rectangle, so it runs once on each, and the two results are merged
(`_ChunkAttention`). Grouped queries are not expanded to one key per head where the kernel can do without.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, CausalVariant

from helixpipe.common.errors import UserError
from helixpipe.model import backends
from helixpipe.model.attention.log_sums import FlashOnCPU, has_cpu_kernel
from helixpipe.model.attention.tiled_attention import attend_in_tiles, attend_with_dropout

Attend = Callable[[Tensor, Tensor, Tensor, float, float], Tensor]
"""(query [n, b, heads, d], key and value [c + n, b, groups, d], scale, dropout) to [n, b, heads * d]: causal attention
of the last n of c + n tokens; c = 0 for a whole sequence."""

_SDPA: Mapping[str, SDPBackend] = MappingProxyType(
    {
        backends.TORCH_FLASH: SDPBackend.FLASH_ATTENTION,
        backends.TORCH_CUDNN: SDPBackend.CUDNN_ATTENTION,
        backends.TORCH_EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
        backends.TORCH_MATH: SDPBackend.MATH,
    }
)


def make_attend(
    kernel: str,
    config: TransformerConfig,
    layer: int = 0,
    tp_group: torch.distributed.ProcessGroup | None = None,
    left: int | None = None,
) -> Attend:
    """The function of a kernel that `backends.choose` named. layer: its index; tp_group: of the ranks that share it;
    left: tokens before its own that a token sees, None: all."""
    if kernel == backends.FLASH_ATTN:
        return _flash_attn(config.deterministic_mode, left)
    if kernel == backends.FLASH_ATTN_3:
        return _flash_attn_3(left)
    if kernel == backends.ENGINE:
        return _transformer_engine(config, layer, tp_group)
    if left is not None:
        return _to_window(left)
    return _attend_on_cpu if kernel == backends.TORCH_CPU else _sdpa(_SDPA[kernel])


# ----------------------------------------------------------------------------------------------------------- libraries


def window_argument(left: int | None) -> dict[str, tuple[int, int]]:
    """The argument of flash-attn's functions for a window."""
    return {} if left is None else {"window_size": (left, 0)}


def _flash_attn(deterministic: bool, left: int | None) -> Attend:
    """flash-attn 2, whose causal mask ends in the lower right corner; [b, n, heads, d] with any strides."""
    flash_attn_func = backends.load(backends.FLASH_ATTN, "flash_attn").flash_attn_func
    window = window_argument(left)

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        output: Tensor = flash_attn_func(
            query,
            key,
            value,
            dropout_p=dropout,
            softmax_scale=scale,
            causal=True,
            deterministic=deterministic,
            **window,
        )
        return output.flatten(2).transpose(0, 1).contiguous()

    return attend


def _flash_attn_3(left: int | None) -> Attend:
    """flash-attn 3, as 2 but without dropout; its older versions return the log-sums as well."""
    flash_attn_func = backends.load(backends.FLASH_ATTN_3, "flash_attn_interface").flash_attn_func
    window = window_argument(left)

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        result: Any = flash_attn_func(query, key, value, softmax_scale=scale, causal=True, **window)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output.flatten(2).transpose(0, 1).contiguous()

    return attend


_ENGINE_ENVIRONMENT: Mapping[AttnBackend, Mapping[str, str]] = MappingProxyType(
    {
        AttnBackend.auto: {"NVTE_FLASH_ATTN": "1", "NVTE_FUSED_ATTN": "1", "NVTE_UNFUSED_ATTN": "1"},
        AttnBackend.fused: {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "1", "NVTE_UNFUSED_ATTN": "0"},
    }
)
"""How Transformer Engine is told what it may choose from; megatron-core sets the same."""


def _transformer_engine(
    config: TransformerConfig, layer: int, tp_group: torch.distributed.ProcessGroup | None
) -> Attend:
    """megatron-core's wrapper of Transformer Engine's attention, for whole sequences without dropout. It has no
    weights, and stays out of the model's modules for the state it would add to checkpoints.

    Raises UserError when the environment asks it for another kernel than --attention-backend.
    """
    for name, value in _ENGINE_ENVIRONMENT[config.attention_backend].items():
        if os.environ.setdefault(name, value) != value:
            raise UserError(
                f"{name}={os.environ[name]} in the environment contradicts --attention-backend "
                f"{config.attention_backend.name}, which means {name}={value}; unset it."
            )
    engine = backends.load_engine().TEDotProductAttention(
        config,
        layer_number=layer + 1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        softmax_scale=config.softmax_scale,
        pg_collection=ProcessGroupCollection(
            tp=tp_group, cp=parallel_state.get_context_parallel_group(check_initialized=False)
        ),
    )

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
        output: Tensor = engine(query, key, value, None, AttnMaskType.causal)
        return output

    return attend


# --------------------------------------------------------------------------------------------------------------- torch


def _to_window(left: int) -> Attend:
    """Block by block, with torch's kernels that give log-sums; with dropout torch makes all scores."""

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
        if dropout:
            return attend_with_dropout(query, key, value, left, scale, dropout)
        return attend_in_tiles(query, key, value, left, scale)

    return attend


class LowerRight(CausalBias):
    """Causal mask whose diagonal ends in the lower right corner: two lengths, without memory.

    torch's `causal_lower_right` takes its arguments for a shape as well, and allocates 8 n (c + n) bytes on the host.
    """

    def __new__(cls, *lengths: int) -> LowerRight:
        mask: LowerRight = torch.Tensor._make_subclass(cls, torch.empty(0))
        return mask

    def __init__(self, queries: int, keys: int):
        super().__init__(CausalVariant.LOWER_RIGHT, queries, keys)


def _attend_as_torch_does(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
    """torch's scaled dot product attention, by whichever of its kernels it chooses."""
    query, key, value = query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)
    whole = query.size(2) == key.size(2)
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if whole else LowerRight(query.size(2), key.size(2)),
        dropout_p=dropout,
        is_causal=whole,
        scale=scale,
        enable_gqa=query.size(1) != key.size(1),
    )
    return output.permute(2, 0, 1, 3).flatten(2)


def _sdpa(backend: SDPBackend) -> Attend:
    """The same, pinned to one of its kernels."""
    # The memory-efficient kernel's entry for chunks takes no grouped queries.
    expands = backend == SDPBackend.EFFICIENT_ATTENTION

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
        if expands and query.size(2) != key.size(2):
            key, value = (tensor.repeat_interleave(query.size(2) // key.size(2), dim=2) for tensor in (key, value))
        with sdpa_kernel(backend):
            return _attend_as_torch_does(query, key, value, scale, dropout)

    return attend


def _attend_on_cpu(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
    """torch's flash kernel for the CPU, in two calls for a chunk; with dropout torch makes the scores and the mask."""
    if query.size(0) == key.size(0) or not has_cpu_kernel(query, key, value, dropout):
        return _attend_as_torch_does(query, key, value, scale, dropout)
    output: Tensor = _ChunkAttention.apply(*(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)), scale)
    return output.permute(2, 0, 1, 3).flatten(2)


def cpu_forward(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of the last n of c + n tokens of a document on the CPU, without a mask, and its log-sums [b, heads, n].

    [b, heads, n, d] query, [b, groups, c + n, d] keys and values. The kernel runs on the first c keys, all of which
    every query sees, and causally on the last n. Each result is a mean of values weighted by softmax over its part of
    the keys; with the logarithm of its sum of exponentials it is merged into that over all keys.
    """
    results = []
    for rows, causal in _parts(query, keys):
        results.append(FlashOnCPU().forward(query, keys[:, :, rows], values[:, :, rows], causal, scale))
    if len(results) == 1:
        output, log_sum = results[0]
        return output, log_sum
    (before, log_sum_before), (own, log_sum_own) = results
    share = torch.sigmoid(log_sum_own - log_sum_before)[..., None]
    output = torch.lerp(before.to(share.dtype), own.to(share.dtype), share).to(query.dtype)
    return output, torch.logaddexp(log_sum_before, log_sum_own)


def cpu_backward(
    gradient: Tensor, query: Tensor, keys: Tensor, values: Tensor, output: Tensor, log_sum: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, keys and values of `cpu_forward`: given the merged output and log-sum, the kernel's backward
    on each part of the keys gives the part's share."""
    query_gradient = None
    key_gradients, value_gradients = [], []
    for rows, causal in _parts(query, keys):
        seen = keys[:, :, rows], values[:, :, rows]
        part = FlashOnCPU().backward(gradient, query, *seen, output, log_sum, causal, scale)
        query_gradient = part[0] if query_gradient is None else query_gradient.add_(part[0])
        key_gradients.append(part[1])
        value_gradients.append(part[2])
    assert query_gradient is not None
    if len(key_gradients) == 1:
        return query_gradient, key_gradients[0], value_gradients[0]
    return query_gradient, torch.cat(key_gradients, dim=2), torch.cat(value_gradients, dim=2)


def _parts(query: Tensor, keys: Tensor) -> list[tuple[slice, bool]]:
    """Of the keys: those before the queries' tokens, where there are any, and those of these tokens, causally."""
    earlier = keys.size(2) - query.size(2)
    own = (slice(earlier, None), True)
    return [(slice(earlier), False), own] if earlier else [own]


class _ChunkAttention(torch.autograd.Function):
    """`cpu_forward` of a chunk in one document: c and n are both positive."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        output, log_sum = cpu_forward(query, keys, values, scale)
        ctx.save_for_backward(query, keys, values, output, log_sum)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, output, log_sum = ctx.saved_tensors
        return *cpu_backward(gradients[0], query, keys, values, output, log_sum, ctx.scale), None
