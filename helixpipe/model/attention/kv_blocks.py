"""Keys and values of a microbatch that runs chunk by chunk, in a block for each chunk and layer.

Where one buffer for all rows (`kv_store`) is there from the first forward to the last backward, a block is made by its
chunk's forward, or comes from the rank that made it, and goes when the last backward that reads it here has run; the
sums of its gradients are made by the first backward that adds to them, and go into the chunk's own. Attention reads
blocks one by one (`block_attention`), so no graph keeps any of them.

When a block goes the program's graph says: see `lowering.passes.keys_values`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from helixpipe.model.byte_count import ByteCount

Pair = tuple[Tensor, Tensor]
"""Of keys and of values, each [rows, b, groups, d]."""


class Block(NamedTuple):
    """first: its first row in the microbatch."""

    first: int
    key: Tensor
    value: Tensor


class KeyValueBlocks(ByteCount):
    """The keys and values of one pipeline rank, in blocks. fp32_gradients: sum gradients in float32 where keys and
    values are of half precision."""

    def __init__(self, fp32_gradients: bool = False):
        super().__init__()
        self._fp32_gradients = fp32_gradients
        self._blocks: dict[tuple[int, int], dict[int, Pair]] = {}  # (microbatch, layer) -> first row -> block
        self._gradients: dict[tuple[int, int, int], Pair] = {}  # (microbatch, layer, first row)

    def unit(self, microbatch: int, offset: int, length: int, seq_length: int) -> UnitBlocks:
        """The blocks as one chunk sees them, whose `length` tokens begin at `offset`."""
        return UnitBlocks(self, microbatch, offset, length)

    def tensors(self) -> Iterator[Tensor]:
        """All that are there now."""
        for blocks in self._blocks.values():
            for pair in blocks.values():
                yield from pair
        for pair in self._gradients.values():
            yield from pair

    def put(self, microbatch: int, layer: int, first: int, key: Tensor, value: Tensor) -> Pair:
        """The block from that row on: the one that is there, else these, which from now on are the store's."""
        blocks = self._blocks.setdefault((microbatch, layer), {})
        if first not in blocks:
            blocks[first] = key, value
            self.count(key.nbytes + value.nbytes)
        return blocks[first]

    def has(self, microbatch: int, layer: int, first: int) -> bool:
        """Whether a block is there."""
        return first in self._blocks.get((microbatch, layer), {})

    def get(self, microbatch: int, layer: int, first: int) -> Pair:
        """Raises RuntimeError when it is not there."""
        block = self._blocks.get((microbatch, layer), {}).get(first)
        if block is None:
            raise RuntimeError(f"no keys and values of microbatch {microbatch} from row {first} on in layer {layer}")
        return block

    def before(self, microbatch: int, layer: int, row: int) -> list[Block]:
        """The blocks of all rows before one, in their order. Raises RuntimeError when one is missing."""
        blocks, end = [], 0
        for first, (key, value) in sorted(self._blocks.get((microbatch, layer), {}).items()):
            if first >= row or first != end:
                break
            blocks.append(Block(first, key, value))
            end = first + key.size(0)
        if end != row:
            raise RuntimeError(f"tokens {end} to {row - 1} must run before those from {row} on")
        return blocks

    def drop(self, microbatch: int, layers: Sequence[int], first: int) -> None:
        """Let go of a block in some layers."""
        for layer in layers:
            blocks = self._blocks[microbatch, layer]
            self.count(-sum(tensor.nbytes for tensor in blocks.pop(first)))
            if not blocks:
                del self._blocks[microbatch, layer]

    def clear(self) -> None:
        """Let go of all."""
        self._blocks.clear()
        self._gradients.clear()
        self.count(-self.bytes_alive())

    def gradient_type(self, dtype: torch.dtype) -> torch.dtype:
        """Of the sums of gradients of keys and values of a type."""
        return torch.promote_types(dtype, torch.float32) if self._fp32_gradients else dtype

    def gradients(self, microbatch: int, layer: int, first: int) -> Pair:
        """The sums of a block's gradients, zero if nothing has been added yet."""
        place = microbatch, layer, first
        if place not in self._gradients:
            key, value = self.get(*place)
            self._make(place, torch.zeros_like(key, dtype=self.gradient_type(key.dtype)),
                       torch.zeros_like(value, dtype=self.gradient_type(value.dtype)))  # fmt: skip
        return self._gradients[place]

    def add_gradients(self, microbatch: int, layer: int, first: int, key: Tensor, value: Tensor) -> None:
        """Add sums that another rank has made; the tensors are the store's from now on."""
        place = microbatch, layer, first
        if place in self._gradients:
            for total, more in zip(self._gradients[place], (key, value), strict=True):
                total.add_(more)
        else:
            self._make(place, key, value)

    def take_gradients(self, microbatch: int, layer: int, first: int) -> Pair | None:
        """The sums of a block's gradients, which leave the store; None if there are none."""
        pair = self._gradients.pop((microbatch, layer, first), None)
        if pair is not None:
            self.count(-sum(tensor.nbytes for tensor in pair))
        return pair

    def _make(self, place: tuple[int, int, int], key: Tensor, value: Tensor) -> None:
        self._gradients[place] = key, value
        self.count(key.nbytes + value.nbytes)


class UnitBlocks(NamedTuple):
    """Keys and values of a microbatch as one chunk sees them, in all layers of a pipeline rank."""

    store: KeyValueBlocks
    microbatch: int
    offset: int
    length: int

    def keep(self, layer: int, key: Tensor, value: Tensor) -> Pair:
        """The chunk's block of a layer, made of these if it is not there yet: recomputed ones must equal those that
        later chunks have seen. A leaf that is given loses its memory for the block's. Raises RuntimeError for tensors
        of another length."""
        if key.size(0) != self.length or value.size(0) != self.length:
            raise RuntimeError(f"{self.length} keys and values were expected, not {key.size(0)} and {value.size(0)}")
        if self.store.has(self.microbatch, layer, self.offset):
            block = self.store.get(self.microbatch, layer, self.offset)
        else:
            # In one memory: a leaf that has all of what it lies in is emptied where it is to be made again.
            both = torch.cat((key.detach().reshape(-1), value.detach().reshape(-1)))
            first, second = both.split((key.numel(), value.numel()))
            block = self.store.put(self.microbatch, layer, self.offset, first.view(key.shape), second.view(value.shape))
        for tensor, kept in zip((key, value), block, strict=True):
            if tensor.is_leaf and tensor.requires_grad:
                tensor.data = kept.data
        return block

    def blocks(self, layer: int) -> list[Block]:
        """Return the blocks of all rows before the chunk, then its own."""
        own = self.store.get(self.microbatch, layer, self.offset)
        return [*self.store.before(self.microbatch, layer, self.offset), Block(self.offset, *own)]

    def begin_backward(self, layers: Sequence[int]) -> None:
        """Do nothing: attention's backward makes what it needs."""

    def finish(self, layers: Sequence[int]) -> None:
        """Free what the graph says goes after a backward."""

    def release(self) -> None:
        """The same of a forward in evaluation."""
