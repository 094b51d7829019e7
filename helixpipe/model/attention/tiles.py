"""Attention over parts of the keys: what queries see of which keys as rectangles, and one part's share merged into all.

Each result is a mean of values weighted by softmax over its keys; with the logarithm of its sum of exponentials it is
merged into that over all keys. Given the merged output and log-sum, a kernel's backward on a part of the keys gives the
part's share of the gradients.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from helixpipe.model.attention.log_sums import LogSumKernel
from helixpipe.model.documents import Documents


class Tile(NamedTuple):
    """Queries that attend to keys: rows on this rank, and rows on the rank that has the keys. sample: in the batch;
    None: all. causal: of as many keys as queries the i-th query sees the first i; else every query sees all keys.
    reach: of these the i-th query does not see the first i - reach; None: it does."""

    sample: int | None
    queries: slice
    keys: slice
    causal: bool
    reach: int | None = None

    def of_queries(self, tensor: Tensor) -> Tensor:
        """The view [b, heads, rows, d] of [all rows, b, heads, d]."""
        return tensor[self.queries, self._samples].permute(1, 2, 0, 3)

    def of_keys(self, tensor: Tensor) -> Tensor:
        """The view [b, groups, rows, d] of [all rows, b, groups, d]."""
        return tensor[self.keys, self._samples].permute(1, 2, 0, 3)

    def of_sums(self, log_sum: Tensor) -> Tensor:
        """The view [b, heads, rows] of [b, heads, all rows], a row a query."""
        return log_sum[self._samples, :, self.queries]

    @property
    def _samples(self) -> slice:
        return slice(None) if self.sample is None else slice(self.sample, self.sample + 1)


class Rows(NamedTuple):
    """A rank's share of a sequence: runs of tokens, ascending, row by row."""

    runs: tuple[range, ...]

    def before(self, token: int) -> int:
        """How many of the rows have tokens before that one."""
        return sum(min(max(token - run.start, 0), len(run)) for run in self.runs)


LEAST_ROWS = 128
"""Of queries in one tile of attention to a window: fewer are not worth a kernel's call."""


def tiles(
    queries: Rows,
    keys: Rows,
    same_rank: bool,
    documents: Sequence[Sequence[int]] | None = None,
    left: int | None = None,
) -> tuple[Tile, ...]:
    """Return what of causal attention a rank does with the keys of one rank.

    queries: rows of the chunk; keys: those of all chunks so far. same_rank: the keys are this rank's own. documents:
    for every sample where its documents begin, ascending from 0; None: one document a sample. left: tokens before its
    own that a token sees; None: all of its document.
    """
    rectangles: list[Tile] = []
    for sample, starts in enumerate(documents) if documents is not None else ((None, (0,)),):
        row = 0
        for run in queries.runs:
            for first, last in _documents(run, starts):
                begin, end = max(first, run.start), min(last, run.stop)
                if left is not None:
                    own_row = row - run.start
                    rectangles += tiles_in_window(sample, range(begin, end), own_row, first, keys, same_rank, left)
                    continue
                own = slice(row + begin - run.start, row + end - run.start)
                seen = slice(keys.before(first), keys.before(begin))
                if seen.stop > seen.start:
                    _add(rectangles, Tile(sample, own, seen, causal=False))
                if same_rank:
                    rectangles.append(Tile(sample, own, slice(keys.before(begin), keys.before(end)), causal=True))
            row += len(run)
    return tuple(rectangles)


def tiles_in_window(
    sample: int | None, tokens: range, row: int, first: int, keys: Rows, same_rank: bool, left: int
) -> Iterator[Tile]:
    """Of tokens of a document that begins at `first`, whose queries are in the rows `row` after their numbers: each
    sees `left` tokens before its own. So many queries are in a tile that about half of its scores are wanted."""
    size = max(left + 1, LEAST_ROWS)
    for begin in range(tokens.start, tokens.stop, size):
        end = min(begin + size, tokens.stop)
        for run in keys.runs:
            low, high = max(run.start, first, begin - left), min(run.stop, begin)
            if low < high:
                last = min(end, high + left)  # who sees the last of these keys
                reach = low + left - begin
                seen = slice(keys.before(low), keys.before(high))
                some = reach if last - begin - 1 > reach else None
                yield Tile(sample, slice(row + begin, row + last), seen, False, some)
        if same_rank:
            own = slice(keys.before(begin), keys.before(end))
            yield Tile(sample, slice(row + begin, row + end), own, True, left if end - begin - 1 > left else None)


