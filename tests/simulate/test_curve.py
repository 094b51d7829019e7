"""What a rank has at each moment, for drawings."""

from __future__ import annotations

import pytest

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.costs.hardware import find_hardware
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Layout, find_model
from helixpipe.lowering.lower import lower
from helixpipe.planning.memory.sharding import shared_out
from helixpipe.simulate.curve import memory_curves
from helixpipe.simulate.simulator import simulate
from schedules import Shape, build
from tests.simulate.pairs import in_pairs
from tests.simulate.test_copying import leaving


def test_by_hand() -> None:
    """Two microbatches of a layer; all that they save leaves, and starts to come back an op before its backward."""
    costs = PieceTimes({"mlp": 1}, copy=0.25)
    lowered = lower(leaving(build("gpipe", Shape(1, 2, 1)), ahead=1), costs)
    (curve,) = memory_curves(lowered, costs)
    assert (curve.static_device, curve.static_host) == (0, 0)
    f0, f1, b0, b1, out0, back0, out1, back1 = range(8)
    assert curve.levels == [
        (f0, False, 1, 0),
        (out0, False, 1, 1),
        (back0, False, 2, 1),  # its place is taken when it starts
        (f1, False, 3, 1),
        (out1, False, 3, 2),
        (back1, False, 4, 2),
        (out0, True, 3, 2),  # gone, as far as the device has waited for it
        (back0, True, 3, 1),
        (b0, True, 2, 1),
        (out1, True, 1, 1),
        (back1, True, 1, 0),
        (b1, True, 0, 0),
    ]


@pytest.mark.parametrize("tokens", [64, 8192])
@pytest.mark.parametrize("name", ["1f1b", "zb1p", "helix", "weipipe"])
def test_the_highest_level_is_what_the_rank_needs(name: str, tokens: int) -> None:
    """While an op runs, or of short sequences while the optimizer does."""
    costs = ModelCosts(
        find_model("llama2-7b"), find_hardware("h20"), Layout(tensor_parallel=4), tokens, fused_adam=False
    )
    program = build(name, Shape(4, 8, 8))
    for each in (program, leaving(program, 1)) if name == "1f1b" else (program, shared_out(program, 2)):
        simulation = simulate(lower(each, costs), costs)
        curves = memory_curves(simulation.lowered, costs)
        highest = [max(level.device for level in curve.levels) for curve in curves]
        assert highest == pytest.approx(simulation.device_needs, rel=1e-12)
        host = [max(level.host for level in curve.levels) for curve in curves]
        assert host == pytest.approx(simulation.host_needs, rel=1e-12)
        for curve in curves:
            assert curve.levels[-1].device == pytest.approx(curve.static_device, rel=1e-9)
            assert 0 < curve.static_device < highest[0] * 2
            moments = [level[:2] for level in curve.levels]
            assert all(moments[i : i + 3] != [moments[i]] * 3 for i in range(len(moments))), (
                "no more than two of a moment"
            )


def test_pairs_need_what_their_ranks_do() -> None:
    """A forward in a pair has no level of its own: what it takes is there while the backward beside it runs."""
    layout = Layout(tensor_parallel=4, overlap_tp_comm="pairs")
    costs = ModelCosts(find_model("llama2-7b"), find_hardware("h20"), layout, 8192)
    simulation = simulate(lower(in_pairs(build("1f1b", Shape(4, 8, 8))), costs), costs)
    curves = memory_curves(simulation.lowered, costs)
    highest = [max(level.device for level in curve.levels) for curve in curves]
    assert highest == pytest.approx(simulation.device_needs, rel=1e-12)
    ends = [curve.levels[-1].device for curve in curves]
    assert ends == pytest.approx([curve.static_device for curve in curves], rel=1e-9)
