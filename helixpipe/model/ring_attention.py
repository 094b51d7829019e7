"""Causal attention over rows that context-parallel ranks share in zigzag: keys and values go round the ring.

In cp rounds each rank attends to every rank's keys and values, which it passes on to the next rank meanwhile. Each
result is a mean of values weighted by softmax over its keys; with the logarithm of its sum of exponentials it is merged
into that over all keys. Given the merged output and log-sum, a kernel's backward on a part of the keys gives the part's
share of the gradients; those of keys and values go round with them, and after the last round home.

What a round has to do are rectangles of queries and keys (`Tile`). A rank's rows ascend, so of a run of queries and a
rank's keys of one document the run sees the keys before it, which are neighbours, and its own ones causally.

With a sequence in chunks every rank stores its own rows of the chunks before, and the ring passes them along as well.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from helixpipe.model.context_parallel import ContextParallel
from helixpipe.model.documents import Documents
from helixpipe.model.log_sums import LogSumKernel


class Tile(NamedTuple):
    """Queries that attend to keys: rows on this rank, and rows on the rank that has the keys. sample: in the batch;
    None: all. causal: of as many keys as queries the i-th query sees the first i; else every query sees all keys."""

    sample: int | None
    queries: slice
    keys: slice
    causal: bool


class Rows(NamedTuple):
    """What a rank has of a sequence: runs of tokens, ascending, row by row."""

    runs: tuple[range, ...]

    def before(self, token: int) -> int:
        """How many of the rows have tokens before that one."""
        return sum(min(max(token - run.start, 0), len(run)) for run in self.runs)


def tiles(
    queries: Rows, keys: Rows, same_rank: bool, documents: Sequence[Sequence[int]] | None = None
) -> tuple[Tile, ...]:
    """What of causal attention a rank does with the keys of one rank.

    queries: rows of the chunk; keys: those of all chunks so far. same_rank: the keys are this rank's own. documents:
    for every sample where its documents begin, ascending from 0; None: one document a sample.
    """
    found: list[Tile] = []
    for sample, starts in enumerate(documents) if documents is not None else ((None, (0,)),):
        row = 0
        for run in queries.runs:
            for first, last in _documents(run, starts):
                begin, end = max(first, run.start), min(last, run.stop)
                own = slice(row + begin - run.start, row + end - run.start)
                seen = slice(keys.before(first), keys.before(begin))
                if seen.stop > seen.start:
                    _add(found, Tile(sample, own, seen, causal=False))
                if same_rank:
                    found.append(Tile(sample, own, slice(keys.before(begin), keys.before(end)), causal=True))
            row += len(run)
    return tuple(found)


def _documents(run: range, starts: Sequence[int]) -> list[tuple[int, int]]:
    """(first token, token after the last) of the documents that a run of tokens has something of."""
    ends = (*starts[1:], run.stop)
    low = bisect_left(starts, run.start + 1) - 1
    return [(first, max(last, first)) for first, last in zip(starts[low:], ends[low:], strict=True) if first < run.stop]


def _add(found: list[Tile], tile: Tile) -> None:
    """Two runs that lie side by side and see the same keys are one tile."""
    last = found[-1] if found else None
    alike = last is not None and (last.sample, last.keys, last.causal) == (tile.sample, tile.keys, False)
    if last is not None and alike and last.queries.stop == tile.queries.start:
        found[-1] = last._replace(queries=slice(last.queries.start, tile.queries.stop))
    else:
        found.append(tile)


def ring_rounds(
    context: ContextParallel, chunks: Sequence[int], end: int, documents: Documents | None
) -> tuple[tuple[Tile, ...], ...]:
    """What each round of a chunk has to do. chunks: first tokens of all chunks so far, the last of which ends at `end`;
    keys of which a rank's lie in that order."""
    starts = None if documents is None else [tuple(accumulate(each[:-1], initial=0)) for each in documents.lengths]

    def rows(rank: int) -> Rows:
        edges = pairwise((*chunks, end))
        return Rows(tuple(run for first, last in edges for run in context.runs(first, last - first, rank)))

    queries = Rows(context.runs(chunks[-1], end - chunks[-1]))
    sources = [(context.rank - number) % context.size for number in range(context.size)]
    return tuple(tiles(queries, rows(source), source == context.rank, starts) for source in sources)


class Ring(NamedTuple):
    """What a unit's ring attention depends on. rounds: the tiles of each round, the first with this rank's keys."""

    parallel: ContextParallel
    rounds: tuple[tuple[Tile, ...], ...]
    kernel: LogSumKernel
    scale: float


def ring_attention(query: Tensor, keys: Tensor, values: Tensor, ring: Ring) -> Tensor:
    """[n, b, heads, d] query and [m, b, groups, d] keys and values of this rank's rows to [n, b, heads * d].

    Collective: ranks of the group run the same units in one order.
    """
    output: Tensor = _RingAttention.apply(query, keys, values, ring)
    return output


