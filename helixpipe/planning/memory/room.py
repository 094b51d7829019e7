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
    last, extents = len(bound.program.stages) - 1, bound.program.workload.extents
    unlike = {extents[number][chunk]: (number, chunk) for number, chunk in bound.program.workload.units()}
    largest = sorted(unlike, key=lambda extents: sum(part.tokens for part in extents))[-LARGEST:]

    def around(stage: int, unit: tuple[int, int]) -> float:
        buffers = [Buffer(kind, 0, stage, *unit) for kind in ("workspace", "recomputed")]
        if stage > 0:
            buffers += [Buffer("activation", 0, stage, *unit), Buffer("gradient", 0, stage - 1, *unit)]
        if stage < last:
            buffers += [Buffer("activation", 0, stage + 1, *unit), Buffer("gradient", 0, stage, *unit)]
        return sum(map(bound.size, buffers))

    return max(around(stage, unit) for stage in stages for unit in map(unlike.__getitem__, largest))
