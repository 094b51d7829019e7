"""Microbatches of documents: rows as a workload lays them out, read by threads while earlier steps train."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy
import torch

from helixpipe.model import Microbatch
from helixpipe.model.documents import Documents
from helixpipe.program.workload import Chunk, Workload
from megatron.training.data.documents import DocumentStream, DocumentTokens, StepDocuments


class Part(NamedTuple):
    """A whole document in a row: its number, and its tokens there."""

    document: int
    length: int


def parts(chunks: Sequence[Chunk]) -> tuple[Part, ...]:
    """The documents of a row, in its order, out of the slices that they are cut into.

    Raises ValueError where one is not whole: a gap, a slice out of its place, or a document that comes back later.
    """
    found: list[Part] = []
    for part in (part for chunk in chunks for part in chunk):
        if found and found[-1].document == part.document and part.start == found[-1].length:
            found[-1] = Part(part.document, part.start + part.length)
        elif part.start == 0 and all(part.document != other.document for other in found):
            found.append(Part(part.document, part.length))
        else:
            raise ValueError(f"document {part.document} is not whole in its row: token {part.start} is out of place")
    return tuple(found)


def row(documents: Sequence[DocumentTokens | int]) -> Microbatch:
    """One microbatch of b = 1, on the CPU: the documents one after another; a number stands for so many tokens of
    padding, which have no loss. Positions begin anew with each."""
    lengths = tuple(each if isinstance(each, int) else len(each.tokens) for each in documents)
    total = sum(lengths)
    tokens, labels = numpy.zeros((1, total), numpy.int64), numpy.zeros((1, total), numpy.int64)
    loss_mask, positions = numpy.zeros((1, total), numpy.float32), numpy.empty((1, total), numpy.int64)
    end = 0
    for each, length in zip(documents, lengths, strict=True):
        here = (0, slice(end, end := end + length))
        positions[here] = numpy.arange(length)
        if not isinstance(each, int):
            tokens[here], labels[here], loss_mask[here] = each
    inputs, targets, mask = map(torch.from_numpy, (tokens, labels, loss_mask))
    return Microbatch(inputs, targets, mask, torch.from_numpy(positions), Documents((lengths,)))


def boundaries(chunks: Sequence[Chunk]) -> Microbatch:
    """A row as a rank needs it that runs attention and has neither tokens nor loss."""
    nothing = torch.empty(0)
    lengths = tuple(part.length for part in parts(chunks))
    return Microbatch(nothing, nothing, nothing, documents=Documents((lengths,)))


class RowReader:
    """Reads the rows of the next steps in threads of its own.

    whole: whether this rank needs tokens and labels; else only boundaries are made. device: where the tensors go.
    """

    def __init__(self, stream: DocumentStream, device: torch.device, *, threads: int = 1, whole: bool = True) -> None:
        self._stream, self._device, self._whole = stream, device, whole
        self._pool = ThreadPoolExecutor(max(1, threads), "rows") if whole else None
        self._asked: deque[tuple[int, list[Future[Microbatch]] | list[Microbatch]]] = deque()

    def ask(self, step: int, workload: Workload, numbers: Sequence[int]) -> None:
        """Begin to read this rank's rows of a step, which come in the order they were asked for.

        workload: its microbatches are the rows. numbers: of each document of the workload, its number in the stream's
        step; higher ones are padding. Raises ValueError where a row and the documents do not agree in their lengths.
        """
        rows = [workload.chunks(microbatch) for microbatch in range(len(workload))]
        if self._pool is None:
            self._asked.append((step, [boundaries(chunks) for chunks in rows]))
            return
        documents = self._stream.step(step)
        lengths = documents.lengths
        futures = []
        for chunks in rows:
            found = parts(chunks)
            for part in found:
                if part.document < len(numbers) and part.length != lengths[numbers[part.document]]:
                    raise ValueError(
                        f"document {part.document} of the plan has {part.length} tokens, in step {step} it has "
                        f"{lengths[numbers[part.document]]}"
                    )
            futures.append(self._pool.submit(self._read, documents, found, tuple(numbers)))
        self._asked.append((step, futures))

    def take(self, step: int) -> list[Microbatch]:
        """The rows of the step that was asked for first. Raises ValueError where that is another."""
        asked, rows = self._asked.popleft()
        if asked != step:
            raise ValueError(f"the rows of step {asked} come next, not those of step {step}")
        read = [each.result() if isinstance(each, Future) else each for each in rows]
        return [self._there(each) for each in read]

    def close(self) -> None:
        """End the threads; what was asked for is not read any more."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _read(self, step: StepDocuments, found: Sequence[Part], numbers: Sequence[int]) -> Microbatch:
        made = row(
            [
                self._stream.read(step, numbers[part.document]) if part.document < len(numbers) else part.length
                for part in found
            ]
        )
        return _changed(made, torch.Tensor.pin_memory) if self._device.type == "cuda" else made

    def _there(self, batch: Microbatch) -> Microbatch:
        return _changed(batch, lambda tensor: tensor.to(self._device, non_blocking=True))


def _changed(batch: Microbatch, change: Callable[[torch.Tensor], torch.Tensor]) -> Microbatch:
    positions = None if batch.position_ids is None else change(batch.position_ids)
    return Microbatch(
        change(batch.tokens), change(batch.labels), change(batch.loss_mask), positions, documents=batch.documents
    )
