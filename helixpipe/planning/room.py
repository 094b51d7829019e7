"""The room that solvers leave beside what units keep. No torch here."""

from __future__ import annotations

from collections.abc import Iterable

from helixpipe.lowering.bound import BoundCosts
from helixpipe.program.tasks import Buffer


def beside_units(bound: BoundCosts, stages: Iterable[int], chunks: int = 1) -> float:
    """What a rank of these stages needs around an op beside what its units keep, in the costs' unit: the op's
    workspace, what it recomputes inside, and the activation and the gradient that come in and go out at the stage's
    cuts.

    An estimate for solvers that count memory op by op; what is alive when in the end, the memory sweep says.
    """
    last = len(bound.program.stages) - 1

    def around(stage: int, chunk: int) -> float:
        buffers = [Buffer(kind, 0, stage, 0, chunk) for kind in ("workspace", "recomputed")]
        if stage > 0:
            buffers += [Buffer("activation", 0, stage, 0, chunk), Buffer("gradient", 0, stage - 1, 0, chunk)]
        if stage < last:
            buffers += [Buffer("activation", 0, stage + 1, 0, chunk), Buffer("gradient", 0, stage, 0, chunk)]
        return sum(map(bound.size, buffers))

    return max(around(stage, chunk) for stage in stages for chunk in range(chunks))
