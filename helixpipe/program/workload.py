"""What a step works on: microbatches, their chunks, and the documents these are slices of. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from helixpipe.common.errors import ProgramError


class Slice(NamedTuple):
    """Part of one document in a chunk: `length` tokens from token `start` of it on."""

    document: int
    start: int
    length: int


Chunk = tuple[Slice, ...]
"""What of a microbatch runs as one op: slices of one or several documents, one after the other."""


class Extent(NamedTuple):
    """How long a slice is and how much of its document comes before it, in tokens, or in parts of a microbatch where
    the program does not say how long a sequence is."""

    tokens: float
    earlier: float


Extents = tuple[Extent, ...]
"""The size of a chunk: chunks of equal extents are equal work."""


@dataclass(frozen=True)
class Workload:
    """The chunks of every microbatch of a step.

    Attention is causal within a document and does not look at others, so keys and values follow documents: a slice
    needs the slices of the same document before it, in whatever chunks they are. Documents are numbered over the whole
    step; with a micro-batch size above 1 a document stands for as many of equal length side by side.

    proportional: lengths are proportions, and how many tokens there are the step says (`in_tokens`).
    """

    microbatches: tuple[tuple[Chunk, ...], ...]
    proportional: bool = False

    def __len__(self) -> int:
        return len(self.microbatches)

    def chunks(self, microbatch: int) -> tuple[Chunk, ...]:
        return self.microbatches[microbatch]

    def tokens(self, microbatch: int) -> tuple[int, ...]:
        """Of each chunk of a microbatch."""
        return tuple(sum(part.length for part in chunk) for chunk in self.microbatches[microbatch])

    def units(self) -> Iterator[tuple[int, int]]:
        """(microbatch, chunk) of all, in order, one at a time: a file may name microbatch 999999999."""
        for microbatch, chunks in enumerate(self.microbatches):
            for chunk in range(len(chunks)):
                yield microbatch, chunk

    @cached_property
    def most_chunks(self) -> int:
        """Of any microbatch."""
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
        """Of each chunk of each microbatch; in parts of the microbatch where lengths are proportions. Chunks of equal
        extents share one tuple."""
        known: dict[tuple[Chunk, ...], tuple[Extents, ...]] = {}
        shared: dict[Extents, Extents] = {}
        sizes = []
        for chunks in self.microbatches:
            key = tuple(tuple(Slice(0, part.start, part.length) for part in chunk) for chunk in chunks)
            if key not in known:
                scale = 1 / sum(part.length for chunk in chunks for part in chunk) if self.proportional else 1
                of_chunks = (tuple(Extent(s.length * scale, s.start * scale) for s in chunk) for chunk in chunks)
                known[key] = tuple(shared.setdefault(extents, extents) for extents in of_chunks)
            sizes.append(known[key])
        return tuple(sizes)

    @cached_property
    def mean_tokens(self) -> float:
        """Of a microbatch, in the unit of the extents."""
        if self.proportional or not self.microbatches:
            return 1.0
        return sum(part.length for chunks in self.microbatches for chunk in chunks for part in chunk) / len(self)

    @cached_property
    def document_extents(self) -> dict[int, tuple[Extents, Extents]]:
        """Of each document whose microbatch runs in several chunks: all of it, and what comes before its last slice."""
        sizes: dict[int, tuple[Extents, Extents]] = {}
        shared: dict[tuple[float, float], tuple[Extents, Extents]] = {}
        for chunks, extents in zip(self.microbatches, self.extents, strict=True):
            if len(chunks) == 1:
                continue
            for chunk, of_chunk in zip(chunks, extents, strict=True):
                for part, (tokens, earlier) in zip(chunk, of_chunk, strict=True):
                    key = (earlier + tokens, earlier)  # the last slice is the last to come
                    whole = ((Extent(key[0], 0.0),), (Extent(earlier, 0.0),))
                    sizes[part.document] = shared.setdefault(key, whole)
        return sizes

    def earlier_chunks(self, microbatch: int, chunk: int) -> tuple[tuple[int, int], ...]:
        """The (microbatch, chunk) whose keys and values a chunk needs directly: where the slice right before each of
        its slices is. The slices before that are needed by that one."""
        return self._earlier.get((microbatch, chunk), ())

    def later_chunks(self, microbatch: int, chunk: int) -> tuple[tuple[int, int], ...]:
        """Those that need this one's directly."""
        return self._later.get((microbatch, chunk), ())

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
            before = (ends.get((part.document, part.start)) for part in parts if part.start)
            if own := tuple(dict.fromkeys(each for each in before if each is not None and each != place)):
                needed[place] = own
        return needed

    @cached_property
    def _later(self) -> dict[tuple[int, int], tuple[tuple[int, int], ...]]:
        needed: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}
        for place, earlier in self._earlier.items():
            for each in earlier:
                needed[each] = (*needed.get(each, ()), place)
        return needed

    def in_tokens(self, seq_length: int) -> Workload:
        """The same with lengths in tokens: proportions become lengths of sequences of that length, as even as whole
        numbers can be, longer ones first. Raises ProgramError where a microbatch with lengths of its own, of one
        document, has another length, and where a chunk would have no token."""
        if not self.proportional:
            for number, chunks in enumerate(self.microbatches):
                lengths = _one_document(chunks)
                if lengths is not None and sum(lengths) != seq_length:
                    raise ProgramError(
                        f"chunk lengths {lengths} of microbatch {number} do not add up to the sequence's {seq_length} "
                        "tokens."
                    )
            return self
        known: dict[int, tuple[int, ...]] = {}
        for chunks in self.microbatches:
            if len(chunks) not in known:
                known[len(chunks)] = _even(seq_length, len(chunks))
        return Workload(tuple(_cut(chunks[0][0].document, known[len(chunks)]) for chunks in self.microbatches))


def uniform(microbatches: int, chunks: int = 1, lengths: Iterable[int] | None = None) -> Workload:
    """Microbatches of one document each, all cut alike: into `chunks` equal parts of whatever length a sequence has,
    or into chunks of these `lengths` in tokens. Raises ProgramError for sizes below 1 and lengths that are not as many
    as the chunks."""
    for name, size in (("microbatches", microbatches), ("chunks", chunks)):
        if size < 1:
            raise ProgramError(f"the number of {name} must be at least 1, not {size}.")
    own = None if lengths is None else tuple(lengths)
    if own is not None and (len(own) != chunks or min(own) < 1):
        raise ProgramError(f"chunk lengths {own} do not fit {chunks} chunks.")
    cuts = own or (1,) * chunks
    return Workload(tuple(_cut(document, cuts) for document in range(microbatches)), proportional=own is None)


def _cut(document: int, lengths: tuple[int, ...]) -> tuple[Chunk, ...]:
    start, chunks = 0, []
    for length in lengths:
        chunks.append((Slice(document, start, length),))
        start += length
    return tuple(chunks)


def _even(tokens: int, chunks: int) -> tuple[int, ...]:
    least, more = divmod(tokens, chunks)
    if not least:
        raise ProgramError(f"{tokens} tokens cannot be cut into {chunks} chunks.")
    return tuple(least + (chunk < more) for chunk in range(chunks))


def _one_document(chunks: tuple[Chunk, ...]) -> tuple[int, ...] | None:
    """The lengths of a microbatch's chunks, where they are one document from its start to its end; else None."""
    start = 0
    for chunk in chunks:
        if len(chunk) != 1 or chunk[0].document != chunks[0][0].document or chunk[0].start != start:
            return None
        start += chunk[0].length
    return tuple(chunk[0].length for chunk in chunks)
