"""The device memory that messages are received into stays from step to step, beside whatever else there is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helixpipe.costs.hardware import find_hardware
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Layout, find_model
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.lower import lower
from helixpipe.lowering.project import LoweredProgram
from helixpipe.simulate.curve import moments
from helixpipe.simulate.memory import rank_memory
from helixpipe.simulate.simulator import simulate
from helixpipe.simulate.sweep import Sweep, peaks
from schedules import Shape, build

TOKENS = 4096
COSTS = ModelCosts(find_model("llama2-7b"), find_hardware("h100"), Layout(), TOKENS, fused_adam=False)
MESSAGE = TOKENS * 4096 * 2


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 9])
def test_of_1f1b(ranks: int, microbatches: int) -> None:
    """What came for the microbatches in flight and the next one, and a gradient."""
    lowered = lower(build("1f1b", Shape(ranks, microbatches, 32)), COSTS)
    for rank, peak in enumerate(peaks(lowered, BoundCosts(lowered.program, COSTS))):
        activations = min(ranks - rank + 1, microbatches) if rank else 0
        assert peak.received / MESSAGE == activations + (rank < ranks - 1)


class Watched(Sweep):
    """A sweep that notes what there is, and what of the pool is in use, whenever it looks."""

    def __init__(self, lowered: LoweredProgram, costs: BoundCosts, rank: int):
        super().__init__(lowered.graph, costs, rank)
        self.seen: list[tuple[float, float]] = []
        self.go_through(lowered)

    def check(self) -> None:
        super().check()
        self.seen.append((sum(self.now), self.received))


def test_what_is_idle_at_the_peak_counts() -> None:
    """All of it lies beside what there is outside of it at most; the solvers' moments have all of it too."""
    idle = 0.0
    for name, shape in (("gpipe", Shape(4, 8, 32)), ("zb1p", Shape(4, 8, 32)), ("seq1f1b", Shape(4, 8, 32, chunks=4))):
        lowered = lower(build(name, shape), COSTS)
        bound = BoundCosts(lowered.program, COSTS)
        for rank, peak in enumerate(peaks(lowered, bound)):
            seen = Watched(lowered, bound, rank).seen
            assert peak.received == max(received for _, received in seen) >= MESSAGE / 4
            assert peak.total == pytest.approx(max(now - received for now, received in seen) + peak.received)
            assert max(moments(lowered, bound, rank).totals) == pytest.approx(peak.total)
            idle = max(idle, peak.total - max(now for now, _ in seen))
    assert idle >= MESSAGE / 4


@pytest.mark.parametrize("ranks", [2, 4])
def test_it_lies_beside_the_optimizers_update(ranks: int) -> None:
    """Of a model of many weights and short sequences; in the limit as in the report."""
    costs = replace(COSTS, seq_length=256)
    lowered = lower(build("1f1b", Shape(ranks, 8, 32)), costs)
    needs = simulate(lowered, costs).device_needs
    for rank, peak in enumerate(peaks(lowered, BoundCosts(lowered.program, costs))):
        pieces = lowered.program.pieces_of_rank(rank)
        update = costs.update_memory(pieces)
        assert peak.received > 0 and peak.total < peak.received + update
        assert needs[rank] == costs.static_memory(pieces) + peak.received + update
        assert rank_memory(lowered, costs, rank).total == pytest.approx(needs[rank], rel=1e-12)
