"""Rows of several pipelines cut alike, so that one order runs them all.

Data-parallel ranks that have parts of the same weights gather and scatter them together, and those that share out
experts exchange tokens, so all must come to each of these collectives in one order; but documents give each pipeline
rows of its own. What stands in a program's streams follows from the numbers of chunks of its rows, its stages and what
it recomputes; of lengths only the times do, by which the one order was found. So rows are filled up until each has as
many chunks in all pipelines, an order is found for one of these, and the others run the same streams with their own
lengths: what holds of the order (see `lowering.lower`) holds for any times, and collectives stand in the same places
everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from helixpipe.lowering.project import LoweredProgram
from helixpipe.program.program import Program
from helixpipe.program.workload import Chunk, Slice, Workload


def rows_alike(workloads: Sequence[Workload], tokens: int) -> list[Workload]:
    """Return workloads with equally many rows and, in each row, equally many chunks: documents of `tokens` tokens of
    padding, numbered after the others, fill what is missing. Rows of the most chunks come first.
    """
    rows = [sorted(each.microbatches, key=len, reverse=True) for each in workloads]
    most = max(map(len, rows))
    counts = [max(len(own[number]) for own in rows if number < len(own)) for number in range(most)]
    return [_filled(own, counts, tokens) for own in rows]


def _filled(rows: Sequence[tuple[Chunk, ...]], counts: Sequence[int], tokens: int) -> Workload:
    number = 1 + max((part.document for chunks in rows for chunk in chunks for part in chunk), default=-1)
    filled = []
    for place, count in enumerate(counts):
        own = rows[place] if place < len(rows) else ()
        missing = count - len(own)
        filled.append((*own, *((Slice(number + each, 0, tokens),) for each in range(missing))))
        number += missing
    return Workload(tuple(filled))


def with_rows(program: Program, workload: Workload) -> Program:
    """Return the program's order for other rows. Raises ValueError if they have other numbers of chunks."""
    counts, own = (tuple(map(len, each.microbatches)) for each in (program.workload, workload))
    if counts != own:
        raise ValueError(f"rows of {own} chunks cannot run in the order of rows of {counts}")
    return replace(program, workload=workload)


def lowered_with_rows(lowered: LoweredProgram, workload: Workload) -> LoweredProgram:
    """Return the streams of a lowered program for other rows. Raises ValueError as `with_rows` does."""
    program = with_rows(lowered.program, workload)
    return replace(lowered, program=program, graph=replace(lowered.graph, program=program))
