"""The host's memory for activations beside a simulated CUDA: each part of a block by itself, with what was done before
with the bytes that it has."""

from __future__ import annotations

from typing import NamedTuple

import torch

from helixpipe.runtime.arena import Allocation, Arena
from helixpipe.runtime.copies import StreamEngine
from helixpipe.runtime.offload import Offloader
from tests.runtime.happens_before.cuda import Simulation
from tests.runtime.happens_before.memory import Memory


class _Taken(NamedTuple):
    """A part that was given out. start, end: bytes of its block."""

    block: int
    start: int
    end: int
    memory: Memory


class WatchedArena(Arena):
    """Bytes that are given out again know who used them last: nothing but waits orders two of their users."""

    def __init__(self, simulation: Simulation):
        super().__init__(make_block=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
        self._memories = simulation.memories
        self._taken: list[_Taken] = []
        self.again = 0  # parts in bytes that had been given out before

    def take(self, nbytes: int) -> Allocation:
        part = super().take(nbytes)
        with torch._C._DisableTorchDispatch():
            block = self._blocks[part.block].numpy()
            part.tensor = torch.from_numpy(block[part.offset : part.offset + nbytes])  # a storage of its own
        memory = self._memories.allocated(part.tensor.untyped_storage(), pinned=True)
        start, end = part.offset, part.offset + part.size
        before = [t for t in self._taken if t.block == part.block and t.start < end and start < t.end]
        for taken in before:
            for table, old in ((memory.reads, taken.memory.reads), (memory.writes, taken.memory.writes)):
                for actor, access in old.items():
                    table[actor] = max(table.get(actor, (0, "")), access)
        self.again += bool(before)
        self._taken.append(_Taken(part.block, start, end, memory))
        return part


def watched_offloader(simulation: Simulation, device: torch.device) -> Offloader:
    """With the two streams of a device."""
    offloader = Offloader(StreamEngine(device))
    offloader.arena = WatchedArena(simulation)
    for inward, stream in offloader.engine._streams.items():  # type: ignore[attr-defined]
        stream.actor.name = f"stream of copies {'in' if inward else 'out'}"
    return offloader
