"""Causal attention to a window, for kernels that have no argument for one.

A token sees `left` tokens before its own and no others. Queries run in blocks of about as many rows as the window has,
each on the keys that one of them sees (`tiles.py`), so what lies outside the window is neither read nor computed, but
for the corners of blocks. It saves what one kernel would: query, keys, values, output and log-sums.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from helixpipe.model.attention.log_sums import choose_kernel, hidden_scores
from helixpipe.model.attention.tiles import (
    KeyValue,
    Merged,
    Rows,
    Tile,
    add_gradients,
    merge,
    merged_nothing,
    tiles_in_window,
)
from helixpipe.model.documents import Spans


def attend_in_window(
    query: Tensor, key: Tensor, value: Tensor, left: int, scale: float, spans: Spans | None = None
) -> Tensor:
    """[n, b, heads, d] query and [c + n, b, groups, d] key and value to [n, b, heads * d]. spans: the parts of
    documents; None: the queries are the last n tokens of one."""
    output: Tensor = _WindowAttention.apply(query, key, value, _work(query.size(0), key.size(0), left, spans), scale)
    return output


def attend_with_dropout(query: Tensor, key: Tensor, value: Tensor, left: int, scale: float, dropout: float) -> Tensor:
    """The same of one document with dropout, which needs all scores."""
    rows, columns = query.size(0), key.size(0)
    hidden = hidden_scores(rows, columns, columns - rows, left + rows - columns, query.device)
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    grouped = query.size(1) != key.size(1)
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=~hidden, dropout_p=dropout, scale=scale, enable_gqa=grouped
    )
    return output.permute(2, 0, 1, 3).flatten(2)


def _work(queries: int, keys: int, left: int, spans: Spans | None) -> tuple[Tile, ...]:
    if spans is None:
        own = range(keys - queries, keys)
        return tuple(tiles_in_window(None, own, -own.start, 0, Rows((range(keys),)), True, left))
    work = list[Tile]()
    for part in spans.parts:
        own = range(part.key + part.earlier, part.key_end)  # tokens are numbered as the rows of keys
        row = part.first - own.start
        work += tiles_in_window(part.sample, own, row, part.key, Rows((range(keys),)), True, left)
    return tuple(work)


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, values: Tensor, work: tuple[Tile, ...], scale: float) -> Tensor:
        output, log_sum = merged_nothing(query)
        kernel = choose_kernel(query, keys)
        for tile in work:
            merge(kernel, scale, tile, query, KeyValue(keys, values), output, log_sum)
        attended = output.to(query.dtype).flatten(2)
        ctx.save_for_backward(query, keys, values, attended, log_sum)
        ctx.work, ctx.kernel, ctx.scale = work, kernel, scale
        return attended

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, attended, log_sum = ctx.saved_tensors
        merged = Merged(query, attended.reshape(query.shape), gradients[0].reshape(query.shape), log_sum)
        total = torch.zeros(query.shape, dtype=log_sum.dtype, device=query.device)
        sums = KeyValue(*(torch.zeros_like(each, dtype=log_sum.dtype) for each in (keys, values)))
        for tile in ctx.work:
            add_gradients(ctx.kernel, ctx.scale, tile, merged, KeyValue(keys, values), total, sums)
        return total.to(query.dtype), sums.key.to(keys.dtype), sums.value.to(values.dtype), None, None
