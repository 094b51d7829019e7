"""Single documents of an indexed dataset: lengths from the index alone, tokens by their number."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy

from helixpipe.common.errors import DataError
from megatron.pretrain.data.indexed_files import IndexedFile, check_tokens


class Excerpt(NamedTuple):
    """The beginning of a document."""

    tokens: numpy.ndarray
    """[n] integers."""
    trained: numpy.ndarray | None
    """[n] bool: which tokens are to be predicted; None: all."""


class DocumentFile(Protocol):
    """A source of whole documents, read by several threads at once."""

    @property
    def name(self) -> str:
        """The name used in messages."""
        ...

    @property
    def lengths(self) -> numpy.ndarray:
        """Tokens of each document, [documents] int64."""
        ...

    @property
    def first_trained(self) -> numpy.ndarray | None:
        """Number of the first token of each document that is to be predicted, [documents] int64; None: the second."""
        ...

    def read(self, document: int, count: int) -> Excerpt:
        """Read the first `count` tokens of a document, or all it has."""
        ...


@dataclass(frozen=True)
class IndexedDocuments:
    """The documents of a .bin/.idx pair, and which of their tokens are trained.

    Attributes:
        masks: File with a byte a token, which says whether it is trained; None: all are.
        firsts: File with the `first_trained` of each document.
    """

    file: IndexedFile
    masks: str | None = None
    firsts: str | None = None
    mapped: bool = True
    """Map files into memory instead of reading them."""
    source: str | None = None
    """The file that it was made of, if another."""
    vocab_size: int | None = None
    """Tokens of the tokenizer, which all that is read must be in; None: not checked."""

    @property
    def name(self) -> str:
        return self.source or self.file.prefix

    @functools.cached_property
    def lengths(self) -> numpy.ndarray:
        return numpy.diff(self._ends)

    @functools.cached_property
    def first_trained(self) -> numpy.ndarray | None:
        return None if self.firsts is None else numpy.fromfile(self.firsts, numpy.int64)

    def read(self, document: int, count: int) -> Excerpt:
        first = int(self._ends[document])
        count = min(count, int(self._ends[document + 1]) - first)
        tokens = self._part(self.file.prefix + ".bin", self.file.token_type, first, count)
        if self.vocab_size is not None:
            check_tokens(tokens, self.vocab_size, f"{self.file.prefix}.bin")
        trained = None if self.masks is None else self._part(self.masks, numpy.uint8, first, count).astype(bool)
        return Excerpt(tokens, trained)

    @functools.cached_property
    def _ends(self) -> numpy.ndarray:
        """First token of each document in the .bin file, and its end; [documents + 1] int64.

        A document may be several sequences (of sentences, in other projects' files).
        """
        ends = numpy.concatenate(([0], numpy.cumsum(self.file.sequence_lengths, dtype=numpy.int64)))
        if not numpy.array_equal(self.file.offsets, ends[:-1] * numpy.dtype(self.file.token_type).itemsize):
            raise DataError(f"{self.file.prefix}.idx lists its documents in another order than its .bin file has them")
        return ends[self.file.document_ends]

    @functools.cached_property
    def _maps(self) -> dict[str, numpy.ndarray]:
        kinds = {self.file.prefix + ".bin": self.file.token_type, **({self.masks: numpy.uint8} if self.masks else {})}
        return {path: numpy.memmap(path, kind, "r") for path, kind in kinds.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the memory maps, which would be pickled with all their contents, for loader processes that are not
        forked.
        """
        return {name: value for name, value in self.__dict__.items() if name != "_maps"}

    def _part(self, path: str, kind: type[numpy.integer], first: int, count: int) -> numpy.ndarray:
        if self.mapped:
            return self._maps[path][first : first + count]
        return numpy.fromfile(path, kind, count, offset=first * numpy.dtype(kind).itemsize)


@dataclass(frozen=True)
class MockDocuments:
    """Generated documents: lengths as skewed as real ones (log-normal), tokens that count up."""

    seed: int
    vocab_size: int
    documents: int = 10_000
    median: int = 256
    first_trained = None

    @property
    def name(self) -> str:
        return "mock data"

    @functools.cached_property
    def lengths(self) -> numpy.ndarray:
        drawn = numpy.random.default_rng(self.seed).lognormal(numpy.log(self.median), 1.5, self.documents)
        return numpy.maximum(2, drawn).astype(numpy.int64)

    def read(self, document: int, count: int) -> Excerpt:
        count = min(count, int(self.lengths[document]))
        return Excerpt((document + numpy.arange(count)) % self.vocab_size, None)
