"""The order in which documents are read: an endless sequence, shuffled anew each round, known from the lengths alone.

A round of one file, or of several without weights, has every usable document once: it is an epoch. Weights of a blend
are shares of the tokens, as they are for samples of equal length; a round then has about as many documents as there
are, and every file is gone through in epochs of its own. What a round holds depends on the seed and the round's number,
so any place of the sequence is found without those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy

from helixpipe.common.errors import DataError
from megatron.pretrain.data.document_files import DocumentFile
from megatron.pretrain.data.options import LongDocuments

_ROUND, _FILE = 1, 2  # apart, since a seed of numbers is no other with zeros behind it


class NoDocuments(DataError):
    """A split has no document to train on."""


class DocumentAddress(NamedTuple):
    """A document: which file, and its number there."""

    file: int
    document: int


class DocumentCounts(NamedTuple):
    """Numbers of a split's documents by how they are treated, for one pass over all files."""

    used: int
    """Documents that are trained on, those truncated among them."""
    truncated: int
    skipped: int
    """Left out because they are too long."""
    empty: int
    """Left out because nothing is to be predicted in them: fewer than two tokens."""
    untrained: int = 0
    """Left out because the tokens that are kept of them have no loss: the assistant speaks later, or not at all."""

    def __str__(self) -> str:
        parts = [f"{self.used} documents"]
        parts += [f"{self.truncated} of them truncated"] if self.truncated else []
        parts += [f"{self.skipped} too long and skipped"] if self.skipped else []
        parts += [f"{self.empty} without two tokens left out"] if self.empty else []
        late = f"{self.untrained} in which the assistant says nothing within --seq-length left out"
        parts += [late] if self.untrained else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Share:
    """The part of a file that a split has: documents [begin, end), and its weight in a blend."""

    file: DocumentFile
    begin: int
    end: int
    weight: float | None = None


class DocumentOrder:
    """The documents of a split in the order of `seed`.

    capacity: most tokens that a document is trained with; of n + 1 tokens n are. long_documents: what to do with longer
    ones. Raises DataError where these are refused, NoDocuments where a file has nothing for the split.
    """

    def __init__(self, shares: Sequence[Share], seed: int, capacity: int, long_documents: LongDocuments) -> None:
        self._files = [share.file for share in shares]
        self._seed = seed
        self._documents: list[numpy.ndarray] = []
        self._lengths: list[numpy.ndarray] = []
        counts = DocumentCounts(0, 0, 0, 0)
        for share in shares:
            documents, lengths, new_counts = _usable(share, capacity, long_documents)
            self._documents.append(documents)
            self._lengths.append(lengths)
            counts = DocumentCounts(*(one + other for one, other in zip(counts, new_counts, strict=True)))
        self.counts = counts
        if min(map(len, self._documents)) == 0:
            lacking = next(s.file.name for s, kept in zip(shares, self._documents, strict=True) if not len(kept))
            longer = f"; more than --seq-length {capacity} tokens are needed" if self.counts.untrained else ""
            raise NoDocuments(f"{lacking} has no document for it ({self.counts}){longer}")
        self._of_a_round = _of_a_round([share.weight for share in shares], self._lengths)
        self._rounds: dict[int, numpy.ndarray] = {}

    @property
    def round_size(self) -> int:
        """Documents in a round."""
        return sum(self._of_a_round)

    def file(self, place: DocumentAddress) -> DocumentFile:
        return self._files[place.file]

    def places(self, first: int, count: int) -> list[tuple[DocumentAddress, int]]:
        """Return the documents at `first` … `first + count - 1` of the sequence, each with its tokens to train."""
        chosen: list[tuple[DocumentAddress, int]] = []
        while len(chosen) < count:
            number, offset = divmod(first + len(chosen), self.round_size)
            for file, index in self._round_members(number)[offset : offset + count - len(chosen)].tolist():
                chosen.append(
                    (DocumentAddress(file, int(self._documents[file][index])), int(self._lengths[file][index]))
                )
        return chosen

    def trained(self, first: int, count: int) -> numpy.ndarray:
        """Return the tokens to train of the documents at `first` …, at least one and at most `count` of them; int64."""
        number, offset = divmod(first, self.round_size)
        part = self._round_members(number)[offset : offset + count]
        lengths = numpy.empty(len(part), numpy.int64)
        for file, known in enumerate(self._lengths):
            here = part[:, 0] == file
            lengths[here] = known[part[here, 1]]
        return lengths

    def _round_members(self, number: int) -> numpy.ndarray:
        """Return (file, index among its usable documents) of a round, in order; [round size, 2]."""
        if number not in self._rounds:
            files = numpy.repeat(numpy.arange(len(self._files)), self._of_a_round)
            files = numpy.random.default_rng((self._seed, _ROUND, number)).permutation(files)
            members = numpy.stack([files, files], axis=1)
            for file, count in enumerate(self._of_a_round):
                members[files == file, 1] = self._of_file(file, number * count, count)
            for old in list(self._rounds)[:-1]:  # steps are looked at ahead, so two rounds may be in use
                del self._rounds[old]
            self._rounds[number] = members
        return self._rounds[number]

    def _of_file(self, file: int, first: int, count: int) -> numpy.ndarray:
        """Return the indices of `count` documents of a file from its `first` read on; each epoch of the file is
        shuffled anew.
        """
        size, parts = len(self._documents[file]), []
        while count:
            epoch, offset = divmod(first, size)
            shuffled = numpy.random.default_rng((self._seed, _FILE, file, epoch)).permutation(size)[
                offset : offset + count
            ]
            parts.append(shuffled)
            first, count = first + len(shuffled), count - len(shuffled)
        return numpy.concatenate(parts)


def _usable(
    share: Share, capacity: int, long_documents: LongDocuments
) -> tuple[numpy.ndarray, numpy.ndarray, DocumentCounts]:
    """Return the documents of a share that are trained on, the tokens of each, and counts of the others."""
    trained = share.file.lengths[share.begin : share.end] - 1
    short, long = trained < 1, trained > capacity
    if long.any() and long_documents == "refuse":
        first = int(long.argmax())
        raise DataError(
            f"{share.file.name} has {int(long.sum())} documents of more than --seq-length {capacity} tokens, the "
            f"first of them number {share.begin + first} with {trained[first]}, and --long-documents refuse does not "
            "allow it; truncate and skip do"
        )
    kept = ~short & ~long if long_documents == "skip" else ~short
    skipped = int((long & ~kept).sum())
    firsts, untrained = share.file.first_trained, 0
    if firsts is not None:
        speaks = firsts[share.begin : share.end] <= numpy.minimum(trained, capacity)
        untrained = int((kept & ~speaks).sum())
        kept &= speaks
    counts = DocumentCounts(int(kept.sum()), int((kept & long).sum()), skipped, int(short.sum()), untrained)
    return numpy.flatnonzero(kept) + share.begin, numpy.minimum(trained[kept], capacity), counts


def _of_a_round(weights: Sequence[float | None], lengths: Sequence[numpy.ndarray]) -> list[int]:
    """Return the number of each file's documents in a round: all of them, or as many as give each file its share of the
    tokens.
    """
    sizes = list(map(len, lengths))
    if len(sizes) == 1 or any(weight is None for weight in weights):
        return sizes
    rates = [(weight or 0.0) / float(known.mean()) for weight, known in zip(weights, lengths, strict=True)]
    return [max(1, round(sum(sizes) * rate / sum(rates))) for rate in rates]