def _documents(run: range, starts: Sequence[int]) -> list[tuple[int, int]]:
    """(first token, token after the last) of the documents that a run of tokens has something of."""
    ends = (*starts[1:], run.stop)
    low = bisect_left(starts, run.start + 1) - 1
    return [(first, max(last, first)) for first, last in zip(starts[low:], ends[low:], strict=True) if first < run.stop]


def _add(rectangles: list[Tile], tile: Tile) -> None:
    """Two runs that lie side by side and see the same keys are one tile."""
    last = rectangles[-1] if rectangles else None
    alike = last is not None and (last.sample, last.keys, last.causal) == (tile.sample, tile.keys, False)
    if last is not None and alike and last.queries.stop == tile.queries.start:
        rectangles[-1] = last._replace(queries=slice(last.queries.start, tile.queries.stop))
    else:
        rectangles.append(tile)


def document_starts(documents: Documents | None) -> list[tuple[int, ...]] | None:
    """For every sample the first tokens of its documents; None: one document a sample."""
    return None if documents is None else [tuple(accumulate(each[:-1], initial=0)) for each in documents.lengths]


def merged_nothing(query: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output and log-sums over no keys yet, of [n, b, heads, d] queries: [n, b, heads, d], [b, heads, n]. sinks:
    logits [heads] that log-sums begin with; None: there are none."""
    log_sum = torch.full(
        (query.size(1), query.size(2), query.size(0)),
        -torch.inf,
        dtype=torch.promote_types(query.dtype, torch.float32),
        device=query.device,
    )
    if sinks is not None:
        log_sum.copy_(sinks.detach()[:, None])
    return torch.zeros(query.shape, dtype=log_sum.dtype, device=query.device), log_sum


class KeyValue(NamedTuple):
    """Keys and values, each [m, b, groups, d], or what gradients of these are summed in."""

    key: Tensor
    value: Tensor


def merge(
    kernel: LogSumKernel, scale: float, tile: Tile, query: Tensor, part: KeyValue, output: Tensor, log_sum: Tensor
) -> None:
    """Take the attention of a tile into output and log-sums over all keys so far, in place."""
    part_output, part_sum = kernel.forward(
        tile.of_queries(query), tile.of_keys(part.key), tile.of_keys(part.value), tile.causal, scale, tile.reach
    )
    own, sums = tile.of_queries(output), tile.of_sums(log_sum)
    merged = torch.logaddexp(sums, part_sum.to(sums.dtype))
    own.mul_(torch.exp(sums - merged)[..., None]).add_(part_output * torch.exp(part_sum - merged)[..., None])
    sums.copy_(merged)


class Merged(NamedTuple):
    """Attention over all keys, as the backward needs it: query, output and its gradient, each [n, b, heads, d], and
    log-sums."""

    query: Tensor
    output: Tensor
    gradient: Tensor
    log_sum: Tensor


def add_gradients(
    kernel: LogSumKernel, scale: float, tile: Tile, merged: Merged, part: KeyValue, total: Tensor, sums: KeyValue
) -> None:
    """Add a tile's share of the gradients to those of the query (`total`) and of the part's keys and values (`sums`),
    in place."""
    gradients = kernel.backward(
        tile.of_queries(merged.gradient),
        tile.of_queries(merged.query),
        tile.of_keys(part.key),
        tile.of_keys(part.value),
        tile.of_queries(merged.output),
        tile.of_sums(merged.log_sum).contiguous(),
        tile.causal,
        scale,
        tile.reach,
    )
    tile.of_queries(total).add_(gradients.query)
    tile.of_keys(sums.key).add_(gradients.key)
    tile.of_keys(sums.value).add_(gradients.value)


def gradient_of_sinks(sinks: Tensor | None, merged: Merged) -> Tensor | None:
    """Of logits [heads] that log-sums began with; None where there are none. A sink's share of softmax has no value, so
    its gradient is less that share times the output's product with its gradient, over all rows."""
    if sinks is None:
        return None
    along = (merged.gradient.to(merged.log_sum.dtype) * merged.output).sum(dim=-1)
    share = torch.exp(sinks.detach()[:, None] - merged.log_sum)
    return -(share * along.permute(1, 2, 0)).sum(dim=(0, 2)).to(sinks.dtype)
