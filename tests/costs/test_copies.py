"""What a copy to the host takes, by hand and of named hardware, and what flags say of the host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helixpipe.cli.model import ModelOptions, make_plan
from helixpipe.costs.by_hand import OpTimes, PieceTimes
from helixpipe.costs.hardware import GIB, HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, Layout
from helixpipe.program.costs import Costs
from schedules import Shape, build
from tests.costs.asking import copy_time

COSTS = ModelCosts(MODELS["llama2-7b"], HARDWARE["a100-80"], Layout(), seq_length=4096)


def test_by_hand_a_microbatch_layer_takes_a_given_time() -> None:
    given: list[Costs] = [PieceTimes(copy=0.25), OpTimes(build("1f1b", Shape(2, 2, 2)), {}, copy=0.25)]
    for costs in given:
        assert [copy_time(costs, 6.0, inward) for inward in (False, True)] == [1.5, 1.5]
    assert copy_time(PieceTimes(), 6.0, inward=False) == 0


def test_flags_say_what_the_host_has() -> None:
    host = {"host_memory": 100.0, "host_efficiency": 0.5}
    model = ModelOptions(model="llama2-7b", hardware="a100-80", nodes=2, gpus_per_node=4, **host)
    plan = make_plan(model, None, None, None)
    assert plan is not None and plan.costs.host_memory == 25 * GIB
    assert copy_time(plan.costs, 1e9, inward=True) == pytest.approx(10e-6 + 1e9 / (32e9 * 0.5 / 2 * 0.7))


def test_the_gpus_of_a_node_share_its_host() -> None:
    """An A100's 25.6 GB/s of PCIe are halved by the GPU beside it behind the same switch: the 12.9 that SPPO's figures
    come to. Eight H100 have links of their own and share the host's memory."""
    a100, h100 = HARDWARE["a100-80"], HARDWARE["h100"]
    assert a100.host_bandwidth(both=False) == pytest.approx(32e9 * 0.8 / 2)
    assert a100.host_bandwidth(both=False) == pytest.approx(10.59e9 / 0.821, rel=0.02)
    assert a100.host_bandwidth(both=True) == pytest.approx(0.7 * 12.8e9)
    assert replace(a100, gpus_per_node=1).host_bandwidth(both=False) == pytest.approx(25.6e9)
    assert h100.host_bandwidth(both=False) == pytest.approx(51.2e9)
    assert h100.host_bandwidth(both=True) == pytest.approx(614.4e9 * 0.75 / 8 / 2)
    alone = replace(h100, gpus_per_node=1)
    assert alone.host_bandwidth(both=True) == pytest.approx(0.7 * 51.2e9)
    slow = replace(h100, host_memory_bandwidth=307.2e9)
    assert slow.host_bandwidth(both=False) == pytest.approx(307.2e9 * 0.75 / 8)


def test_a_copy_takes_a_latency_and_its_bytes() -> None:
    for inward in (False, True):
        assert copy_time(COSTS, 8.96e9, inward) == pytest.approx(1 + 10e-6)
        assert copy_time(COSTS, 0, inward) == 10e-6
    assert COSTS.host_memory == 256 * GIB
    assert replace(COSTS, hardware=replace(COSTS.hardware, gpus_per_node=4)).host_memory == 512 * GIB
