"""A run on paper: steps simulated with the true speeds, reported as its ranks would."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from random import Random

from helixpipe.adapt.measured_costs import MeasuredCosts, measured_costs, slowed
from helixpipe.adapt.reports import Link, RankTimes, Received, medians
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.lower import lower
from helixpipe.lowering.project import LoweredProgram
from helixpipe.program.program import Op, Program
from helixpipe.simulate.simulator import simulate
from schedules import Shape, build

RANKS, MICROBATCHES = 4, 8
BASE = PieceTimes({"qkv": 0.2, "attn": 0.4, "mlp": 0.4}, message=0.3)
STEP = 2
"""From one timed step to the next."""


def program(name: str = "zb1p", chunks: int = 1, layers: int = RANKS) -> Program:
    return build(name, Shape(RANKS, MICROBATCHES, layers, chunks, costs=BASE))


def lowered_of(of: Program) -> LoweredProgram:
    return lower(of, BASE)


def true_costs(
    of: Program, ranks: Mapping[int, float] | None = None, links: Mapping[Link, float] | None = None
) -> MeasuredCosts:
    """Costs of which these ranks' ops and these links' messages take so many times as long. Stages are on the rank of
    their number."""
    every = {(a, b): 1.0 for a in range(of.num_ranks) for b in range(of.num_ranks) if abs(a - b) == 1}
    same = measured_costs(BASE, of, {(kind, s): 1.0 for kind in "FBIW" for s in range(len(of.stages))}, every)
    return slowed(same, ranks or {}, links or {})


def reports(
    lowered: LoweredProgram, costs: MeasuredCosts, step: int, rng: Random | None = None, noise: float = 0.0
) -> list[RankTimes]:
    """What all ranks report of a step with these costs; every op and message takes a little more or less."""
    rng, simulation = rng or Random(0), simulate(lowered, costs)
    times = {event.op: (event.start, event.end) for event in simulation.timeline.ops}
    bound = BoundCosts(lowered.program, costs)
    sent: dict[int, dict[int, float]] = defaultdict(dict)
    received: dict[int, dict[int, Received]] = defaultdict(dict)
    free: dict[Link, float] = defaultdict(float)
    waits = _waits(lowered.program, times)
    for message in sorted(lowered.graph.messages, key=lambda each: times[_op(each.producer)][1]):
        ready, link = times[_op(message.producer)][1], (message.source, message.target)
        free[link] = max(ready, free[link]) + bound.transfer_time(message) * (1 + rng.gauss(0, noise))
        waited = waits[_op(message.consumer)]
        sent[message.source][message.number] = ready
        received[message.target][message.number] = Received(0.0, waited, max(waited, free[link]))
    return [
        RankTimes(
            step,
            rank,
            ops=medians((op, 0.0, (times[op][1] - times[op][0]) * (1 + rng.gauss(0, noise))) for op in own),
            sent=sent[rank],
            received=received[rank],
            end=simulation.makespan,
        )
        for rank, own in enumerate(lowered.program.ranks)
    ]


def _waits(of: Program, times: Mapping[Op, tuple[float, float]]) -> dict[Op, float]:
    """When each op's rank had nothing else to do."""
    return {
        op: before for own in of.ranks for op, before in zip(own, [0.0, *(times[op][1] for op in own)], strict=False)
    }


def _op(op: Op | None) -> Op:
    assert op is not None
    return op
