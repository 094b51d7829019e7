"""Documents of a batch dealt over data-parallel ranks, so that all take about equally long.

The method is the largest differencing method for several sets (Narendra Karmarkar and Richard Karp, "The Differencing
Method of Set Partitioning", 1982). InfiniPipe says nothing of data parallelism.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from helixpipe.common.errors import UserError
from helixpipe.planning.documents.chunk_times import ChunkTimes

Hands = tuple[tuple[int, ...], ...]
"""The numbers of the documents of each data-parallel rank, ascending."""


class _Set(NamedTuple):
    """Documents of one rank so far, with what decides their order: time, then tokens."""

    time: float
    tokens: int
    documents: tuple[int, ...]


def deal(times: Sequence[float], tokens: Sequence[int], ranks: int) -> Hands:
    """Return the documents of each of `ranks` ranks: sums of the predicted times as equal as the differencing method
    or, if better, plain greedy makes them; among equal times tokens decide. times, tokens: of each document.

    The same on every machine. Raises UserError for fewer documents than ranks: each needs one.
    """
    if ranks < 1:
        raise UserError(f"documents cannot be dealt to {ranks} data-parallel ranks; there must be 1 or more.")
    if len(times) < ranks:
        raise UserError(
            f"{len(times)} documents a step are too few for {ranks} data-parallel ranks; each needs 1 or more."
        )
    if ranks == 1:
        return (tuple(range(len(times))),)
    hands = [_complete(dealt, tokens) for dealt in (differencing(times, tokens, ranks), greedy(times, tokens, ranks))]
    return min(hands, key=lambda hand: unevenness(hand, times, tokens))


def document_times(lengths: Sequence[int], times: ChunkTimes) -> list[float]:
    """Return the time of each document, however it is cut: its share of full chunks."""
    return [times.of_document(length) for length in lengths]


def unevenness(hands: Hands, times: Sequence[float], tokens: Sequence[int]) -> tuple[float, int]:
    """Time of the rank that takes longest, and tokens of the one that has most."""
    return (
        max(sum(times[document] for document in hand) for hand in hands),
        max(sum(tokens[document] for document in hand) for hand in hands),
    )


def differencing(times: Sequence[float], tokens: Sequence[int], ranks: int) -> Hands:
    """Karmarkar and Karp: each document begins as a division of its own; the two divisions that are most uneven become
    one, the longest set of one with the shortest of the other, until one is left."""
    divisions: list[tuple[float, int, int, list[_Set]]] = []
    for document, (time, count) in enumerate(zip(times, tokens, strict=True)):
        sets = [_Set(time, count, (document,)), *([_Set(0.0, 0, ())] * (ranks - 1))]
        divisions.append((-time, -count, document, sets))
    heapq.heapify(divisions)
    number = len(divisions)
    while len(divisions) > 1:
        *_, first = heapq.heappop(divisions)
        *_, second = heapq.heappop(divisions)
        pairs = zip(first, reversed(second), strict=True)  # longest first, so longest with shortest
        joined = [_Set(a.time + b.time, a.tokens + b.tokens, a.documents + b.documents) for a, b in pairs]
        joined.sort(key=lambda each: (-each.time, -each.tokens, each.documents))
        spans = joined[0].time - joined[-1].time, joined[0].tokens - joined[-1].tokens
        heapq.heappush(divisions, (-spans[0], -spans[1], number, joined))
        number += 1
    return _ordered(each.documents for each in divisions[0][3])


def greedy(times: Sequence[float], tokens: Sequence[int], ranks: int) -> Hands:
    """Deal the longest document first, each to the rank that has least."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0.0, 0, rank) for rank in range(ranks)]
    for document in sorted(range(len(times)), key=lambda each: (-times[each], -tokens[each], each)):
        time, count, rank = heap[0]
        hands[rank].append(document)
        heapq.heapreplace(heap, (time + times[document], count + tokens[document], rank))
    return _ordered(hands)


def _ordered(hands: Iterable[Iterable[int]]) -> Hands:
    return tuple(sorted(tuple(sorted(hand)) for hand in hands))


def _complete(hands: Hands, tokens: Sequence[int]) -> Hands:
    """Fill each empty hand with the shortest document of the hand that has the most."""
    given = [list(hand) for hand in hands]
    for hand in given:
        if not hand:
            most = max(given, key=len)
            hand.append(most.pop(most.index(min(most, key=lambda document: (tokens[document], document)))))
    return _ordered(given)
