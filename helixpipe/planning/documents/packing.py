"""Documents of all lengths as chunks that take about equally long: long ones cut, short ones packed.

The sequence processor of InfiniPipe (Shiju Wang et al., "InfiniPipe: Elastic Pipeline Parallelism for Efficient
Variable-Length Long-Context LLM Training", arXiv 2509.21275), Algorithm 1. The longest document is cut into N slices of
equal time; their lengths are the *mesh* by which all documents longer than its first are cut. What is left of one is
its *tail*. The longest slice gives the most tokens of a chunk, the slowest its time limit; short documents then fill
tails and chunks of their own under both, longest first, each into the chunk with the least time for its tokens.

As printed, line 14 (no chunk has room in time: raise the limit to the least time of a chunk and the document's) does
not end where that chunk has no room for the tokens; here the least is of those that have.

A row (a microbatch) has at most one document that is cut, at its beginning, so two tails are never in one chunk. Where
chunks have to be multiples of some tokens, cuts are; the end of a row is filled up with one document of padding (fewer
tokens than the multiple, no loss), numbered after the documents of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice, pairwise
from math import inf, sqrt

from helixpipe.common.errors import UserError
from helixpipe.planning.documents.chunk_times import ChunkTimes
from helixpipe.planning.documents.filling import Fill, Mesh, OpenChunk, aligned, best_fit, level
from helixpipe.planning.order.chunk_lengths import average_lengths
from helixpipe.program.workload import Chunk, Slice, Workload


@dataclass(frozen=True)
class Packing:
    """A batch as rows of chunks.

    documents: how many there are; higher numbers in the workload are padding. padding: tokens of that.
    mesh: what the documents were cut by; None where they were not. time_limit: the mesh's, as far as it had to be
    raised. chunk_times: of each chunk of each row, as `ChunkTimes` has them.
    """

    workload: Workload
    documents: int
    padding: int
    chunk_times: tuple[tuple[float, ...], ...]
    mesh: Mesh | None = None
    time_limit: float = inf

    @cached_property
    def chunk_tokens(self) -> tuple[int, ...]:
        """The tokens of all chunks, row by row, padding included."""
        return tuple(tokens for row in range(len(self.workload)) for tokens in self.workload.tokens(row))

    @property
    def tokens(self) -> int:
        """The tokens of the documents, without padding."""
        return sum(self.chunk_tokens) - self.padding

    @property
    def time(self) -> float:
        """The sum of the times of all chunks."""
        return sum(map(sum, self.chunk_times))

    @property
    def spread_of_time(self) -> float:
        """Standard deviation over mean of the times of all the batch's chunks."""
        return spread([time for row in self.chunk_times for time in row])

    @property
    def spread_of_tokens(self) -> float:
        """Standard deviation over mean of the tokens, padding included, of all the batch's chunks."""
        return spread(self.chunk_tokens)


def spread(values: Sequence[float]) -> float:
    """Standard deviation (of the values themselves, not of a sample) over mean; 0 of none."""
    if not values or not sum(values):
        return 0.0
    mean = sum(values) / len(values)
    return sqrt(sum((value - mean) ** 2 for value in values) / len(values)) / mean


def balanced_mesh(
    lengths: Sequence[int],
    times: ChunkTimes,
    count: int,
    alignment: int = 1,
    documents: int = 1,
    room: float = 1.0,
    even: float = 0.0,
) -> Mesh:
    """Return the mesh of the longest document in `count` slices of equal time; of one slice also with chunks of several
    times its tokens and time (documents). room: tokens that a chunk may have, over those of the mesh's longest slice.
    even: how far from slices of equal time (0) to slices of equal length (1) the cuts lie. Raises UserError if the
    document is too short for it.
    """
    check_lengths(lengths)
    longest = max(lengths)
    _check_slices(longest, count, alignment)
    ends = _equal_times(longest, times, count, alignment)
    if even:
        alike = accumulate(average_lengths(aligned(longest, alignment), count, alignment), initial=0)
        blended = (
            (1 - even) * one + even * other for one, other in zip(ends[1:-1], islice(alike, 1, count), strict=True)
        )
        ends = [0, *(int(end / alignment + 0.5) * alignment for end in blended), longest]
    cuts = tuple(end - start for start, end in pairwise(ends))
    slices = list(zip(cuts, ends, strict=False))
    padding = aligned(longest, alignment) - longest
    last = times.of_chunk([slices[-1], (padding, 0)] if padding else slices[-1:])
    time = max(last, *(times.of_slice(*each) for each in slices))
    most = int(max(cuts) * documents * room) // alignment * alignment
    return Mesh(cuts, max(most, aligned(max(cuts), alignment)), time * documents, alignment)


