"""Defines the workload of a step: microbatches, their chunks, and the slices of documents in each chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import NamedTuple

from helixpipe.common.errors import ProgramError
from helixpipe.program.derived import Derives


class Slice(NamedTuple):
    """Part of one document in a chunk: `length` tokens from token `start` of it on."""

    document: int
    start: int
    length: int


Chunk = tuple[Slice, ...]
"""What of a microbatch runs as one op: slices of one or several documents, one after the other."""


class Extent(NamedTuple):
    """How long a slice is and how much of its document comes before it, in tokens, or in parts of a microbatch where
    the program does not say how long a sequence is. stored: whether its microbatch runs in several chunks, so that its
    keys and values lie in buffers of the whole microbatch."""

    tokens: float
    earlier: float
    stored: bool = False


Extents = tuple[Extent, ...]
"""The size of a chunk: chunks of equal extents are equal work."""


@dataclass(frozen=True)
class Workload(Derives):
    """The chunks of every microbatch of a step.

    Attention is causal within a document and does not look at others: a slice needs the slices of the same document
    before it, in whatever chunks they are. A microbatch is a row of tokens, its chunks one after another, and the keys
    and values of a row of several chunks lie in one buffer (`rows`). Documents are numbered over the whole step; with a
    micro-batch size above 1 a document stands for as many of equal length side by side.

    proportional: lengths are proportions, and how many tokens there are the step says (`in_tokens`).
    """

    microbatches: tuple[tuple[Chunk, ...], ...]
    proportional: bool = False

    def __len__(self) -> int:
        return len(self.microbatches)

    def chunks(self, microbatch: int) -> tuple[Chunk, ...]:
        return self.microbatches[microbatch]

    def tokens(self, microbatch: int) -> tuple[int, ...]:
        """Return the tokens of each chunk of a microbatch."""
        return tuple(sum(part.length for part in chunk) for chunk in self.microbatches[microbatch])

    def units(self) -> Iterator[tuple[int, int]]:
        """(microbatch, chunk) of all, in order, one at a time: a file may name microbatch 999999999."""
        for microbatch, chunks in enumerate(self.microbatches):
            for chunk in range(len(chunks)):
                yield microbatch, chunk

    @cached_property
    def most_chunks(self) -> int:
        """The largest number of chunks of any microbatch."""
        return max(map(len, self.microbatches), default=0)

    @cached_property
    def spans_microbatches(self) -> bool:
        """Whether a microbatch starts inside a document that another has the beginning of."""
        return any(chunks and any(part.start for part in chunks[0]) for chunks in self.microbatches)

    @cached_property
    def lengths(self) -> tuple[int, ...] | None:
        """Tokens of each chunk, where that is the same in every microbatch and each is one document; else None."""
        first = _one_document(self.microbatches[0]) if self.microbatches else None
        alike = first is not None and all(_one_document(chunks) == first for chunks in self.microbatches[1:])
        return first if alike else None

    @cached_property
    def extents(self) -> tuple[tuple[Extents, ...], ...]:
        """The extents of each chunk of each microbatch; in parts of the microbatch where lengths are proportions.
        Chunks of equal extents share one tuple."""
        known: dict[tuple[Chunk, ...], tuple[Extents, ...]] = {}
        shared: dict[Extents, Extents] = {}
        sizes = []
        for chunks in self.microbatches:
            key = tuple(tuple(Slice(0, part.start, part.length) for part in chunk) for chunk in chunks)
            if key not in known:
                scale = 1 / sum(part.length for chunk in chunks for part in chunk) if self.proportional else 1
                stored = len(chunks) > 1
                of_chunks = (
                    tuple(Extent(part.length * scale, part.start * scale, stored) for part in chunk) for chunk in chunks
                )
                known[key] = tuple(shared.setdefault(extents, extents) for extents in of_chunks)
            sizes.append(known[key])
        return tuple(sizes)

    @cached_property
    def mean_tokens(self) -> float | None:
        """The mean tokens of a microbatch; None where lengths are proportions, so that the extents are parts of a
        microbatch."""
        if self.proportional or not self.microbatches:
            return None
        return sum(part.length for chunks in self.microbatches for chunk in chunks for part in chunk) / len(self)

    @cached_property
    def rows(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The (microbatch, chunk) of each row that runs in several chunks, in its order: a microbatch, or several that
        have parts of one document. A row has the number of its first microbatch."""
        if self.most_chunks == 1 and not self.spans_microbatches:
            return ()
        row_of: dict[int, int] = {}  # of a document: the first microbatch of its row
        rows: dict[int, list[tuple[int, int]]] = {}
        for microbatch, chunks in enumerate(self.microbatches):
            documents = {part.document for chunk in chunks for part in chunk}
            joined = sorted({row_of[document] for document in documents if document in row_of})
            first = joined[0] if joined else microbatch
            for other in joined[1:]:
                rows[first] += rows.pop(other)
                row_of = {document: first if row == other else row for document, row in row_of.items()}
            rows.setdefault(first, []).extend((microbatch, chunk) for chunk in range(len(chunks)))
            row_of |= dict.fromkeys(documents, first)
        return tuple(tuple(sorted(places)) for _, places in sorted(rows.items()) if len(places) > 1)

    @cached_property
    def row_extents(self) -> dict[int, tuple[Extents, Extents]]:
        """Return for each row of several chunks, by number, its whole extent and that of what comes before its last
        chunk."""
        sizes: dict[int, tuple[Extents, Extents]] = {}
        shared: dict[tuple[float, ...], tuple[Extents, Extents]] = {}
        for places in self.rows:
            tokens = [sum(part.tokens for part in self.extents[microbatch][chunk]) for microbatch, chunk in places]
            key = tuple(tokens)
            if key not in shared:
                shared[key] = ((Extent(sum(tokens), 0.0, True),), (Extent(sum(tokens[:-1]), 0.0, True),))
            sizes[places[0][0]] = shared[key]
        return sizes

    @cached_property
    def whole(self) -> Workload:
        """The same microbatches, each in one chunk."""
        return Workload(tuple((_joined(chunks),) for chunks in self.microbatches), self.proportional)

    def documents(self, microbatch: int) -> tuple[tuple[int, int], ...] | None:
        """(document, length) of a microbatch's documents in the order of its row; None where one does not lie there
        whole and in one piece."""
        lying: list[tuple[int, int]] = []
        for part in (part for chunk in self.microbatches[microbatch] for part in chunk):
            if lying and part.start and lying[-1] == (part.document, part.start):
                lying[-1] = (part.document, part.start + part.length)
            elif part.start:
                return None
            else:
                lying.append((part.document, part.length))
        return tuple(lying)

    def earlier_chunks(self, microbatch: int, chunk: int) -> tuple[tuple[int, int], ...]:
        """The (microbatch, chunk) whose keys and values a chunk needs directly: where the slice right before each of
        its slices is, and the chunk before it in its microbatch, which fills the same buffers. What comes before that
        is needed by that one."""
        return self._earlier.get((microbatch, chunk), ())

    @cached_property
    def _earlier(self) -> dict[tuple[int, int], tuple[tuple[int, int], ...]]:
        if self.most_chunks == 1 and not self.spans_microbatches:
            return {}
        ends: dict[tuple[int, int], tuple[int, int]] = {}  # (document, token after a slice) -> where the slice is
        for place in self.units():
            for part in self.microbatches[place[0]][place[1]]:
                ends[part.document, part.start + part.length] = place
        needed = {}
        for place in self.units():
            parts = self.microbatches[place[0]][place[1]]
            before = [ends.get((part.document, part.start)) for part in parts if part.start]
            if place[1]:
                before.insert(0, (place[0], place[1] - 1))
            if own := tuple(dict.fromkeys(each for each in before if each is not None and each != place)):
                needed[place] = own
        return needed

    def of_sequences(self, seq_length: int) -> Workload:
        """As `in_tokens`, of steps whose microbatches are all sequences of that length. Raises ProgramError where one
        is not, and where a chunk would have no token."""
        for lengths in () if self.proportional else map(self.tokens, range(len(self))):
            if sum(lengths) != seq_length:
                raise ProgramError(f"chunk lengths {lengths} do not add up to the sequence's {seq_length} tokens.")
        return self.in_tokens(seq_length)

    def in_proportions(self) -> Workload:
        """Return the workload with its lengths as proportions, in lowest terms."""
        unit = gcd(*(part.length for chunks in self.microbatches for chunk in chunks for part in chunk))

        def reduced(chunk: Chunk) -> Chunk:
            return tuple(Slice(part.document, part.start // unit, part.length // unit) for part in chunk)

        return Workload(tuple(tuple(map(reduced, chunks)) for chunks in self.microbatches), proportional=True)

    def in_tokens(self, seq_length: int) -> Workload:
        """Return the workload with lengths in tokens, as they are where the workload says them: microbatches of
        documents have any length. Proportions become lengths of sequences of `seq_length`, as near as whole numbers can
        be; of equal ones the first are the longer. Raises ProgramError where a chunk would have no token."""
        if not self.proportional:
            return self
        known: dict[tuple[int, ...], tuple[int, ...]] = {}
        microbatches = []
        for number, chunks in enumerate(self.microbatches):
            shares = self.tokens(number)
            if shares not in known:
                known[shares] = _divided(seq_length, shares)
            microbatches.append(_cut(chunks[0][0].document, known[shares]))
        return Workload(tuple(microbatches))


def uniform(
    microbatches: int, chunks: int = 1, lengths: Iterable[int] | None = None, proportional: bool = False
) -> Workload:
    """Microbatches of one document each, all cut alike: into `chunks` equal parts of whatever length a sequence has,
    or into chunks of these `lengths` in tokens, which may be proportions. Raises ProgramError for sizes below 1 and
    lengths that are not as many as the chunks."""
    for name, size in (("microbatches", microbatches), ("chunks", chunks)):
        if size < 1:
            raise ProgramError(f"the number of {name} must be at least 1, not {size}.")
    own = None if lengths is None else tuple(lengths)
    if own is not None and (len(own) != chunks or min(own) < 1):
        raise ProgramError(f"chunk lengths {own} do not fit {chunks} chunks.")
    cuts = own or (1,) * chunks
    return Workload(tuple(_cut(document, cuts) for document in range(microbatches)), own is None or proportional)


def _cut(document: int, lengths: tuple[int, ...]) -> tuple[Chunk, ...]:
    start, chunks = 0, []
    for length in lengths:
        chunks.append((Slice(document, start, length),))
        start += length
    return tuple(chunks)


def _joined(chunks: tuple[Chunk, ...]) -> Chunk:
    """The slices of a microbatch, those of one document that follow each other as one."""
    joined: list[Slice] = []
    for part in (part for chunk in chunks for part in chunk):
        if joined and joined[-1].document == part.document and joined[-1].start + joined[-1].length == part.start:
            joined[-1] = joined[-1]._replace(length=joined[-1].length + part.length)
        else:
            joined.append(part)
    return tuple(joined)


def _divided(tokens: int, shares: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens in these proportions: whole numbers, each next to its exact share."""
    whole = sum(shares)
    least = [tokens * share // whole for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda chunk: -(tokens * shares[chunk] % whole))
    for chunk in by_remainder[: tokens - sum(least)]:
        least[chunk] += 1
    if not min(least):
        raise ProgramError(f"{tokens} tokens cannot be cut into {len(shares)} chunks.")
    return tuple(least)


def _one_document(chunks: tuple[Chunk, ...]) -> tuple[int, ...] | None:
    """The lengths of a microbatch's chunks, where they are one document from its start to its end; else None."""
    start = 0
    for chunk in chunks:
        if len(chunk) != 1 or chunk[0].document != chunks[0][0].document or chunk[0].start != start:
            return None
        start += chunk[0].length
    return tuple(chunk[0].length for chunk in chunks)


def attention_pairs(extents: Extents, window: int = 0) -> float:
    """Return the pairs of a query and a key that it sees, in causal attention within documents.

    Args:
        extents: Parts of documents, each after its earlier tokens.
        window: Keys that a query sees at most; 0: all.
    """
    if window:
        before = sum(_seen_up_to(part.earlier, window) for part in extents)
        return sum(_seen_up_to(part.earlier + part.tokens, window) for part in extents) - before
    return sum(part.tokens * (part.earlier + part.tokens / 2) for part in extents)


def _seen_up_to(tokens: float, window: int) -> float:
    """Return the pairs of a document's first tokens: each sees the tokens before it, but a window of them at most."""
    within = min(tokens, window)
    return within * within / 2 + (tokens - within) * window
