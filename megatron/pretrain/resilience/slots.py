"""Files in a host's memory that hold one snapshot each, two of a kind: the older one is written over.

A file says in its header which step it holds. The header is cleared before the file is written over and set when all
is there, so whatever moment its writer is killed at, a file is whole or says that it is not: what a process has stored
in a mapped file stays in the order in which it was stored.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch

from helixpipe.common.host_memory import HEADER, Stamp, stamp_of


class Slot:
    """A file, which may not be there yet. `body` is its memory behind the header, uint8."""

    def __init__(self, path: Path):
        self.path = path
        self.body = torch.empty(0, dtype=torch.uint8)
        if stamp_of(path) is not None:
            self._map()

    @property
    def stamp(self) -> Stamp | None:
        """What the file holds; None if it is not whole."""
        return stamp_of(self.path)

    def reserve(self, size: int) -> None:
        """Make room for a body of so many bytes, which holds nothing if it was of another size. Raises OSError where
        the host has no memory left for it, which would end the process later if it were not asked for now."""
        if self.body.numel() == size:
            return
        self.body = torch.empty(0, dtype=torch.uint8)
        self.path.unlink(missing_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, HEADER.size + size)
        finally:
            os.close(descriptor)
        self._map()

    def begin(self) -> None:
        """Say that the file holds nothing, before it is written over."""
        HEADER.pack_into(self._memory, 0, 0, 0)

    def complete(self, stamp: Stamp) -> None:
        """Say that all of the snapshot is there."""
        HEADER.pack_into(self._memory, 0, *stamp)

    def _map(self) -> None:
        with self.path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self.body = torch.frombuffer(self._memory, dtype=torch.uint8)[HEADER.size :]


class TwoSlots:
    """Two files of a kind in a folder. `kept`: the one that must stay until all ranks have a newer one."""

    def __init__(self, folder: Path, kind: str):
        self.slots = [Slot(folder / f"{kind}-{number}") for number in range(2)]
        self.kept: Slot | None = None

    def whole(self) -> list[tuple[Stamp, int, Slot]]:
        """Return (what it holds, number, slot) of those that hold a snapshot."""
        return [(stamp, n, slot) for n, slot in enumerate(self.slots) if (stamp := slot.stamp) is not None]

    def keep(self, stamp: Stamp) -> None:
        """Keep the one that holds this, if one does."""
        self.kept = next((slot for held, _, slot in self.whole() if held == stamp), None)

    @property
    def other(self) -> Slot:
        """The one that may be written over."""
        return self.slots[1 if self.slots[0] is self.kept else 0]
