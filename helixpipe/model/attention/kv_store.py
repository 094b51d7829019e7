"""Keys and values of a microbatch that runs chunk by chunk: one buffer each for all its rows and every layer.

Chunks run forward in their order and backward in reverse. The forward of a chunk writes its keys and values into the
buffers and attends to all rows so far (`UnitKeyValues.join`). In its backward the gradient of the rows before it goes
to gradient buffers, where it is summed over all later chunks, and what these have summed up of its own rows is added to
its own gradient (`_Joined`). So no graph reaches over two chunks.

Where a microbatch has several documents, a chunk needs the rows from the first token of the document that it begins in.

What a graph saves are views of the buffers with version counters of their own: a later chunk writes other rows of the
same memory, which autograd must not mistake for a change of what was saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from helixpipe.model.byte_count import ByteCount


class KeyValueStore(ByteCount):
    """The buffers of one pipeline rank.

    fp32_gradients: sum the gradients in float32 where keys and values are of half precision. rows_apart: over how many
    ranks the rows of every chunk are spread, which each store their own.
    """

    def __init__(self, fp32_gradients: bool = False, rows_apart: int = 1):
        super().__init__()
        self._fp32_gradients = fp32_gradients
        self.rows_apart = rows_apart
        self._sequences: dict[tuple[int, int], _Sequence] = {}

    def unit(self, microbatch: int, offset: int, length: int, seq_length: int) -> UnitKeyValues:
        """The keys and values as one chunk sees them, whose `length` tokens begin at `offset`. It keeps nothing
        itself: asking again for the same chunk gives an equal object."""
        apart = self.rows_apart
        return UnitKeyValues(self, microbatch, offset // apart, length // apart, seq_length // apart)

    def tensors(self) -> Iterator[Tensor]:
        """All buffers that are there now."""
        for sequence in self._sequences.values():
            yield from sequence.buffers
            yield from sequence.gradients

    def get(self, microbatch: int, layer: int) -> _Sequence:
        """Raises RuntimeError when the layer has no keys and values of this microbatch."""
        sequence = self._sequences.get((microbatch, layer))
        if sequence is None:
            raise RuntimeError(f"no keys and values of microbatch {microbatch} in layer {layer}")
        return sequence

    def get_or_make(self, microbatch: int, layer: int, seq_length: int, key: Tensor, value: Tensor) -> _Sequence:
        """The buffers of a layer; at the first chunk new ones, for sequences of tensors such as `key` and `value`."""
        if (microbatch, layer) not in self._sequences:
            buffers = tuple(
                torch.empty((seq_length, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
                for tensor in (key, value)
            )
            self.count(sum(buffer.nbytes for buffer in buffers))
            self._sequences[microbatch, layer] = _Sequence(buffers)
        return self._sequences[microbatch, layer]

    def free(self, microbatch: int, layer: int) -> None:
        """Let go of a layer's buffers."""
        sequence = self._sequences.pop((microbatch, layer))
        self.count(-sum(buffer.nbytes for buffer in (*sequence.buffers, *sequence.gradients)))

    def make_gradients(self, sequence: _Sequence, rows: int) -> None:
        """Allocate the gradients of a sequence's first rows, all zero."""
        for buffer in sequence.buffers:
            dtype = torch.promote_types(buffer.dtype, torch.float32) if self._fp32_gradients else buffer.dtype
            sequence.gradients += (torch.zeros_like(buffer[:rows], dtype=dtype),)
        self.count(sum(gradient.nbytes for gradient in sequence.gradients))

    def layers(self, microbatch: int) -> list[int]:
        """Layers that hold keys and values of a microbatch."""
        return [layer for number, layer in self._sequences if number == microbatch]


class _Sequence:
    """Keys and values of one microbatch in one layer, as pairs."""

    def __init__(self, buffers: tuple[Tensor, ...]):
        self.buffers = buffers
        """Each [s, b, groups, d]."""
        self.gradients: tuple[Tensor, ...] = ()
        """Each [rows before the last chunk, b, groups, d], from the backward of the last chunk on."""
        self.filled = 0
        """Rows written so far."""
        self.starts: list[int] = []
        """First row of each chunk that has been written."""
        self.finished = buffers[0].size(0)
        """First row of the chunk that was the last to finish its backward."""


