"""A runtime whose ranks wait for their messages: closed forms, order, and that every schedule comes to its end."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.lower import lower
from helixpipe.program.program import Program, forward_only
from helixpipe.simulate.simulator import Simulation, simulate
from schedules import CATALOGUE, Shape, build
from tests.lowering.offloads import everything


def run(program: Program, message: float, blocking: bool = True, **times: float) -> Simulation:
    costs = PieceTimes({"mlp": 1.0}, message=message, **times)
    return simulate(lower(program, costs), costs, blocking=blocking)


def test_a_message_holds_up_both_ends() -> None:
    """Two ranks, a stage each, forwards of 1, messages of 2: rank 0 computes after each has left, rank 1 before the
    next comes. Beside ops the second message would leave at 3 and the last op end at 8."""
    forwards = forward_only(build("gpipe", Shape(2, 3, 2)))
    simulation = run(forwards, 2.0)
    starts = sorted((event.start, event.end) for event in simulation.timeline.messages)
    assert starts == [(1.0, 3.0), (4.0, 6.0), (7.0, 9.0)]
    assert simulation.makespan == 10.0
    assert run(forwards, 2.0, blocking=False).makespan == 8.0


def test_both_directions_travel_at_once() -> None:
    """1F1B's steady state: a rank sends a hidden state and gets a gradient in one exchange."""
    simulation = run(build("1f1b", Shape(2, 4, 2)), 0.5)
    spans = [(event.kind, event.start, event.end) for event in simulation.timeline.messages]
    downs = {(start, end) for kind, start, end in spans if kind == "activation"}
    ups = {(start, end) for kind, start, end in spans if kind == "gradient"}
    assert downs & ups == {(8.5, 9.0), (12.0, 12.5)}  # without those of warm-up and cool-down


def test_a_sender_waits_for_a_receiver_that_computes() -> None:
    """Rank 0's second message is ready at 2; rank 1 has two thirds of an op of 3 before it, and rank 0 waits."""
    forwards = forward_only(build("gpipe", Shape(2, 3, 2)))
    costs = PieceTimes({"mlp": 1.0, "head": 2.0})
    simulation = simulate(lower(forwards, costs), costs, blocking=True)
    assert [event.start for event in simulation.timeline.messages] == [1.0, 4.0, 7.0]
    assert [event.start for event in simulation.timeline.ops if event.rank == 0] == [0.0, 1.0, 4.0]


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name != "none"])
def test_every_schedule_comes_to_its_end(name: str) -> None:
    """No later than beside ops without messages, and as early where messages take no time and no op ends between."""
    program = build(name, Shape(4, 8, 16, chunks=2 if CATALOGUE[name].chunks else 1))
    simulation = run(program, 0.3)
    assert len(simulation.timeline.ops) == sum(map(len, program.ranks))
    assert simulation.makespan >= run(program, 0.0, blocking=False).makespan
    held = {event.op for event in simulation.timeline.ops}
    assert held == {op for ops in program.ranks for op in ops}


def test_no_rank_computes_while_it_sends() -> None:
    simulation = run(build("seq1f1b-interleaved", Shape(4, 4, 16, chunks=4)), 0.2)
    for message in simulation.timeline.messages:
        for event in simulation.timeline.ops:
            if event.rank in (message.source, message.target):
                assert event.end <= message.start + 1e-9 or event.start >= message.end - 1e-9


def test_ranks_of_several_stages_exchange_once_for_a_forward_and_its_backward() -> None:
    """So a backward follows its forward at once, though that has something to send."""
    program = build("interleaved-1f1b", Shape(2, 4, 4))
    events = sorted((event for event in run(program, 0.4).timeline.ops if event.rank == 0), key=lambda each: each.start)
    after = [
        later.start - earlier.end
        for earlier, later in pairwise(events)
        if earlier.op.kind == "F" and later.op.kind == "B"
    ]
    assert after.count(0.0) >= len(after) - 1 > 0


def test_copies_run_beside_ops() -> None:
    program = everything(build("1f1b", Shape(2, 4, 4)))
    costs = replace(PieceTimes({"mlp": 1.0}), copy=0.01)
    simulation = simulate(lower(program, costs), costs, blocking=True)
    assert simulation.copies and len(simulation.timeline.copies) == len(simulation.lowered.graph.copies)


def test_an_op_takes_its_overhead_once() -> None:
    """Also one that recomputes inside."""
    plain, slower = (run(build("1f1b", Shape(2, 4, 2)), 0.0, op_overhead=time) for time in (0.0, 0.25))
    assert slower.busy == [busy + 8 * 0.25 for busy in plain.busy]
