"""Filling chunks with short documents: best-fit decreasing (Algorithm 1 of InfiniPipe), and level."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Literal

from helixpipe.planning.documents.chunk_times import ChunkTimes
from helixpipe.program.workload import Chunk, Slice

Fill = Literal["level", "best-fit", "none"]
"""The ways to pack short documents; see `packing.pack`."""


@dataclass(frozen=True)
class Mesh:
    """Lengths that long documents are cut by, and the limits of a chunk.

    lengths: of the slices of the longest document, tokens. tokens: the most of a chunk, padding included. time: what a
    chunk may take unless a document has no place otherwise. alignment: what chunks are multiples of.
    """

    lengths: tuple[int, ...]
    tokens: int
    time: float
    alignment: int = 1

    @property
    def slices(self) -> int:
        """The number of slices of the longest document: N."""
        return len(self.lengths)


@dataclass
class OpenChunk:
    """A chunk that documents may join. earlier: chunks of its row before it."""

    slices: list[Slice]
    time: float
    tokens: int
    earlier: list[Chunk] = field(default_factory=list)

    def sizes(self, alignment: int = 1) -> list[tuple[int, int]]:
        """Return (tokens, earlier tokens) of each slice, and of the padding that fills the chunk up."""
        missing = aligned(self.tokens, alignment) - self.tokens
        return [(part.length, part.start) for part in self.slices] + [(missing, 0)] * (missing > 0)


def aligned(tokens: int, alignment: int) -> int:
    """Return the least multiple of `alignment` that is not below `tokens`."""
    return -(-tokens // alignment) * alignment


def best_fit(
    buckets: list[OpenChunk], shorts: Sequence[int], lengths: Sequence[int], times: ChunkTimes, mesh: Mesh
) -> float:
    """Put the short documents, longest first, each into the bucket with the least time for its tokens that keeps both
    limits; where none has room for the tokens, into a new one. Where none has the time, the limit rises to the least
    that one with room for the tokens comes to. Changes `buckets`; the limit of time at the end."""
    limit = mesh.time
    order = [(bucket.time / bucket.tokens, number) for number, bucket in enumerate(buckets)]
    order.sort()
    for document in shorts:
        tokens = lengths[document]
        added = times.of_document(tokens)
        room = mesh.tokens
        candidates = [number for _, number in order if aligned(buckets[number].tokens + tokens, mesh.alignment) <= room]
        if not candidates:
            time = times.of_slice(tokens)
            limit = max(limit, time)
            buckets.append(OpenChunk([Slice(document, 0, tokens)], time, tokens))
            insort(order, (time / tokens, len(buckets) - 1))
            continue
        chosen, time = None, inf
        for number in candidates:
            if buckets[number].time + added <= limit:  # else it hardly fits
                time = times.of_chunk([*buckets[number].sizes(), (tokens, 0)])
                if time <= limit:
                    chosen = number
                    break
        if chosen is None:  # line 14, mended: only buckets with room for the tokens count
            chosen = min(candidates, key=lambda number: buckets[number].time)
            time = times.of_chunk([*buckets[chosen].sizes(), (tokens, 0)])
            limit = max(limit, time)
        bucket = buckets[chosen]
        order.remove((bucket.time / bucket.tokens, chosen))
        bucket.slices.append(Slice(document, 0, tokens))
        bucket.time, bucket.tokens = time, bucket.tokens + tokens
        insort(order, (bucket.time / bucket.tokens, chosen))
    return limit


def level(
    tails: Sequence[OpenChunk], shorts: Sequence[tuple[int, int]], times: ChunkTimes, mesh: Mesh
) -> list[OpenChunk]:
    """Return the tails and the fewest further buckets that hold the short documents, (number, tokens) from the longest
    down, within both limits when each is put where, of time and tokens, the fuller one is then least full.

    What a document adds is estimated for finding its place; limits are kept by the exact times.
    """
    if not shorts:
        return list(tails)
    added = [times.of_document(tokens) for _, tokens in shorts]
    once = times.once
    count = _fewest(tails, shorts, added, once, mesh)
    limit = mesh.time
    while count < len(shorts):
        buckets = _leveled(tails, shorts, added, once, count, mesh, limit)
        if buckets is None:
            count += max(count // 50, 1)
            continue
        estimated = _longest(bucket for bucket in buckets if len(bucket.slices) > 1)
        longest = _exact(buckets, times, mesh.alignment)
        if longest <= max(mesh.time, _longest(tails)) * (1 + 1e-12):
            return [bucket for bucket in buckets if bucket.slices]
        # More than was estimated. Only a limit below the estimates lets another place be found for a document.
        limit = min(limit * mesh.time / longest, estimated * (1 - 1e-6))
    return [*tails, *(OpenChunk([Slice(n, 0, tokens)], times.of_slice(tokens), tokens) for n, tokens in shorts)]


def _longest(buckets: Iterable[OpenChunk]) -> float:
    return max((bucket.time for bucket in buckets), default=0.0)


def _fewest(
    tails: Sequence[OpenChunk], shorts: Sequence[tuple[int, int]], added: Sequence[float], once: float, mesh: Mesh
) -> int:
    """Return a lower bound of the number of new buckets, by tokens and by time."""
    tokens = sum(tokens for _, tokens in shorts) - sum(max(mesh.tokens - tail.tokens, 0) for tail in tails)
    count = ceil(tokens / mesh.tokens)
    if 0 < mesh.time - once < inf:
        time = sum(added) - sum(max(mesh.time - tail.time, 0.0) for tail in tails)
        count = max(count, ceil(time / (mesh.time - once) * (1 - 1e-9)))
    return min(max(count, 0 if tails else 1), len(shorts))


def _leveled(
    tails: Sequence[OpenChunk],
    shorts: Sequence[tuple[int, int]],
    added: Sequence[float],
    once: float,
    count: int,
    mesh: Mesh,
    limit: float,
) -> list[OpenChunk] | None:
    """Return the documents in the tails and `count` new buckets, within a limit of time; None if one finds no room."""
    buckets = [OpenChunk(list(tail.slices), tail.time, tail.tokens, tail.earlier) for tail in tails]
    buckets += [OpenChunk([], once, 0) for _ in range(count)]
    room = mesh.tokens // mesh.alignment * mesh.alignment
    per_token, per_time = 1 / room, 1 / (limit * (1 + 1e-9))
    for (document, tokens), time in zip(shorts, added, strict=True):
        best, chosen = inf, None
        for bucket in buckets:
            filled = (bucket.tokens + tokens) * per_token
            spent = (bucket.time + time) * per_time
            fuller = filled if filled > spent else spent
            if fuller < best and filled <= 1 and (spent <= 1 or not bucket.tokens):
                best, chosen = fuller, bucket
        if chosen is None:
            return None
        chosen.slices.append(Slice(document, 0, tokens))
        chosen.time, chosen.tokens = chosen.time + time, chosen.tokens + tokens
    return buckets


def _exact(buckets: Sequence[OpenChunk], times: ChunkTimes, alignment: int) -> float:
    """Put the exact times, of padding too, in place of the estimated; the longest."""
    for bucket in buckets:
        bucket.time = times.of_chunk(bucket.sizes(alignment)) if bucket.slices else 0.0
    return _longest(buckets)
