"""Builds the usual batches of documents to compare with: padded, packed whole, or concatenated and cut.

The same documents as `packing.pack` is given, as rows of a fixed length, to be compared with it. Chunks of a fixed
length (`packing.fixed_mesh`) are another.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from helixpipe.planning.documents.chunk_times import ChunkTimes
from helixpipe.planning.documents.filling import aligned
from helixpipe.planning.documents.packing import Packing, check_lengths
from helixpipe.program.workload import Slice, Workload

Row = list[tuple[int, int]]
"""A row of one chunk: (document, tokens) of each of its documents."""


def padded(lengths: Sequence[int], times: ChunkTimes, tokens: int | None = None) -> Packing:
    """Pack a row for each document, filled up to `tokens` tokens (by default, the longest's). Padding is part of the
    document's causal attention, as if nothing told it apart.
    """
    check_lengths(lengths)
    row = max(lengths) if tokens is None else tokens
    rows: list[Row] = [[(document, row)] for document in range(len(lengths))]
    return _of_rows(rows, len(lengths), row * len(lengths) - sum(lengths), times)


def packed_whole(lengths: Sequence[int], times: ChunkTimes, tokens: int | None = None, alignment: int = 1) -> Packing:
    """Whole documents in rows of at most so many tokens (if not given, the longest's): best-fit decreasing, each into
    the row that is then fullest (Hantian Ding et al., "Fewer Truncations Improve Language Modeling", ICML 2024). Rows
    end with their last document, but for the alignment."""
    check_lengths(lengths)
    most = aligned(max(lengths) if tokens is None else tokens, alignment)
    rows: list[Row] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for document in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        at = bisect_left(room, (lengths[document], -1))
        left, row = room.pop(at) if at < len(room) else (most, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append((document, lengths[document]))
        insort(room, (left - lengths[document], row))
    padding = 0
    for each in rows:
        used = sum(tokens for _, tokens in each)
        if missing := aligned(used, alignment) - used:
            each.append((len(lengths) + padding, missing))
            padding += 1
    filled = sum(tokens for each in rows for document, tokens in each if document >= len(lengths))
    return _of_rows(rows, len(lengths), filled, times)


def concatenated(lengths: Sequence[int], times: ChunkTimes, tokens: int, isolated: bool) -> Packing:
    """Concatenate all documents and cut them every `tokens` tokens, as GPT pretraining does: the part of a document
    after a cut does not see the part before it. isolated: whether the parts of a row do not see each other; else
    attention treats a row as one document. The last row is filled up. Documents are numbered by part, or by row.
    """
    check_lengths(lengths)
    rows: list[Row] = [[]]
    left, parts = tokens, 0
    for length in lengths:
        while length:
            if not left:
                rows.append([])
                left = tokens
            part = min(length, left)
            rows[-1].append((parts, part))
            length, left, parts = length - part, left - part, parts + 1
    if left:
        rows[-1].append((parts, left))
    if not isolated:
        rows, parts = [[(number, tokens)] for number in range(len(rows))], len(rows)
    return _of_rows(rows, parts, left, times)


def _of_rows(rows: Sequence[Row], documents: int, padding: int, times: ChunkTimes) -> Packing:
    """Return a packing with rows of one chunk each. padding: tokens of it."""
    workload = Workload(tuple((tuple(Slice(document, 0, tokens) for document, tokens in row),) for row in rows))
    chunk_times = tuple((times.of_chunk([(tokens, 0) for _, tokens in row]),) for row in rows)
    return Packing(workload, documents, padding, chunk_times)
