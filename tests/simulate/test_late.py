"""Steps that do not go as on paper: late messages, ops with noise. What nobody needs must not block."""

from __future__ import annotations

import pytest

from helixpipe.costs.by_hand import PieceTimes, unit_costs
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.lower import lower
from helixpipe.lowering.order import list_schedule
from helixpipe.lowering.project import RETURN_SLACK, Action, LoweredProgram, project
from helixpipe.lowering.validate import validate
from helixpipe.program.program import Program
from helixpipe.simulate.simulator import simulate
from schedules import CATALOGUE, Shape, build

SLOW = PieceTimes({"qkv": 1.0, "attn": 3.0, "mlp": 2.0}, message=1.5)
"""Messages far slower than the program was lowered for."""


def lowered_with(program: Program, slack: int) -> LoweredProgram:
    graph = validate(program)
    times = list_schedule(graph, *BoundCosts(program, unit_costs()).timers)
    streams, openings = project(graph, times, slack)
    return LoweredProgram(program, graph, tuple(times.order), tuple(map(tuple, streams)), openings)


@pytest.mark.parametrize("shape", [Shape(2, 4, 6), Shape(4, 16, 8)], ids=["p2", "p4"])
def test_late_weight_gradients_hold_up_nobody(shape: Shape) -> None:
    """Their owner waits for them later than they come on paper, so it computes as if it never waited before the end."""
    program = build("helix", shape)
    at_once, usual, at_the_end = (
        simulate(lowered_with(program, slack), SLOW).makespan for slack in (0, RETURN_SLACK, 10**6)
    )
    assert at_the_end == usual < at_once


def test_returned_gradients_are_waited_for_some_ops_after_they_came() -> None:
    """And at the end of the stream, those that came too late for that."""
    program = build("helix", Shape(2, 8, 6))
    places = [
        {
            instruction.transfer.number: sum(before.action is Action.RUN for before in stream[:place])
            for stream in lowered_with(program, slack).streams
            for place, instruction in enumerate(stream)
            if instruction.action is Action.WAIT
            and instruction.transfer is not None
            and instruction.transfer.kind == "weight_gradients"
        }
        for slack in (0, 4)
    ]
    ends = {sum(i.action is Action.RUN for i in stream) for stream in lowered_with(program, 0).streams}
    assert places[0].keys() == places[1].keys() != set()
    moved = [later - sooner for sooner, later in zip(places[0].values(), places[1].values(), strict=True)]
    assert set(moved) <= {0, 1, 2, 3, 4} and 4 in moved
    assert all(by == 4 or place in ends for by, place in zip(moved, places[1].values(), strict=True))


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name != "none"])
def test_a_little_noise_costs_little(name: str) -> None:
    """With ops up to 5 % longer or shorter no schedule takes 5 % longer: delays do not add up from wait to wait."""
    costs = PieceTimes({"qkv": 1.0, "attn": 3.0, "mlp": 2.0}, message=0.2)
    lowered = lower(build(name, Shape(4, 16, 8)), costs)
    exact = simulate(lowered, costs).makespan
    noisy = [simulate(lowered, costs, noise=0.05, seed=seed).makespan for seed in range(5)]
    assert len(set(noisy)) == 5 and simulate(lowered, costs, noise=0.05, seed=2).makespan == noisy[2]
    assert max(noisy) < 1.05 * exact and sorted(noisy)[2] < 1.03 * exact
