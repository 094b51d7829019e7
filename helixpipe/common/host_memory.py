"""Snapshots in a host's memory, which outlive the processes that took them: where they lie, and which are whole.

    /dev/shm/helixpipe-PID-START-SPACE/RANK/own-0, own-1      two of the rank's own, taken in turn
                                            copy-0, copy-1    two of a neighbour's

PID, START and SPACE, of process ids, are those of the launcher (`helixpipe train`, torchrun), RANK is the rank on this
host. A rank that is started again under the same launcher finds there what it had. A folder goes with its launcher: a
job removes those of launchers that are gone. Containers may share the memory and not the ids, so a folder in use is
also locked (`Hold`).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from helixpipe.common.processes import born

ROOT = Path("/dev/shm")
"""Linux's file system in memory; without it there are no snapshots."""

HEADER = struct.Struct("<qq48x")
"""Life and step of what a file holds; step 0: nothing, or not all of it."""

_NAME = "helixpipe-"


class Stamp(NamedTuple):
    """The state after a step. life: how often before the job had begun anew, with other ranks or the same: steps of
    two lives may differ in rounding, and do not mix."""

    life: int
    step: int


def folder_of(launcher: int) -> Path:
    """Return the folder of a launcher's ranks. launcher: its process id."""
    return ROOT / f"{_NAME}{launcher}-{born(launcher)}-{_space()}"


def _space() -> str:
    """Return what tells this container's process ids from another's."""
    with suppress(OSError):  # not Linux
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    return "0"


class Hold:
    """Locks a folder, which must be there, until `close` or the end of the process."""

    def __init__(self, folder: Path):
        self._descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def close(self) -> None:
        """Let go of it; again: do nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()


def remove_orphans() -> None:
    """Remove the folders of launchers that are gone: nobody holds them, nor, where it can be known, is their launcher
    there."""
    for folder in ROOT.glob(f"{_NAME}*-*-*"):
        pid, start, space = folder.name.removeprefix(_NAME).split("-", 2)
        lives = space == _space() and pid.isdecimal() and born(int(pid)) == start
        if not lives and not _is_held(folder):
            remove(folder)


def _is_held(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # it is gone, or another user's
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # another user's is not ours to remove


def stamp_of(path: Path) -> Stamp | None:
    """Return what a file holds; None if it is not there, or not whole."""
    with suppress(OSError, struct.error), path.open("rb") as file:
        stamp = Stamp(*HEADER.unpack(file.read(HEADER.size)))
        return stamp if stamp.step else None
    return None


def newest(folder: Path) -> Stamp:
    """Return the newest stamp of a launcher's ranks' own snapshots; (0, 0) without any."""
    stamps: Iterator[Stamp | None] = (stamp_of(path) for path in folder.glob("*/own-[01]"))
    return max((stamp for stamp in stamps if stamp is not None), default=Stamp(0, 0))
