"""Causal attention within the documents of a chunk: what `CoreAttention` calls where a microbatch has several.

flash-attn has a kernel for parts of different lengths side by side, whose causal mask ends in the lower right corner of
each, and so has torch in its newer versions, without dropout; the others, and the CPU, run part by part.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from helixpipe.model import backends
from helixpipe.model.attention.kernels import Attend, cpu_backward, cpu_forward, window_argument
from helixpipe.model.attention.log_sums import has_cpu_kernel
from helixpipe.model.attention.tiled_attention import attend_in_tiles
from helixpipe.model.documents import Span, Spans

AttendDocuments = Callable[[Tensor, Tensor, Tensor, Spans, float, float], Tensor]
"""(query [n, b, heads, d], key and value [c + n, b, groups, d], parts of documents, scale, dropout) to
[n, b, heads * d]: the keys are those of the rows from `Spans.since` on."""

_Packed = Callable[[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, int, int], float, float], Tensor]
"""A library's kernel: [n, heads, d] query, [c + n, groups, d] key and value, (first rows of queries and of keys of each
part and the end, int32, and the most of both), scale, dropout."""


def make_attend_documents(
    kernel: str, config: TransformerConfig, attend: Attend, left: int | None = None
) -> AttendDocuments:
    """The function for a kernel that `backends.choose` named for chunks. attend: that kernel for one document. left:
    tokens before its own that a token sees; None: all."""
    if kernel == backends.FLASH_ATTN:
        return _by_sample(_flash_attn(config.deterministic_mode, left))
    if kernel == backends.FLASH_ATTN_3:
        return _by_sample(_flash_attn_3(left))
    if left is not None:
        return _to_window(left, attend)
    if kernel == backends.TORCH_FLASH and not config.attention_dropout and (packed := _torch_flash()) is not None:
        return _by_sample(packed)
    return _on_cpu(attend) if kernel == backends.TORCH_CPU else part_by_part(attend)


def _flash_attn(deterministic: bool, left: int | None) -> _Packed:
    library, window = backends.load(backends.FLASH_ATTN, "flash_attn"), window_argument(left)

    def packed(
        query: Tensor, key: Tensor, value: Tensor, ends: tuple[Tensor, Tensor, int, int], scale: float, dropout: float
    ) -> Tensor:
        output: Tensor = library.flash_attn_varlen_func(
            query,
            key,
            value,
            *ends,
            dropout_p=dropout,
            softmax_scale=scale,
            causal=True,
            deterministic=deterministic,
            **window,
        )
        return output

    return packed


def _flash_attn_3(left: int | None) -> _Packed:
    library, window = backends.load(backends.FLASH_ATTN_3, "flash_attn_interface"), window_argument(left)

    def packed(
        query: Tensor, key: Tensor, value: Tensor, ends: tuple[Tensor, Tensor, int, int], scale: float, dropout: float
    ) -> Tensor:
        first_queries, first_keys, most_queries, most_keys = ends
        result: Any = library.flash_attn_varlen_func(
            query,
            key,
            value,
            cu_seqlens_q=first_queries,
            cu_seqlens_k=first_keys,
            max_seqlen_q=most_queries,
            max_seqlen_k=most_keys,
            softmax_scale=scale,
            causal=True,
            **window,
        )
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output

    return packed


def _torch_flash() -> _Packed | None:
    """torch's; None where it has none that can be told to be causal so, as in older versions and without CUDA."""
    if not torch.cuda.is_available() or importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return None
    function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    if "window_size" not in inspect.signature(function).parameters:
        return None

    def packed(
        query: Tensor, key: Tensor, value: Tensor, ends: tuple[Tensor, Tensor, int, int], scale: float, dropout: float
    ) -> Tensor:
        if query.size(1) != key.size(1):
            key, value = (each.repeat_interleave(query.size(1) // each.size(1), dim=1) for each in (key, value))
        output: Tensor = function(query, key, value, *ends, scale=scale, window_size=(-1, 0))  # causal
        return output

    return packed


def _by_sample(packed: _Packed) -> AttendDocuments:
    """One call for each sample: parts lie without a gap there. The kernels leave gradients of keys that no part needs
    unwritten, as there would be between samples whose first documents begin in different rows."""

    def attend(query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float, dropout: float) -> Tensor:
        outputs = []
        for sample in range(query.size(1)):
            own, ends = slice(spans.of(sample)[0].key, None), spans.ends(sample, query.device)
            outputs.append(packed(query[:, sample], key[own, sample], value[own, sample], ends, scale, dropout))
        if len(outputs) == 1:
            return outputs[0].flatten(1)[:, None]
        return torch.stack([output.flatten(1) for output in outputs], dim=1)

    return attend


def _to_window(left: int, attend: Attend) -> AttendDocuments:
    one_by_one = part_by_part(attend)

    def attend_documents(
        query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float, dropout: float
    ) -> Tensor:
        if dropout:
            return one_by_one(query, key, value, spans, scale, dropout)
        return attend_in_tiles(query, key, value, left, scale, spans)

    return attend_documents


def part_by_part(attend: Attend) -> AttendDocuments:
    """Calls of a function for one document, one for each part."""

    def attend_documents(
        query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float, dropout: float
    ) -> Tensor:
        samples = []
        for sample in range(query.size(1)):
            own = slice(sample, sample + 1)
            outputs = []
            for part in spans.of(sample):
                keys = slice(part.key, part.key_end)
                queries = query[part.first : part.end, own]
                outputs.append(attend(queries, key[keys, own], value[keys, own], scale, dropout))
            samples.append(torch.cat(outputs))
        return torch.cat(samples, dim=1)

    return attend_documents


def _on_cpu(attend: Attend) -> AttendDocuments:
    one_by_one = part_by_part(attend)

    def attend_documents(
        query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float, dropout: float
    ) -> Tensor:
        if not has_cpu_kernel(query, key, value, dropout):
            return one_by_one(query, key, value, spans, scale, dropout)
        parts = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        output: Tensor = _DocumentAttention.apply(*parts, spans.parts, scale)
        return output.permute(2, 0, 1, 3).flatten(2)

    return attend_documents


class _DocumentAttention(torch.autograd.Function):
    """Part by part, with one output and one tensor of log-sums: it saves what the kernel of one document would.

    [b, heads, n, d] query, [b, groups, c + n, d] keys and values.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, values: Tensor, parts: tuple[Span, ...], scale: float) -> Tensor:
        samples, heads, rows, channels = query.shape
        output = query.new_empty((samples, rows, heads, channels)).transpose(1, 2)
        log_sums = query.new_empty(
            (samples, heads, rows), dtype=torch.float64 if query.dtype == torch.float64 else torch.float32
        )
        for part in parts:
            queries, own = _rows(part)
            output[queries], log_sums[queries] = cpu_forward(query[queries], keys[own], values[own], scale)
        ctx.save_for_backward(query, keys, values, output, log_sums)
        ctx.parts, ctx.scale = parts, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, output, log_sums = ctx.saved_tensors
        query_gradient = torch.empty_like(query)
        # Of keys before the first document of a sample there is none.
        key_gradient, value_gradient = torch.zeros_like(keys), torch.zeros_like(values)
        for part in ctx.parts:
            queries, own = _rows(part)
            query_gradient[queries], key_gradient[own], value_gradient[own] = cpu_backward(
                gradients[0][queries],
                query[queries],
                keys[own],
                values[own],
                output[queries],
                log_sums[queries],
                ctx.scale,
            )
        return query_gradient, key_gradient, value_gradient, None, None


def _rows(part: Span) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Where a part's queries and keys are in tensors of [b, heads, rows, ...]."""
    sample, every = slice(part.sample, part.sample + 1), slice(None)
    return (sample, every, slice(part.first, part.end)), (sample, every, slice(part.key, part.key_end))