def _equal_times(longest: int, times: ChunkTimes, count: int, alignment: int) -> list[int]:
    """Return the boundaries of a document's slices, each at the multiple of `alignment` nearest in time to equal times.

    A slice takes what the document takes up to its end, less that up to its start, plus the fixed time of a chunk. This
    evaluates few times; `balanced_lengths`, which finds the least longest time, evaluates hundreds.
    """
    once, total = times.once, times.of_slice(longest)
    share = (total - once) / count
    cuts = [0]  # in units of `alignment`
    for number in range(1, count):
        target = once + number * share

        def error(cut: int, target: float = target) -> float:
            return abs(times.of_slice(cut * alignment) - target)

        first, latest = cuts[-1] + 1, (longest - 1) // alignment - (count - 1 - number)
        cut = min(max(times.tokens_within(target, longest, 1e-3 * share) // alignment, first), latest)
        while cut < latest and error(cut + 1) < error(cut):  # what was found is near, and rounded down
            cut += 1
        while cut > first and error(cut - 1) < error(cut):
            cut -= 1
        cuts.append(cut)
    return [*(cut * alignment for cut in cuts), longest]


def fixed_mesh(lengths: Sequence[int], slices: int, alignment: int = 1, documents: int = 1) -> Mesh:
    """Return a mesh of equal lengths and no limit of time: chunks of a fixed length, as Seq1F1B's with packing."""
    check_lengths(lengths)
    longest = max(lengths)
    _check_slices(longest, slices, alignment)
    tokens = max(average_lengths(aligned(longest, alignment), slices, alignment))
    return Mesh((tokens,) * slices, tokens * documents, inf, alignment)


def most_slices(longest: int, alignment: int) -> int:
    """Return the largest number of slices of a document of `longest` tokens, whose last slice may be filled up."""
    return aligned(longest, alignment) // alignment


def _check_slices(longest: int, slices: int, alignment: int) -> None:
    if slices > (most := most_slices(longest, alignment)):
        raise UserError(
            f"--infinipipe-chunks {slices} is too many for a longest document of {longest} tokens: chunks have "
            f"{alignment} or more, so at most {most}."
        )


def check_lengths(lengths: Sequence[int]) -> None:
    """Raise UserError for no documents and for one without tokens."""
    if not lengths:
        raise UserError("there are no documents to pack.")
    if min(lengths) < 1:
        raise UserError(f"document {lengths.index(min(lengths))} has {min(lengths)} tokens; each needs 1 or more.")


def pack(lengths: Sequence[int], times: ChunkTimes, mesh: Mesh, fill: Fill = "level") -> Packing:
    """Pack the documents of these lengths into rows, those of most chunks first.

    fill: how short documents are packed. `best-fit`: Algorithm 1 with line 14 mended. `level`: into the fewest chunks
    that keep both limits, each document, longest first, into the one that is then least full. `none`: not at all.
    Raises UserError for an empty document and for none.
    """
    check_lengths(lengths)
    buckets, shorts = _cut(lengths, times, mesh)
    limit = mesh.time
    if fill == "level":
        buckets = level(buckets, [(number, lengths[number]) for number in shorts], times, mesh)
    elif fill == "best-fit":
        limit = best_fit(buckets, shorts, lengths, times, mesh)
    else:
        buckets += [OpenChunk([Slice(n, 0, lengths[n])], times.of_slice(lengths[n]), lengths[n]) for n in shorts]
    rows = sorted(buckets, key=lambda row: (-len(row.earlier), -row.time, row.slices[0].document))
    return _packing(lengths, times, rows, mesh, limit)


def _cut(lengths: Sequence[int], times: ChunkTimes, mesh: Mesh) -> tuple[list[OpenChunk], list[int]]:
    """Return the tails of long documents, with the chunks before them, and the numbers of the short ones, longest
    first.
    """
    tails = []
    shorts = []
    for document in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        length, start = lengths[document], 0
        if length <= max(mesh.lengths[0], mesh.tokens if mesh.slices == 1 else 0):
            shorts.append(document)
            continue
        earlier: list[Chunk] = []
        for most in mesh.lengths:
            if length - start <= most:
                break
            earlier.append((Slice(document, start, most),))
            start += most
        tail = Slice(document, start, length - start)
        tails.append(OpenChunk([tail], times.of_slice(tail.length, start), tail.length, earlier))
    return tails, shorts


def _packing(lengths: Sequence[int], times: ChunkTimes, rows: Sequence[OpenChunk], mesh: Mesh, limit: float) -> Packing:
    """Return the buckets as rows, filled up to whole multiples."""
    microbatches, chunk_times = [], []
    padding, documents = 0, len(lengths)
    for row in rows:
        missing = aligned(row.tokens, mesh.alignment) - row.tokens
        last, time = tuple(row.slices), row.time
        if missing:
            last = (*last, Slice(documents, 0, missing))
            padding, documents = padding + missing, documents + 1
            time = times.of_chunk(row.sizes(mesh.alignment))
        microbatches.append((*row.earlier, last))
        before = [times.of_slice(chunk[0].length, chunk[0].start) for chunk in row.earlier]
        chunk_times.append((*before, time))
    limit = max(limit, max(max(each) for each in chunk_times)) if padding else limit
    return Packing(Workload(tuple(microbatches)), len(lengths), padding, tuple(chunk_times), mesh, limit)
