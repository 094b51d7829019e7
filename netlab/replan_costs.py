"""Plans anew for emulated ranks; no torch, since it runs in a process beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from helixpipe.adapt.measured_costs import MeasuredCosts, measured_costs, slowed
from helixpipe.adapt.replan import Candidate, PlannerAnswer, Situation, replan
from helixpipe.adapt.reports import Link
from helixpipe.program.costs import Costs
from helixpipe.program.program import Program
from netlab.emulated_costs import Size
from schedules import Shape, build

SCHEDULES = ("gpipe", "1f1b", "zb1p", "zb2p")
"""Those with a stage a rank."""


@dataclass(frozen=True)
class EmulatedReplanner:
    """Makes proposals for steps of this size."""

    size: Size

    def __call__(self, situation: Situation) -> PlannerAnswer:
        return PlannerAnswer(replan(situation, self.candidates))

    def candidates(self, costs: Costs) -> Iterator[Candidate]:
        for name in SCHEDULES:
            yield name, partial(program, name, self.size, costs)


def program(name: str, size: Size, costs: Costs) -> Program:
    return build(name, Shape(size.ranks, size.microbatches, size.layers, costs=costs))


def true_costs(own: Program, base: Costs, ranks: Mapping[int, float], links: Mapping[Link, float]) -> MeasuredCosts:
    """Costs of which these ranks' ops and these links' messages take so many times as long: what an oracle knows."""
    every = {(a, b): 1.0 for a in range(own.num_ranks) for b in range(own.num_ranks) if abs(a - b) == 1}
    stages = {(kind, stage): 1.0 for kind in "FBIW" for stage in range(len(own.stages))}
    return slowed(measured_costs(base, own, stages, every), ranks, links)
