"""Steps of whole documents. Which documents a step has, and how long they are, follows from the index alone, so that
steps can be planned long before their tokens are read; and neither depends on the number of ranks or on the schedule.

    stream = DocumentStream(order, documents_a_step=64)
    stream.lengths(7)               # tokens to train of each document of step 7, over all data-parallel ranks
    stream.read(stream.step(7), 3)  # tokens, labels and loss mask of its document number 3

What a checkpoint has to keep is the number of the next step and the documents consumed before it
(`consumed_train_samples` counts documents): `DocumentStream(order, …, first_step=100, consumed=6412)` goes on from
there exactly as the stream that was interrupted.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import numpy

from helixpipe.common.errors import DataError
from megatron.pretrain.data.document_order import DocumentAddress, DocumentCounts, DocumentOrder


@dataclass(frozen=True)
class StepDocuments:
    """The documents of a step, over all data-parallel ranks."""

    step: int
    places: tuple[DocumentAddress, ...]
    """File and document of each."""
    lengths: tuple[int, ...]
    """Tokens to train of each: of a document of n + 1 tokens n, at most the capacity."""
    consumed: int
    """Documents of the steps before."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def digest(self) -> str:
        """Tells whether a plan was made for these documents."""
        return hashlib.sha256(repr((self.step, self.places, self.lengths)).encode()).hexdigest()[:16]


class DocumentTokens(NamedTuple):
    """One document as it is trained: n tokens, and the n that follow them."""

    tokens: numpy.ndarray
    """[n] int64."""
    labels: numpy.ndarray
    """[n] int64: the token after each."""
    loss_mask: numpy.ndarray
    """[n] float32: 1 where the label is to be learned."""


def read_document(order: DocumentOrder, place: DocumentAddress, length: int, eod: int | None) -> DocumentTokens:
    """Read a document with `length` tokens to train. eod: see `DocumentStream`. Raises DataError if its file no longer
    has that many.
    """
    file = order.file(place)
    tokens, trained = file.read(place.document, length + 1)
    if len(tokens) != length + 1:
        raise DataError(f"{file.name}: document {place.document} had {length + 1} tokens and now has {len(tokens)}")
    inputs = tokens[:-1].astype(numpy.int64)
    mask = numpy.ones(length, numpy.float32) if trained is None else trained[1:].astype(numpy.float32)
    if eod is not None:
        mask[inputs == eod] = 0.0
    return DocumentTokens(inputs, tokens[1:].astype(numpy.int64), mask)


class DocumentStream:
    """Steps of documents, endless: `documents_a_step` in each, or as many as have at most `max_tokens` tokens.

    order: the split's documents. first_step, consumed: where the stream begins; steps before are not known.
    eod: the end-of-document token whose predictions are left out of the loss; None: none is.

    With `max_tokens` a step takes the documents that come next in the order until one more would be too much, and at
    least one. Several threads may use a stream.
    """

    def __init__(
        self,
        order: DocumentOrder,
        *,
        documents_a_step: int | None = None,
        max_tokens: int | None = None,
        first_step: int = 0,
        consumed: int = 0,
        eod: int | None = None,
    ) -> None:
        if (documents_a_step is None) == (max_tokens is None):
            raise ValueError("give the documents or the tokens of a step")
        self._order = order
        self._documents_a_step = documents_a_step
        self._max_tokens = max_tokens
        self._first_step = first_step
        self._begins = [consumed]
        self._eod = eod
        self._steps: dict[int, StepDocuments] = {}
        self._lock = threading.RLock()

    @property
    def counts(self) -> DocumentCounts:
        """Numbers of the split's documents that are used, truncated, skipped and empty."""
        return self._order.counts

    @property
    def round_size(self) -> int:
        """Documents in an epoch."""
        return self._order.round_size

    def consumed(self, step: int) -> int:
        """Return the number of documents of all steps before `step`."""
        index = step - self._first_step
        if index < 0:
            raise ValueError(f"step {step} is before the stream's first, {self._first_step}")
        if self._documents_a_step is not None:
            return self._begins[0] + index * self._documents_a_step
        with self._lock:
            while len(self._begins) <= index:
                self._begins.append(self._begins[-1] + self._count(self._begins[-1]))
            return self._begins[index]

    def step(self, step: int) -> StepDocuments:
        """Return the documents of a step; kept until a later step is forgotten (`forget`)."""
        with self._lock:
            if step not in self._steps:
                first, end = self.consumed(step), self.consumed(step + 1)
                places, lengths = zip(*self._order.places(first, end - first), strict=True)
                self._steps[step] = StepDocuments(step, places, lengths, first)
            return self._steps[step]

    def lengths(self, step: int) -> tuple[int, ...]:
        """Return the tokens to train of each document of a step, from the index alone."""
        return self.step(step).lengths

    def read(self, step: StepDocuments, number: int) -> DocumentTokens:
        """Document `number` of a step, from its file."""
        return read_document(self._order, step.places[number], step.lengths[number], self._eod)

    def forget(self, step: int) -> None:
        """Forget the steps before `step`, which are done."""
        with self._lock:
            for done in [known for known in self._steps if known < step]:
                del self._steps[done]

    def _count(self, first: int) -> int:
        """Return the number of documents, by tokens, of the step that begins with number `first` of the order."""
        assert self._max_tokens is not None
        count = tokens = 0
        while True:
            lengths = self._order.trained(first + count, 1024)
            sums = (tokens + numpy.cumsum(lengths)).tolist()
            fitting = bisect_right(sums, self._max_tokens)
            count += fitting
            if fitting < len(sums):
                return max(1, count)
            tokens = sums[-1]
