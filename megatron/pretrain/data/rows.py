"""Microbatches of documents: rows as a workload lays them out, read by threads while earlier steps train."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from helixpipe.model import Microbatch
from helixpipe.model.documents import Documents
from helixpipe.model.real_tokens import RealTokens
from helixpipe.program.workload import Chunk, Workload
from megatron.pretrain.data.documents import DocumentStream, DocumentTokens, StepDocuments


class RowDocument(NamedTuple):
    """A whole document in a row: its number, and its tokens there."""

    document: int
    length: int


_Asked = tuple[tuple[int, ...], RealTokens | None, Future[list[Tensor]] | None]
"""The lengths of a row's documents, its real tokens if there are others, and its tensors where they are needed."""


def parts(chunks: Sequence[Chunk]) -> tuple[RowDocument, ...]:
    """Return the documents of a row, in its order, from the slices that they are cut into.

    Raises ValueError if one is not whole: a gap, a slice out of place, or a document that continues later.
    """
    merged: list[RowDocument] = []
    for part in (part for chunk in chunks for part in chunk):
        if merged and merged[-1].document == part.document and part.start == merged[-1].length:
            merged[-1] = RowDocument(part.document, part.start + part.length)
        elif part.start == 0 and all(part.document != other.document for other in merged):
            merged.append(RowDocument(part.document, part.length))
        else:
            raise ValueError(f"document {part.document} is not whole in its row: token {part.start} is out of place")
    return tuple(merged)


def row(documents: Sequence[DocumentTokens | int]) -> DocumentTokens:
    """Concatenate documents; a number stands for that many tokens of padding, which have no loss."""
    empty = [DocumentTokens(*(numpy.zeros(0, kind) for kind in (numpy.int64, numpy.int64, numpy.float32)))]
    filled = [_padding(each) if isinstance(each, int) else each for each in documents]
    return DocumentTokens(*map(numpy.concatenate, zip(*(filled or empty), strict=True)))


def _padding(length: int) -> DocumentTokens:
    nothing = numpy.zeros(length, numpy.int64)
    return DocumentTokens(nothing, nothing, nothing.astype(numpy.float32))


class RowReader:
    """Reads the rows of the next steps in threads of its own.

    whole: whether this rank needs tokens and labels; else only boundaries are made. device: where the tensors go.
    """

    def __init__(self, stream: DocumentStream, device: torch.device, *, threads: int = 1, whole: bool = True) -> None:
        self._stream, self._device, self._whole = stream, device, whole
        self._pool = ThreadPoolExecutor(max(1, threads), "rows") if whole else None
        self._asked: deque[tuple[int, list[_Asked]]] = deque()

    def ask(self, step: int, workload: Workload, numbers: Sequence[int]) -> None:
        """Begin to read this rank's rows of a step, which come in the order they were asked for.

        workload: its microbatches are the rows. numbers: of each document of the workload, its number in the stream's
        step; higher ones are padding. Raises ValueError where a row and the documents do not agree in their lengths.
        """
        documents, rows = self._stream.step(step), []
        for microbatch in range(len(workload)):
            row_parts = parts(workload.chunks(microbatch))
            for part in row_parts:
                if part.document < len(numbers) and part.length != documents.lengths[numbers[part.document]]:
                    raise ValueError(
                        f"document {part.document} of the plan has {part.length} tokens, in step {step} it has "
                        f"{documents.lengths[numbers[part.document]]}"
                    )
            lengths = tuple(part.length for part in row_parts)
            read = None if self._pool is None else self._pool.submit(self._read, documents, row_parts, tuple(numbers))
            rows.append((lengths, self._real(row_parts, len(numbers)), read))
        self._asked.append((step, rows))

    def take(self, step: int) -> list[Microbatch]:
        """Return the rows of the step that was asked for first, each a microbatch of one sample. Raises ValueError if
        that is another step.
        """
        asked, rows = self._asked.popleft()
        if asked != step:
            raise ValueError(f"the rows of step {asked} come next, not those of step {step}")
        made = []
        for lengths, real, read in rows:
            tensors = [torch.empty(0)] * 3 if read is None else read.result()
            tokens, labels, loss_mask = (tensor.to(self._device, non_blocking=True) for tensor in tensors)
            made.append(Microbatch(tokens, labels, loss_mask, documents=Documents([lengths], self._device), real=real))
        return made

    def close(self) -> None:
        """End the threads; what was asked for is not read any more."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _real(self, row_parts: Sequence[RowDocument], documents: int) -> RealTokens | None:
        """Return which tokens of a row are real, if others fill it up."""
        if all(part.document < documents for part in row_parts):
            return None
        mask = [torch.full((part.length,), part.document < documents) for part in row_parts]
        return RealTokens(torch.cat(mask)[None], self._device)

    def _read(self, step: StepDocuments, row_parts: Sequence[RowDocument], numbers: Sequence[int]) -> list[Tensor]:
        """Read the tokens, labels and loss mask of a row, each [1, s]."""
        filled = [
            self._stream.read(step, numbers[part.document]) if part.document < len(numbers) else part.length
            for part in row_parts
        ]
        tensors = [torch.from_numpy(each)[None] for each in row(filled)]
        return [tensor.pin_memory() for tensor in tensors] if self._device.type == "cuda" else tensors
