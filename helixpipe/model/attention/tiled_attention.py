"""Causal attention tile by tile, for what kernels have no argument for: a window, and sinks.

To a window a token sees `left` tokens before its own and no others. Queries run in blocks of about as many rows as the
window has, each on the keys that one of them sees (`tiles.py`), so what lies outside the window is neither read nor
computed, but for the corners of blocks. It saves what one kernel would: query, keys, values, output and log-sums.

A sink is a logit of a head that softmax has beside those of the keys, without a value: what a row of scores gives to it
is given to no key. Log-sums begin with it, so that kernels on tiles, which are told the merged ones in the backward,
need not know of it.
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
    gradient_of_sinks,
    merge,
    merged_nothing,
    tiles,
    tiles_in_window,
)
from helixpipe.model.documents import Spans


def attend_in_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    left: int | None,
    scale: float,
    spans: Spans | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[n, b, heads, d] query and [c + n, b, groups, d] key and value to [n, b, heads * d]. left: tokens before its own
    that a token sees; None: all of its document. spans: the parts of documents; None: the queries are the last n tokens
    of one. sinks: [heads]; None: there are none."""
    work = tiles_of(query.size(0), key.size(0), left, spans)
    output: Tensor = _TiledAttention.apply(query, key, value, sinks, work, scale)
    return output


def attend_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    left: int | None,
    scale: float,
    dropout: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same of one document with dropout, which needs all scores; a sink is a key of zeros whose score is given."""
    rows, columns = query.size(0), key.size(0)
    reach = None if left is None else left + rows - columns
    hidden = hidden_scores(rows, columns, columns - rows, reach, query.device)
    mask = ~hidden
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    grouped = query.size(1) != key.size(1)
    if sinks is not None:
        key, value = (F.pad(tensor, (0, 0, 1, 0)) for tensor in (key, value))
        scores = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill(hidden, -torch.inf)
        of_sinks = sinks.to(query.dtype)[:, None, None].expand(-1, rows, 1)
        mask = torch.cat((of_sinks, scores.expand(sinks.size(0), -1, -1)), dim=-1)[None]
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=grouped
    )
    return output.permute(2, 0, 1, 3).flatten(2)


def tiles_of(queries: int, keys: int, left: int | None, spans: Spans | None) -> tuple[Tile, ...]:
    """Of so many queries that are the last of so many tokens, or of the parts of documents in a chunk."""
    work = list[Tile]()
    if spans is None:
        own, every = range(keys - queries, keys), Rows((range(keys),))
        if left is None:
            return tiles(Rows((own,)), every, same_rank=True)
        return tuple(tiles_in_window(None, own, -own.start, 0, every, True, left))
    for part in spans.parts:
        own = range(part.key + part.earlier, part.key_end)  # tokens are numbered as the rows of keys
        if left is not None:
            row = part.first - own.start
            work += tiles_in_window(part.sample, own, row, part.key, Rows((range(keys),)), True, left)
            continue
        rows = slice(part.first, part.end)
        if part.earlier:
            work.append(Tile(part.sample, rows, slice(part.key, own.start), causal=False))
        work.append(Tile(part.sample, rows, slice(own.start, own.stop), causal=True))
    return tuple(work)


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        sinks: Tensor | None,
        work: tuple[Tile, ...],
        scale: float,
    ) -> Tensor:
        output, log_sum = merged_nothing(query, sinks)
        kernel = choose_kernel(query, keys)
        for tile in work:
            merge(kernel, scale, tile, query, KeyValue(keys, values), output, log_sum)
        attended = output.to(query.dtype).flatten(2)
        ctx.save_for_backward(query, keys, values, attended, log_sum, sinks)
        ctx.work, ctx.kernel, ctx.scale = work, kernel, scale
        return attended

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, attended, log_sum, sinks = ctx.saved_tensors
        merged = Merged(query, attended.reshape(query.shape), gradients[0].reshape(query.shape), log_sum)
        total = torch.zeros(query.shape, dtype=log_sum.dtype, device=query.device)
        sums = KeyValue(*(torch.zeros_like(each, dtype=log_sum.dtype) for each in (keys, values)))
        for tile in ctx.work:
            add_gradients(ctx.kernel, ctx.scale, tile, merged, KeyValue(keys, values), total, sums)
        of_sinks = gradient_of_sinks(sinks, merged)
        return total.to(query.dtype), sums.key.to(keys.dtype), sums.value.to(values.dtype), of_sinks, None, None
