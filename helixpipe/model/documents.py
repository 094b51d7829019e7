"""Tracks where documents lie in a microbatch: attention stays within a document, and each has its own positions.

Documents lie one after another in every sample. That is data of a microbatch, not of the schedule: any program runs it,
and a chunk of a sequence may begin and end inside documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

Ends = tuple[Tensor, Tensor, int, int]
"""Of a sample's parts: the first rows of queries and of keys of each, and the end (int32), and the most of both."""


class Span(NamedTuple):
    """The part of a document that lies in a chunk.

    sample: of the microbatch. first, end: its rows in the chunk. key, key_end: the rows of its keys among those that
    the chunk is given, from the document's first token, or the first that one of the part sees, to the part's last.
    """

    sample: int
    first: int
    end: int
    key: int
    key_end: int

    @property
    def earlier(self) -> int:
        """Tokens of the document before the part whose keys are among these."""
        return self.key_end - self.key - (self.end - self.first)


@dataclass(frozen=True)
class Spans:
    """The parts of documents in a chunk, sample by sample and in their order.

    since: the first row of the microbatch whose key any of them needs: keys are those from there to the chunk's end.
    """

    since: int
    parts: tuple[Span, ...]
    _ends: dict[int, Ends] = field(default_factory=dict, repr=False)

    def of(self, sample: int) -> tuple[Span, ...]:
        return tuple(part for part in self.parts if part.sample == sample)

    def ends(self, sample: int, device: torch.device) -> Ends:
        """For kernels of parts side by side; on the device once, whatever layers ask."""
        if sample not in self._ends:
            parts = self.of(sample)
            lengths = [part.end - part.first for part in parts], [part.key_end - part.key for part in parts]
            on_host = torch.tensor([list(accumulate(each, initial=0)) for each in lengths], dtype=torch.int32)
            if device.type == "cuda":
                on_host = on_host.pin_memory().to(device, non_blocking=True)
            self._ends[sample] = on_host[0], on_host[1], max(lengths[0]), max(lengths[1])
        return self._ends[sample]


class Documents:
    """Of one microbatch. lengths: for each of its samples those of its documents, in their order, as many tokens in
    every sample. device: of the positions. Raises ValueError for lengths below 1, and samples not equally long."""

    def __init__(self, lengths: Sequence[Sequence[int]], device: torch.device | None = None):
        self.lengths = tuple(tuple(sample) for sample in lengths)
        if len({sum(sample) for sample in self.lengths}) != 1 or min(chain(*self.lengths)) < 1:
            raise ValueError(f"no lengths of documents in samples that are equally long: {self.lengths}")
        self._ends = [list(accumulate(sample)) for sample in self.lengths]
        self._known: dict[tuple[int, int, int | None], Spans] = {}
        self._device = device
        self._positions: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Of each sample."""
        return self._ends[0][-1]

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(chain(*self.lengths))

    def positions(self) -> Tensor:
        """[s, b] int64: of each token in its document, from 0 on."""
        if self._positions is None:
            rows = [torch.cat([torch.arange(length) for length in sample]) for sample in self.lengths]
            positions = torch.stack(rows, dim=1)
            if self._device is not None and self._device.type == "cuda":
                positions = positions.pin_memory().to(self._device, non_blocking=True)
            self._positions = positions
        return self._positions

    def spans(self, offset: int, length: int, left: int | None = None) -> Spans:
        """Of the chunk of `length` tokens that begins at `offset` of every sample. left: tokens before its own that a
        token sees; None: all of its document."""
        key = offset, length, left
        if key not in self._known:
            self._known[key] = self._spans(offset, offset + length, 0 if left is None else offset - left)
        return self._known[key]

    def _spans(self, offset: int, end: int, seen: int) -> Spans:
        """seen: the first token that one of the chunk may see."""
        parts = [
            (sample, max(last - length, offset), min(last, end), max(last - length, seen))
            for sample, (ends, lengths) in enumerate(zip(self._ends, self.lengths, strict=True))
            for last, length in zip(ends, lengths, strict=True)
            if last > offset and last - length < end
        ]
        since = min(start for *_, start in parts)
        return Spans(
            since,
            tuple(
                Span(sample, first - offset, last - offset, start - since, last - since)
                for sample, first, last, start in parts
            ),
        )
