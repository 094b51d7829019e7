"""The device's memory that activations and gradients are received into: taken once, used again message after message.

A message's memory is in use while anything refers to it: the receipt, the op that takes it, what autograd saved of it,
and a send that passes it on. Whose references have all gone is given to the next message of as many bytes, so from the
second step of a plan on nothing is allocated for them. It costs little, since what comes is mostly kept for a backward:
on the fake device the peak of a step is at most 1.1 % above that with memory from the allocator.

That keeps torch's own care out of it, too: its unbatched sends and receives call `Tensor.record_stream`, by which
memory that goes back to the allocator is held until the communicator has got past all that was asked of it by then
(ProcessGroupNCCL::pointToPoint in torch/csrc/distributed/c10d). This memory does not go back.
"""

from __future__ import annotations

import sys
from collections import defaultdict

import torch

STEPS_KEPT = 2
"""Steps after which memory that no message had is given back: sizes of steps before, of documents or of a ramp-up."""


class _KeptMemory:
    """Memory for one tensor. used: the step it was last used in."""

    def __init__(self, size: int, device: torch.device):
        self._storage = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
        self._unused = self._references()
        self.used = 0

    @property
    def free(self) -> bool:
        return self._references() == self._unused

    def tensor(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in this memory, in a storage of its own size: who keeps parts of others copies them."""
        tensor = torch.empty(0, dtype=dtype, device=self._storage.device)
        return tensor.set_(self._storage, 0, shape)  # type: ignore[call-overload]

    def _references(self) -> tuple[int, int]:
        """Return how many tensors, and how many Python objects, refer to the storage: torch has one Python object for
        it, to which others may refer."""
        tensors: int = torch._C._storage_Use_Count(self._storage._cdata)
        return tensors, sys.getrefcount(self._storage)


class ReceiveBuffers:
    """Memory of a device for received tensors, each with a storage of its own size. reserved: bytes taken."""

    def __init__(self, device: torch.device):
        self.device, self.reserved = device, 0
        self._by_size: dict[int, list[_KeptMemory]] = defaultdict(list)
        self._step = 0

    def take(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of undefined values in memory that nothing uses. The current stream may still be about to use
        it: whoever writes into it waits for what that stream has got to."""
        size = shape.numel() * dtype.itemsize
        buffers = self._by_size[size]
        buffer = next((each for each in buffers if each.free), None)
        if buffer is None:
            buffer = _KeptMemory(size, self.device)
            buffers.append(buffer)
            self.reserved += size
        buffer.used = self._step
        return buffer.tensor(shape, dtype)

    def end_step(self) -> None:
        """Give back memory that nothing uses and no message has had for some steps."""
        self._step += 1
        for size in list(self._by_size):
            buffers = self._by_size.pop(size)
            kept = [each for each in buffers if self._step - each.used <= STEPS_KEPT or not each.free]
            self.reserved -= size * (len(buffers) - len(kept))
            if kept:
                self._by_size[size] = kept

    def clear(self) -> None:
        self._by_size.clear()
        self.reserved = 0
