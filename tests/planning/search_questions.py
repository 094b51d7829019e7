"""Small questions for the search."""

from __future__ import annotations

from dataclasses import replace

from helixpipe.costs.hardware import GIB, HARDWARE
from helixpipe.costs.models import MODELS, Layout
from helixpipe.planning.search.space import Question
from schedules import CATALOGUE

SMALL = replace(MODELS["weipipe-1024"], layers=8, seq_length=16384)


def question(
    gpus: int = 4, limit: float = 70.0, schedules: str = "", sequences: int = 8, **changed: object
) -> Question:
    """Return what is asked of a few GPUs, four to a node."""
    given = Question(
        CATALOGUE,
        tuple(schedules.split() or CATALOGUE),
        SMALL,
        replace(HARDWARE["a100-80"], gpus_per_node=4),
        gpus,
        sequences,
        Layout(sequence_parallel=True),
        limit * GIB,
    )
    return replace(given, **changed)
