"""What copies to the host cost a simulated step, by hand and from the timeline."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.lower import lower
from helixpipe.program.program import Program
from helixpipe.program.stages import Activations
from helixpipe.simulate.simulator import Simulation, simulate
from helixpipe.simulate.transfer_costs import hidden_share
from schedules import Shape, build


def leaving(program: Program, ahead: int, ranks: int = 99) -> Program:
    """All that may leave of the units of the first ranks leaves."""
    own = {}
    for unit in {op.unit for ops in program.ranks[:ranks] for op in ops}:
        own[unit] = Activations(offload=((program.stages[unit.stage].pieces, 1.0),), ahead=ahead)
    return replace(program, activations=own)


def run(program: Program, costs: PieceTimes, one_queue: bool = False) -> Simulation:
    return simulate(lower(program, costs), costs, one_queue=one_queue)


def test_by_hand() -> None:
    """F0 F1 F2 B0 B1 B2 of one layer on one rank, F 1, B 2, each copy 1.5: out of F0's activations from 1 on, in again
    until 4, where B0 starts in place of 3. Later copies are in time, so that is all that the step takes longer."""
    result = run(leaving(build("gpipe", Shape(1, 3, 1)), ahead=1), PieceTimes({"mlp": 1}, copy=1.5))
    assert result.offloaded == [3] and result.copy_time == [9] and result.peak_host == [3]
    assert result.held_up == [1] and result.makespan == 9 + 1
    assert result.hidden == 1 - 1 / 9
    nothing_between = run(leaving(build("1f1b", Shape(1, 2, 1)), ahead=0), PieceTimes({"mlp": 1}, copy=0.5))
    assert (nothing_between.held_up, nothing_between.hidden) == ([2], 0)
    free = run(leaving(build("gpipe", Shape(1, 3, 1)), ahead=1), PieceTimes({"mlp": 1}))
    assert (free.held_up, free.hidden, free.offloaded) == ([0], 1, [3])


@pytest.mark.parametrize("one_queue", [False, True])
def test_on_one_rank_all_idle_time_is_that_of_copies(one_queue: bool) -> None:
    """With one queue also that in which an op stands behind the start of a copy whose engine is busy."""
    program = leaving(build("sppo", Shape(1, 3, 1, chunks=3)), ahead=0)
    result = run(program, PieceTimes({"mlp": 1}, copy=2), one_queue)
    assert result.held_up == pytest.approx([result.makespan - result.busy[0]]) and result.held_up[0] > 1


def test_the_share() -> None:
    assert hidden_share([3.0, 1.0], [0.5, 0.5]) == 0.75
    assert hidden_share([1.0], [2.0]) == 0 and hidden_share([0.0], [0.0]) == 1


@settings(max_examples=60)
@given(
    name=st.sampled_from(["1f1b", "interleaved-1f1b", "seq1f1b", "zb1p"]),
    copy=st.integers(0, 24).map(lambda n: n / 4),
    message=st.sampled_from([0.0, 0.5, 4.0]),
    ahead=st.integers(0, 3),
    ranks=st.integers(1, 3),
    one_queue=st.booleans(),
)
def test_what_an_op_waits_for(name: str, copy: float, message: float, ahead: int, ranks: int, one_queue: bool) -> None:
    """From the timeline alone: an op waits for the one before it on its rank, for messages, and else for a copy."""
    v, k = (2 if name == "interleaved-1f1b" else 1), (2 if name == "seq1f1b" else 1)
    program = leaving(build(name, Shape(3, 6, 6, virtual_stages=v, chunks=k)), ahead, ranks)
    result = run(program, PieceTimes({"qkv": 1, "attn": 3, "mlp": 2}, message=message, copy=copy), one_queue)
    arrived = {m.consumer: m.end for m in result.timeline.messages}
    held_up, free = [0.0] * 3, [0.0] * 3
    for event in sorted(result.timeline.ops, key=lambda event: (event.start, event.end)):
        ready = max(free[event.rank], arrived.get(event.op, 0.0))
        held_up[event.rank] += event.start - ready
        free[event.rank] = event.end
    if not one_queue:  # with which it may wait for a link, too
        assert result.held_up == pytest.approx(held_up)
    assert all(0 <= lost <= all_of + 1e-9 for lost, all_of in zip(result.held_up, result.copy_time, strict=True))
    assert result.held_up[ranks:] == result.offloaded[ranks:] == [0.0] * (3 - ranks)
    assert result.offloaded[0] > 0 and result.peak_host[0] > 0


def test_json_has_them_where_something_is_copied() -> None:
    plain = build("1f1b", Shape(2, 2, 2))
    costs = PieceTimes({"mlp": 1}, copy=0.25)
    result = run(leaving(plain, 1, ranks=1), costs)
    without, told = run(plain, costs).to_json(), result.to_json()
    assert {key: told[key] for key in told.keys() - without.keys()} == {
        "copy_time": [1, 0],
        "held_up_by_copies": result.held_up,
        "copy_time_hidden": result.hidden,
        "offloaded": [2, 0],
        "peak_host": [2, 0],
    }
