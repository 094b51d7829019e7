"""Attention to a window, and with sinks: tile by tile it is what a mask over all scores gives, output and gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helixpipe.model.attention import tiles
from helixpipe.model.attention.log_sums import FlashOnCPU, LogSumKernel, Plain
from helixpipe.model.attention.tiled_attention import attend_in_tiles, attend_with_dropout
from helixpipe.model.attention.tiles import Rows, Tile
from helixpipe.model.documents import Documents

HEADS, GROUPS, CHANNELS = 4, 2, 8
SCALE = 1 / math.sqrt(CHANNELS)
Inputs = tuple[Tensor, Tensor, Tensor]


def drawn(seed: int, queries: int, keys: int, samples: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((queries, samples, HEADS, CHANNELS), *((keys, samples, GROUPS, CHANNELS),) * 2)
    query, key, value = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes
    )
    return query, key, value


def some_sinks() -> Tensor:
    """A logit for each head."""
    return torch.linspace(-1, 2, HEADS, dtype=torch.float64).requires_grad_()


def by_mask(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, sinks: Tensor | None = None) -> Tensor:
    """seen: [b, n, m], whether a query sees a key."""
    key, value = (each.repeat_interleave(HEADS // GROUPS, dim=2) for each in (key, value))
    scores = torch.einsum("nbhd,mbhd->bhnm", query, key) * SCALE
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat((sinks[:, None, None].expand(*scores.shape[:3], 1), scores), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., -key.size(0) :]
    return torch.einsum("bhnm,mbhd->nbhd", weights, value).flatten(2)


def seen_by(first: int, length: int, since: int, left: int, lengths: list[list[int]]) -> Tensor:
    """Of the tokens from `first` on and the keys from `since` on, in samples of documents of these lengths."""
    found = []
    for sample in lengths:
        document = torch.repeat_interleave(torch.arange(len(sample)), torch.tensor(sample))
        tokens = torch.arange(len(document))
        ahead = tokens[:, None] - tokens[None]
        every = (ahead >= 0) & (ahead <= left) & (document[:, None] == document[None])
        found.append(every[first : first + length, since : first + length])
    return torch.stack(found)


def agree(ours: Tensor, expected: Tensor, tensors: Sequence[Tensor]) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-11)
    upstream = torch.randn_like(expected)
    for own, other in zip(
        torch.autograd.grad(ours, tensors, upstream), torch.autograd.grad(expected, tensors, upstream), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-11, atol=1e-11)


@st.composite
def chunks_of_documents(draw: Any) -> tuple[list[list[int]], int, int]:
    """Two samples of documents, equally long, and a chunk of them."""
    total = draw(st.integers(1, 40))
    samples = []
    for _ in range(2):
        cuts = sorted(draw(st.sets(st.integers(1, total - 1), max_size=4))) if total > 1 else []
        samples.append([end - start for start, end in zip([0, *cuts], [*cuts, total], strict=True)])
    first = draw(st.integers(0, total - 1))
    return samples, first, draw(st.integers(1, total - first))


@settings(max_examples=30)
@given(drawn_chunk=chunks_of_documents(), left=st.integers(0, 45), rows=st.sampled_from([1, 3, 8, 128]))
def test_it_is_what_a_mask_over_all_scores_gives(
    drawn_chunk: tuple[list[list[int]], int, int], left: int, rows: int
) -> None:
    """A chunk of documents with the keys that one of it sees; in tiles of few rows, and of many."""
    lengths, first, length = drawn_chunk
    spans = Documents(lengths).spans(first, length, left)
    tensors = drawn(first, length, first + length - spans.since, 2)
    expected = by_mask(*tensors, seen_by(first, length, spans.since, left, lengths))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "LEAST_ROWS", rows)
        agree(attend_in_tiles(*tensors, left, SCALE, spans), expected, tensors)
        every = Documents(lengths).spans(first, length)
        tensors, sinks = drawn(first, length, first + length - every.since, 2), some_sinks()
        seen = seen_by(first, length, every.since, 100, lengths)
        agree(attend_in_tiles(*tensors, None, SCALE, every, sinks), by_mask(*tensors, seen, sinks), (*tensors, sinks))


@settings(max_examples=20)
@given(st.integers(0, 30), st.integers(1, 30), st.none() | st.integers(0, 70), st.sampled_from([1, 4, 128]))
def test_the_last_tokens_of_one_document(earlier: int, length: int, left: int | None, rows: int) -> None:
    since = 0 if left is None else max(earlier - left, 0)
    tensors, sinks = drawn(earlier, length, earlier + length - since, 2), some_sinks()
    seen = seen_by(earlier, length, since, 100 if left is None else left, [[earlier + length]] * 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "LEAST_ROWS", rows)
        agree(attend_in_tiles(*tensors, left, SCALE), by_mask(*tensors, seen), tensors)
        agree(attend_in_tiles(*tensors, left, SCALE, None, sinks), by_mask(*tensors, seen, sinks), (*tensors, sinks))
    agree(attend_with_dropout(*tensors, left, SCALE, 0.0), by_mask(*tensors, seen), tensors)
    agree(attend_with_dropout(*tensors, left, SCALE, 0.0, sinks), by_mask(*tensors, seen, sinks), (*tensors, sinks))


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 6), st.integers(0, 20), st.data())
def test_tiles_hold_every_pair_of_the_window_once(runs: list[int], size: int, left: int, data: st.DataObject) -> None:
    """Of keys in runs that are not side by side, as context-parallel ranks have them. Each query of a tile sees one of
    its keys, which kernels need."""
    gaps = [data.draw(st.integers(0, 5)) for _ in runs]
    starts = [sum(runs[:at]) + sum(gaps[: at + 1]) for at in range(len(runs))]
    rows = Rows(tuple(range(start, start + length) for start, length in zip(starts, runs, strict=True)))
    own = rows.runs[-1]
    tokens = [token for run in rows.runs for token in run]
    first = data.draw(st.integers(0, own.start))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "LEAST_ROWS", size)
        found = list(tiles.tiles_in_window(None, own, -own.start, first, rows, True, left))
    pairs = [pair for tile in found for pair in _pairs(tile, own, tokens)]
    wanted = {(q, k) for q in own for k in tokens if first <= k <= q and q - k <= left}
    assert len(pairs) == len(set(pairs)) and set(pairs) == wanted


def _pairs(tile: Tile, own: range, tokens: list[int]) -> list[tuple[int, int]]:
    found = []
    for i, row in enumerate(range(tile.queries.start, tile.queries.stop)):
        keys = range(tile.keys.start, tile.keys.stop)
        seen = [
            key
            for j, key in enumerate(keys)
            if (not tile.causal or j <= i) and (tile.reach is None or j >= i - tile.reach)
        ]
        assert seen
        found += [(own[row], tokens[key]) for key in seen]
    return found


@pytest.mark.parametrize("kernel", [FlashOnCPU(), Plain()], ids=["flash", "plain"])
@pytest.mark.parametrize(("rows", "columns", "causal", "reach"), [(5, 5, True, 2), (4, 6, False, 1), (3, 1, False, 2)])
def test_kernels_hide_what_is_out_of_reach(
    kernel: LogSumKernel, rows: int, columns: int, causal: bool, reach: int
) -> None:
    query, key, value = drawn(1, rows, columns, 2)
    tensors = query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)
    output, log_sum = kernel.forward(*tensors, causal, SCALE, reach)
    i, j = torch.arange(rows)[:, None], torch.arange(columns)[None]
    seen = (j >= i - reach) & ((j <= i) if causal else torch.ones_like(j <= i))
    repeated = tensors[1].repeat_interleave(HEADS // GROUPS, dim=1)
    scores = (tensors[0] @ repeated.transpose(-1, -2) * SCALE).masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(log_sum, torch.logsumexp(scores, -1))
    expected = by_mask(query, key, value, seen[None].expand(2, -1, -1))
    torch.testing.assert_close(output.permute(2, 0, 1, 3).flatten(2), expected)
