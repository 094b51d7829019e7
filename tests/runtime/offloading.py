"""An offloader that spoils what it says is gone."""

from __future__ import annotations

import random

from helixpipe.program.program import Unit
from helixpipe.runtime.copies import ThreadEngine
from helixpipe.runtime.offload import Offloader

SPOILED = 0xFF
"""Bytes of it are NaN in every type of floating point numbers."""


class Spoiling(Offloader):
    """Fills the device's memory when it is gone, and the host's when all is back: who still reads it reads NaN."""

    def gone(self, unit: Unit) -> None:
        away = self._away[unit]
        away.leaving.wait()
        for storage in away.storages:
            storage.bytes().fill_(SPOILED)
        super().gone(unit)

    def back(self, unit: Unit) -> None:
        away = self._away[unit]
        away.coming.wait()
        for part in away.parts:
            part.tensor.fill_(SPOILED)
        super().back(unit)


def spoiling(seed: int) -> Offloader:
    """With copies that come late, each by a time of its own."""
    delays = random.Random(seed)
    return Spoiling(ThreadEngine(delay=lambda: delays.choice((0.0, 0.0, 0.002, 0.01))))