class _Passing:
    """Tensors on their way to the next rank, while as many of the same shapes come from the one before."""

    def __init__(self, group: dist.ProcessGroup, tensors: Sequence[Tensor]):
        rank, size = group.rank(), group.size()
        # gloo sends from the host's memory alone.
        self._device = tensors[0].device
        on_host = dist.get_backend(group) == "gloo" and self._device.type != "cpu"
        self._sent = [(tensor.cpu() if on_host else tensor).contiguous() for tensor in tensors]
        self._received = [torch.empty_like(tensor) for tensor in self._sent]
        ops = []
        for sent, received in zip(self._sent, self._received, strict=True):
            ops.append(dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % size))
            ops.append(dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size))
        self._works = dist.batch_isend_irecv(ops)

    def wait(self) -> list[Tensor]:
        """What has come."""
        for work in self._works:
            work.wait()
        return [tensor.to(self._device) for tensor in self._received]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, values: Tensor, ring: Ring) -> Tensor:
        group, cut = ring.parallel.group, TileViews(query.shape)
        assert group is not None
        log_sum = torch.full(
            (query.size(1), query.size(2), query.size(0)),
            -torch.inf,
            dtype=torch.promote_types(query.dtype, torch.float32),
            device=query.device,
        )
        output = torch.zeros(query.shape, dtype=log_sum.dtype, device=query.device)
        block = [keys, values]
        for number, work in enumerate(ring.rounds):
            passing = _Passing(group, block) if number + 1 < len(ring.rounds) else None
            for tile in work:
                q, k, v = cut.queries(query, tile), cut.keys(block[0], tile), cut.keys(block[1], tile)
                merge(cut, tile, output, log_sum, *ring.kernel.forward(q, k, v, tile.causal, ring.scale))
            if passing is not None:
                block = passing.wait()
        attention = output.to(query.dtype).flatten(2)
        ctx.save_for_backward(query, keys, values, attention, log_sum)
        ctx.ring = ring
        return attention

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, attention, log_sum = ctx.saved_tensors
        ring, cut = ctx.ring, TileViews(query.shape)
        output, gradient = (tensor.reshape(query.shape) for tensor in (attention, gradients[0]))
        query_gradient = torch.zeros_like(query, dtype=log_sum.dtype)
        block, passed = [keys, values], None
        for number, work in enumerate(ring.rounds):
            passing = _Passing(ring.parallel.group, block) if number + 1 < len(ring.rounds) else None
            own = [torch.zeros_like(tensor) for tensor in block]
            for tile in work:
                q, k, v = cut.queries(query, tile), cut.keys(block[0], tile), cut.keys(block[1], tile)
                found = ring.kernel.backward(
                    cut.queries(gradient, tile),
                    q,
                    k,
                    v,
                    cut.queries(output, tile),
                    cut.sums(log_sum, tile).contiguous(),
                    tile.causal,
                    ring.scale,
                )
                cut.queries(query_gradient, tile).add_(found.query)
                cut.keys(own[0], tile).add_(found.key)
                cut.keys(own[1], tile).add_(found.value)
            if passing is not None:
                block = passing.wait()
            if passed is not None:
                own = [total.add_(share) for total, share in zip(passed.wait(), own, strict=True)]
            passed = _Passing(ring.parallel.group, own)
        assert passed is not None
        key_gradient, value_gradient = passed.wait()
        return query_gradient.to(query.dtype), key_gradient, value_gradient, None


class TileViews(NamedTuple):
    """Views [b, heads, rows, d] of what a tile has of tensors [rows, b, heads, d]."""

    shape: torch.Size

    def queries(self, tensor: Tensor, tile: Tile) -> Tensor:
        return _view(tensor, tile.sample, tile.queries)

    def keys(self, tensor: Tensor, tile: Tile) -> Tensor:
        return _view(tensor, tile.sample, tile.keys)

    def sums(self, log_sum: Tensor, tile: Tile) -> Tensor:
        """[b, heads, rows] of [b, heads, all rows]."""
        return log_sum[_samples(tile.sample), :, tile.queries]


def _samples(sample: int | None) -> slice:
    return slice(None) if sample is None else slice(sample, sample + 1)


def _view(tensor: Tensor, sample: int | None, rows: slice) -> Tensor:
    return tensor[rows, _samples(sample)].permute(1, 2, 0, 3)


def merge(views: TileViews, tile: Tile, output: Tensor, log_sum: Tensor, part: Tensor, part_sum: Tensor) -> None:
    """Take a tile's output and log-sum into those of all keys so far; in place."""
    own, sums = views.queries(output, tile), views.sums(log_sum, tile)
    merged = torch.logaddexp(sums, part_sum.to(sums.dtype))
    own.mul_(torch.exp(sums - merged)[..., None]).add_(part * torch.exp(part_sum - merged)[..., None])
    sums.copy_(merged)
