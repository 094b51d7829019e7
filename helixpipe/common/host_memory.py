"""Snapshots in a host's memory, which outlive the processes that took them: where they lie, and which are whole.

    /dev/shm/helixpipe-PID-START/RANK/own-0, own-1      two of the rank's own, taken in turn
                                      copy-0, copy-1    two of a neighbour's

PID and START are those of the launcher (`helixpipe train`, torchrun), RANK is the rank on this host. A rank that is
started again under the same launcher finds there what it had. A folder goes with its launcher: a job removes those of
launchers that are gone.
"""

from __future__ import annotations

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
    return ROOT / f"{_NAME}{launcher}-{born(launcher)}"


def remove_orphans() -> None:
    """Remove the folders of launchers that are gone."""
    for folder in ROOT.glob(f"{_NAME}*-*"):
        pid, _, start = folder.name.removeprefix(_NAME).partition("-")
        if pid.isdecimal() and born(int(pid)) != start:
            remove(folder)


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
