"""What a copy to the host takes by hand, and what flags say of the host."""

from __future__ import annotations

import pytest

from helixpipe.cli.model import ModelOptions, make_plan
from helixpipe.costs.by_hand import OpTimes, PieceTimes
from helixpipe.costs.hardware import GIB
from helixpipe.program.costs import Costs
from schedules import Shape, build


def test_by_hand_a_microbatch_layer_takes_a_given_time() -> None:
    given: list[Costs] = [PieceTimes(copy=0.25), OpTimes(build("1f1b", Shape(2, 2, 2)), {}, copy=0.25)]
    for costs in given:
        assert [costs.copy_time(6.0, inward) for inward in (False, True)] == [1.5, 1.5]
    assert PieceTimes().copy_time(6.0, inward=False) == 0


def test_flags_say_what_the_host_has() -> None:
    host = {"host_memory": 100.0, "host_efficiency": 0.5}
    plan = make_plan(ModelOptions("llama2-7b", hardware="a100-80", nodes=2, gpus_per_node=4, **host), None, None, None)
    assert plan is not None and plan.costs.host_memory == 25 * GIB
    assert plan.costs.copy_time(1e9, inward=True) == pytest.approx(10e-6 + 1e9 / (32e9 * 0.5 / 2 * 0.7))
