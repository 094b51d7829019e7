"""What transfers take of the compute of their ranks: weights that travel, copies to the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.lower import lower
from helixpipe.lowering.project import Action
from helixpipe.planning.memory.offload import OffloadOptions
from helixpipe.program.costs import Load
from helixpipe.simulate.simulator import simulate
from helixpipe.simulate.transfer_costs import handling_times
from schedules import Shape, build


@dataclass(frozen=True)
class Handled(PieceTimes):
    """handled: what sending (True) and receiving a message takes, by its kind. copied: a copy of one unit of memory,
    out and inward."""

    handled: Mapping[tuple[str, bool], float] = field(default_factory=dict)
    copied: tuple[float, float] = (0.0, 0.0)

    def handling_time(self, load: Load, sends: bool) -> float:
        if load.contents.kind == "offloaded":
            return self.copied[load.kind == "fetch"] * self.size(load.contents)
        return self.handled.get((load.kind, sends), 0.0)


KINDS = {("weights", True): 1.0, ("weights", False): 10.0}
KINDS |= {("weight_gradients", True): 100.0, ("weight_gradients", False): 1000.0}
ACTIVATIONS = {(kind, sends): 1e6 for kind in ("activation", "gradient") for sends in (True, False)}
"""Are in ops."""


@pytest.mark.parametrize("schedule", ["weipipe", "helix"])
def test_weights_take_time_of_the_op_after_them(schedule: str) -> None:
    lowered = lower(build(schedule, Shape(2, 4, 4)))
    program = lowered.program
    bound = BoundCosts(program, Handled(handled={**KINDS, **ACTIVATIONS}))
    charged = handling_times(lowered, bound)
    for rank, stream in enumerate(lowered.streams):
        last, expected = program.ranks[rank][-1], dict.fromkeys(program.ranks[rank], 0.0)
        ops = [each.op if each.action is Action.RUN else None for each in stream]
        for number, each in enumerate(stream):
            if each.transfer is not None and each.transfer.of_stage and each.action in (Action.SEND, Action.WAIT):
                after = next((op for op in ops[number:] if op is not None), last)
                expected[after] += KINDS[each.transfer.kind, each.action is Action.SEND]
        assert {op: charged[op] for op in program.ranks[rank]} == expected
        assert sum(expected.values()) > 0


def test_a_step_takes_that_much_longer() -> None:
    """Each rank is busy for as much longer as its transfers take."""
    lowered = lower(build("weipipe", Shape(2, 4, 4)))
    plain, handled = (simulate(lowered, Handled(handled=each)) for each in ({}, KINDS))
    more = handling_times(lowered, BoundCosts(lowered.program, handled.costs))
    for rank in range(2):
        own = sum(time for op, time in more.items() if op in lowered.program.ranks[rank])
        assert handled.busy[rank] - plain.busy[rank] == pytest.approx(own)
    assert handled.makespan > plain.makespan


def test_copies_take_time_of_the_ops_after_them() -> None:
    """Half of each unit leaves and comes back."""
    shape = Shape(2, 8, 4, offload=OffloadOptions("0.5", min_offloaded_tensor_size=0))
    lowered = lower(build("1f1b", shape))
    bound = BoundCosts(lowered.program, Handled(copied=(1.0, 100.0)))
    gone = sum(simulate(lowered, Handled()).offloaded)
    assert gone > 0 and sum(handling_times(lowered, bound).values()) == pytest.approx(101 * gone)


def test_nothing_where_no_transfer_takes_any() -> None:
    lowered = lower(build("weipipe", Shape(2, 4, 4)))
    assert handling_times(lowered, BoundCosts(lowered.program, Handled(handled=ACTIVATIONS))) == {}
