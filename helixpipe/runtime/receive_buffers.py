"""The device's memory that activations and gradients are received into: taken once, used again message after message,
by steps of other lengths as well.

A message gets a part of one block. The part is in use while anything refers to its storage: the receipt, the op that
takes it, what autograd saved of it, and a send that passes it on; then it is given out again, whole or in parts. A step
that finds no room takes further blocks, and when it has ended there is one block for all that was in use at once.
So nothing is allocated for messages but by a step that needs more than those before it, and what is kept is what the
largest needed. It costs little, since what comes is mostly kept for a backward: all that was in use at once, and
`APART` times as much where messages of a step differ from each other and from those of the step before, since free
parts then lie apart.

Each tensor has a storage of its own (through DLPack), which tells when it has gone, and of which it is the whole: who
keeps parts of others copies them. That keeps torch's own care out of it, too: its unbatched sends and receives call
`Tensor.record_stream`, by which memory that goes back to the allocator is held until the communicator has got past all
that was asked of it by then (ProcessGroupNCCL::pointToPoint in torch/csrc/distributed/c10d).
"""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from helixpipe.runtime.arena import Allocation, Arena

APART = 1.5
"""With it none of 2,400 steps of log-normal lengths took memory but for more at once than before; else one in 80."""


class ReceiveBuffers:
    """Memory of a device for received tensors, each with a storage of its own size."""

    def __init__(self, device: torch.device):
        self._device = device
        self.clear()

    def clear(self) -> None:
        """Forget the memory; tensors in it keep it alive."""
        self._arena = Arena(0, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=self._device), growth=0.0)
        self._given: list[tuple[StorageWeakRef, Allocation]] = []
        self._beyond = 0  # the most bytes in use at once outside the first block
        self._sizes: tuple[set[int], set[int]] = set(), set()  # of messages in the step before and in this one

    @property
    def reserved(self) -> int:
        """Bytes taken from the device."""
        return self._arena.reserved

    @property
    def used(self) -> int:
        """Bytes of them given out, as known when a tensor was last taken."""
        return self._arena.used

    def take(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of undefined values in memory that nothing uses. The current stream may still be about to use
        it: whoever writes into it waits for what that stream has got to."""
        self._take_back()
        part = self._arena.take(shape.numel() * dtype.itemsize)
        tensor = from_dlpack(to_dlpack(part.tensor.view(dtype).view(shape)))
        self._given.append((StorageWeakRef(tensor.untyped_storage()), part))
        self._sizes[1].add(part.size)
        if part.block > 0:
            self._beyond = max(self._beyond, sum(each.size for _, each in self._given if each.block > 0))
        return tensor

    def end_step(self) -> None:
        """Make one block of those of the step, unless something in them is still in use."""
        self._take_back()
        before, now = self._sizes
        self._sizes = now, set()
        wanted = self._arena.first + self._beyond
        if before and now - before and len(now) > 1:
            wanted = max(wanted, int(APART * self._arena.peak))
        if wanted > self._arena.first and not self._given:
            self._arena.merge(wanted)
            self._beyond = 0

    def _take_back(self) -> None:
        """Take back what nothing refers to."""
        given = []
        for each in self._given:
            if each[0].expired():
                self._arena.give_back(each[1])
            else:
                given.append(each)
        self._given = given