class UnitKeyValues(NamedTuple):
    """Keys and values of a microbatch's sequences as one chunk sees them, in all layers of a pipeline rank.

    The order of calls: `join` in every layer's forward, again if it is recomputed; then `begin_backward` of layers that
    lie in one autograd graph, its backward, and `finish` of the same layers. In evaluation `join` and then `release`.
    """

    store: KeyValueStore
    microbatch: int
    offset: int
    length: int
    seq_length: int

    def join(self, layer: int, key: Tensor, value: Tensor, since: int = 0) -> tuple[Tensor, Tensor]:
        """The chunk's key and value, [length, b, groups, d], to all from row `since`, which is not after its first, up
        to its end, [offset - since + length, b, groups, d].

        What is returned are views of the buffers. Rows are written once: recomputed ones must equal those that later
        chunks may have seen, and are taken from the buffers. A leaf that is given loses its memory for that of the
        buffers. Raises RuntimeError when an earlier chunk is missing.
        """
        if key.size(0) != self.length or value.size(0) != self.length:
            raise RuntimeError(f"{self.length} keys and values were expected, not {key.size(0)} and {value.size(0)}")
        sequence = self.store.get_or_make(self.microbatch, layer, self.seq_length, key, value)
        end = self.offset + self.length
        if sequence.filled < self.offset:
            raise RuntimeError(f"tokens {sequence.filled} to {self.offset - 1} must run before those from there on")
        if sequence.filled < end:
            for buffer, tensor in zip(sequence.buffers, (key, value), strict=True):
                buffer[self.offset : end].copy_(tensor.detach())
            sequence.filled = end
            sequence.starts.append(self.offset)
        keys, values = sequence.buffers
        for buffer, tensor in ((keys, key), (values, value)):
            if tensor.is_leaf and tensor.requires_grad:
                tensor.data = buffer[self.offset : end].data
        if not torch.is_grad_enabled() or not (key.requires_grad or value.requires_grad):
            return keys[since:end].data, values[since:end].data
        joined: tuple[Tensor, Tensor] = _Joined.apply(key, value, sequence, since, self.offset, end)
        return joined

    def chunks(self, layer: int) -> tuple[int, ...]:
        """The first tokens of the chunks up to this one, once it has been joined; of all ranks' rows."""
        starts = self.store.get(self.microbatch, layer).starts
        return tuple(start * self.store.rows_apart for start in starts if start <= self.offset)

    def chunk_of(self, layer: int, token: int) -> int:
        """The first token of the chunk that has this one, which is not after this chunk's first; of all ranks' rows."""
        if not self.offset:
            return 0
        starts = (*self.store.get(self.microbatch, layer).starts, self.offset)
        apart = self.store.rows_apart
        return max(start for start in starts if start * apart <= token) * apart

    def begin_backward(self, layers: Sequence[int]) -> None:
        """Before the backward of a graph that holds these layers: the last chunk's makes the gradient buffers. Raises
        RuntimeError when a later chunk has not finished.
        """
        end = self.offset + self.length
        for layer in layers:
            sequence = self.store.get(self.microbatch, layer)
            if sequence.finished != end:
                raise RuntimeError(f"tokens from {end} on must finish before those from {self.offset} on")
            if end == self.seq_length and self.offset > 0:
                self.store.make_gradients(sequence, self.offset)

    def finish(self, layers: Sequence[int]) -> None:
        """After the backward of a graph that holds these layers: let go of the graph, and after the first chunk's of
        the buffers."""
        for layer in layers:
            sequence = self.store.get(self.microbatch, layer)
            sequence.finished = self.offset
            if self.offset == 0:
                self.store.free(self.microbatch, layer)

    def release(self) -> None:
        """In evaluation, after the forward of layers: let go of the buffers that are full and not needed again."""
        for layer in self.store.layers(self.microbatch):
            if self.store.get(self.microbatch, layer).filled == self.seq_length:
                self.store.free(self.microbatch, layer)


class _Joined(torch.autograd.Function):
    """A chunk's key and value behind those of the rows from `since` on, as they all lie in the buffers already.

    One function for both: each of Python's costs the host as much as several kernels.
    """

    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, sequence: _Sequence, since: int, offset: int, end: int
    ) -> tuple[Tensor, Tensor]:
        ctx.place = sequence, since, offset, end
        keys, values = sequence.buffers
        return keys[since:end].data, values[since:end].data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sequence, since, offset, end = ctx.place
        own: list[Tensor] = []
        for gradient, sums in zip(gradients, sequence.gradients or (None, None), strict=True):
            if offset > since:
                sums[since:offset] += gradient[: offset - since]
            rows = gradient[offset - since :]
            later = sums is not None and end <= sums.size(0)  # the last chunk has none behind it
            own.append(rows + sums[offset:end].to(rows.dtype) if later else rows)
        return *own, None, None, None, None


class Stored(torch.autograd.Function):
    """Key and value as they lie in buffers of more rows, so that nothing needs the tensors they were copied from.

    Both at once: a function of Python's costs the host as much as several kernels.
    """

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys.data, values.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], gradients[1], None, None


class Join(torch.autograd.Function):
    """Rows of keys and values and those that follow them, as they lie in the buffers already."""

    @staticmethod
    def forward(
        ctx: Any, keys_before: Tensor, values_before: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.offset = keys_before.size(0)
        return keys.data, values.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        keys, values = gradients
        return keys[: ctx.offset], values[: ctx.offset], keys[ctx.offset :], values[ctx.offset :], None, None
