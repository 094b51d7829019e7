"""What the time of a step is made of: the parts add up, and are what they are named after."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.lower import lower
from helixpipe.planning.memory.sharding import shared_out
from helixpipe.program.costs import Costs
from helixpipe.program.program import Op, Program
from helixpipe.program.timeline import OpEvent, Timeline, TransferEvent
from helixpipe.simulate.simulator import Simulation, simulate
from helixpipe.simulate.step_parts import step_parts
from helixpipe.simulate.transfer_costs import handling_times
from schedules import CATALOGUE, Shape, build
from tests.simulate.test_copying import leaving
from tests.simulate.test_handling import Handled

COSTS = PieceTimes({"qkv": 1, "attn": 3, "mlp": 2}, message=0.5)
NAMES = [name for name, schedule in CATALOGUE.items() if not schedule.one_rank]


def of(program: Program, costs: Costs = COSTS) -> Simulation:
    return simulate(lower(program, costs), costs)


def made(name: str, ranks: int = 4, microbatches: int = 8, costs: Costs = COSTS) -> Simulation:
    return of(build(name, Shape(ranks, microbatches, 24, chunks=2 if CATALOGUE[name].chunks else 1)), costs)


@given(
    st.sampled_from(NAMES),
    st.sampled_from([2, 4]),
    st.sampled_from([8, 16]),
    st.floats(0, 5),
    st.floats(0, 3),
)
@settings(max_examples=40)
def test_parts_add_up_to_the_step(name: str, ranks: int, microbatches: int, message: float, attention: float) -> None:
    """Of every schedule; and those of work to the time in ops."""
    costs = PieceTimes({"qkv": 1, "attn": attention, "mlp": 2}, message=message, op_overhead=0.1)
    simulation = made(name, ranks, microbatches, costs)
    (parts,) = step_parts([simulation])
    assert sum(parts.values()) == pytest.approx(simulation.makespan)
    assert min(parts.values()) > -1e-9 * simulation.makespan
    work = sum(parts.get(name, 0.0) for name in ("forward", "backward", "recomputation"))
    assert work == pytest.approx(simulation.ideal)
    if message == 0:
        assert parts.get("waiting for messages", 0.0) == pytest.approx(0.0, abs=1e-9)


def test_a_step_ends_with_its_last_transfer() -> None:
    """Or later, with what is not among the events."""
    op = Op("F", 0, 0)
    step = Timeline("", 2, [OpEvent(0, op, 0, 1)], [TransferEvent("activation", (0, 1), op, None, 1, 3)])
    assert (step.makespan, step.bubble) == (3, pytest.approx(5 / 6))
    assert replace(step, until=4.0).makespan == 4


def test_work_is_told_by_what_it_is_for() -> None:
    """2 stages a rank of 6 in each pass of 12, forward and twice that backward: 8 microbatches on each of 4 ranks."""
    for name in ("1f1b", "zb1p"):
        (parts,) = step_parts([of(build(name, Shape(4, 8, 8)))])
        assert (parts["forward"], parts["backward"]) == (8 * 12, 8 * 24) and "recomputation" not in parts


def test_recomputation_inside_a_backward_is_told_apart() -> None:
    """As where it is an op of its own: what every stage runs forward again is as much again as forwards."""
    program = build("1f1b", Shape(4, 8, 8))
    stages = tuple(replace(stage, recompute=(stage.pieces,)) for stage in program.stages)
    simulation = of(replace(program, stages=stages))
    (parts,) = step_parts([simulation])
    assert parts["recomputation"] == pytest.approx(parts["forward"]) == pytest.approx(96)
    assert parts["backward"] == pytest.approx(192)
    alone, beside = step_parts([simulation, simulation.timeline])
    assert alone == beside and alone["backward"] == pytest.approx(192 + 96), "a recording does not know it"


def test_waits_for_copies_are_those_that_are_reported() -> None:
    program = leaving(build("1f1b", Shape(4, 8, 8)), 1)
    simulation = of(program, replace(COSTS, copy=30.0))
    (parts,) = step_parts([simulation])
    assert parts["waiting for copies"] == pytest.approx(sum(simulation.held_up) / 4) != 0


def test_waits_for_gathers_are_those_that_are_reported() -> None:
    """With waits for room, until gradients have been scattered; scatters after the last op are a part of their own."""
    simulation = of(shared_out(build("1f1b", Shape(4, 8, 8)), 4), replace(COSTS, message=60.0))
    (parts,) = step_parts([simulation])
    last = [max(event.end for event in simulation.timeline.ops if event.rank == rank) for rank in range(4)]
    over = sum(
        max(0.0, max(each.end for each in simulation.timeline.sharing if each.source == rank) - last[rank])
        for rank in range(4)
    )
    told = parts["waiting for weights"] + parts["other waits"]
    assert told == pytest.approx((sum(simulation.held_up_by_sharing) - over) / 4) and parts["other waits"] > 0


def test_a_gap_is_cut_where_its_reasons_come() -> None:
    """Rank 1 waits 4 for rank 0, 3 for a message (1 of them until it could leave), and 2 for nothing that is known."""
    first, second = Op("F", 0, 0), Op("F", 1, 0)
    timeline = Timeline(
        "", 2, [OpEvent(0, first, 0, 4), OpEvent(1, second, 9, 10)],
        [
            TransferEvent("activation", (0, 1), first, second, 5, 7),
            TransferEvent("activation", (0, 1), first, second, 4, 4.5),
            TransferEvent("weights", (0, 1), second, second, 9.5, 9.75),  # too late for the op: it did not wait for it
            TransferEvent("weight_gradients", (1, 0), first, second, 0, 8),
        ],
    )  # fmt: skip
    (parts,) = step_parts([timeline])
    assert {name: 2 * time for name, time in parts.items() if time} == {
        "forward": 5, "waiting for other ranks": 4, "waiting for messages": 3, "other waits": 2,
        "idle time after the last op": 6,
    }  # fmt: skip


def test_handling_of_transfers_is_told_apart() -> None:
    """On a CPU, weights are packed by the cores that compute."""
    costs = Handled(COSTS.forward, message=0.5, handled={("weights", True): 1.0, ("weight_gradients", False): 10.0})
    simulation = of(build("helix", Shape(2, 4, 4)), costs)
    parts, alone = *step_parts([simulation]), *step_parts([simulation.timeline])
    handled = handling_times(simulation.lowered, BoundCosts(simulation.lowered.program, costs))
    assert handled and parts["handling of transfers"] == pytest.approx(sum(handled.values()) / 2)
    assert sum(parts.values()) == pytest.approx(sum(alone.values())) == pytest.approx(simulation.makespan)
