"""The room that solvers leave beside what units keep."""

from __future__ import annotations

from collections.abc import Iterable

from helixpipe.lowering.bound import BoundCosts
from helixpipe.program.tasks import Buffer

LARGEST = 16
"""Unlike chunks that are looked at, those of the most tokens: what lies around an op grows with them."""


def beside_units(bound: BoundCosts, stages: Iterable[int]) -> float:
    """Return the memory that a rank of these stages needs around an op beside its units', in the costs' unit: the op's
    workspace, what it recomputes inside, and the activation and the gradient that enter and leave at the stage's cuts.

    An estimate for solvers that count memory op by op; the exact lifetimes are those of the memory sweep.
    """
    extents = bound.program.workload.extents
    unlike = {extents[number][chunk]: (number, chunk) for number, chunk in bound.program.workload.units()}
    largest = sorted(unlike, key=lambda extents: sum(part.tokens for part in extents))[-LARGEST:]

    def around(stage: int, unit: tuple[int, int]) -> float:
        inside = sum(bound.size(Buffer(kind, 0, stage, *unit)) for kind in ("workspace", "recomputed"))
        return inside + sum(entering(bound, stage, unit)) + sum(leaving(bound, stage, unit))

    return max(around(stage, unit) for stage in stages for unit in map(unlike.__getitem__, largest))


def entering(bound: BoundCosts, stage: int, unit: tuple[int, int] = (0, 0)) -> list[float]:
    """Return the sizes of the activation and the gradient that enter a unit at its stage's cuts."""
    buffers = [Buffer("activation", 0, stage, *unit)] if stage > 0 else []
    buffers += [Buffer("gradient", 0, stage, *unit)] if stage < len(bound.program.stages) - 1 else []
    return [*map(bound.size, buffers)]


def leaving(bound: BoundCosts, stage: int, unit: tuple[int, int] = (0, 0)) -> list[float]:
    """Return the sizes of the activation and the gradient that leave it."""
    buffers = [Buffer("gradient", 0, stage - 1, *unit)] if stage > 0 else []
    buffers += [Buffer("activation", 0, stage + 1, *unit)] if stage < len(bound.program.stages) - 1 else []
    return [*map(bound.size, buffers)]
