"""SPPO's order: the paper's bubble once a step, memory bounded whatever m, one chunk's logits at a time."""

from __future__ import annotations

import pytest

from helixpipe.common.errors import ScheduleError
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.costs.hardware import GIB, HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, Layout
from helixpipe.lowering.lower import lower
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.simulate.simulator import Simulation, simulate
from schedules import Shape, build
from schedules.sppo import SppoOptions

EQUAL = PieceTimes({"mlp": 1.0})  # F = 1, B = 2 a layer; chunks of equal time


def run(p: int, m: int, k: int, ahead: int = 4, name: str = "sppo") -> Simulation:
    shape = Shape(p, m, p, k, costs=EQUAL)
    return simulate(lower(build(name, shape, SppoOptions(ahead) if name == "sppo" else None), EQUAL), EQUAL)


def test_the_order() -> None:
    rows = [" ".join(map(str, ops)) for ops in build("sppo", Shape(2, 2, 2, chunks=2), SppoOptions(1)).ranks]
    assert rows == [
        "0F0 0F0.1 0F1 0B0.1 0B0 0F1.1 0B1.1 0B1",
        "1F0 1F0.1 2F0.1 2B0.1 1B0.1 2F0 2B0 1B0 1F1 1F1.1 2F1.1 2B1.1 1B1.1 2F1 2B1 1B1",
    ]


def test_the_last_rank_may_have_the_head_alone() -> None:
    program = build("sppo", Shape(2, 1, 2, chunks=2, stage_layers=(2, 0)), SppoOptions(1))
    assert [" ".join(map(str, ops)) for ops in program.ranks] == ["0F0 0F0.1 0B0.1 0B0", "1F0.1 1B0.1 1F0 1B0"]
    assert [str(piece) for piece in program.stages[1].pieces] == ["head"]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_the_bubble_comes_once_a_step(p: int) -> None:
    for k in (1, 2, 3, 5, 8, 32):
        for m in sorted({1, 2, p, 2 * p + 1}):
            result = run(p, m, k)
            assert result.bubble_time == pytest.approx((p - 1) * 3 / k)
            assert result.peak_activation == pytest.approx([min(1 + 4 * (p - r - 1) / k, m) for r in range(p)])


def test_without_forwards_ahead_it_comes_once_a_microbatch() -> None:
    assert run(4, 5, 8, ahead=0).bubble_time == pytest.approx(5 * 3 * 3 / 8)
    assert run(4, 5, 8, ahead=0).peak_activation == pytest.approx([1] * 4)
    assert run(4, 5, 8, ahead=2).bubble_time < run(4, 5, 8, ahead=1).bubble_time < 5 * 3 * 3 / 8
    with pytest.raises(ScheduleError, match=r"^--sppo-ahead -1 must be at least 0\.$"):
        run(4, 5, 8, ahead=-1)


def test_logits_are_there_one_chunk_at_a_time() -> None:
    """The last rank needs less than under terapipe by the probabilities of all chunks but one, at no cost of time."""
    costs = ModelCosts(MODELS["sppo-7b"], HARDWARE["a100-80"], Layout(8, True), 131072)
    shape = Shape(4, 1, 32, 8, chunk_lengths=(16384,) * 8, costs=costs)
    late, early = (simulate(lower(build(name, shape), costs), costs) for name in ("sppo", "terapipe"))
    assert late.makespan <= early.makespan
    probabilities = 16384 * costs.model.padded_vocab(8) / 8 * 4
    assert early.peaks[3].total - late.peaks[3].total >= 6.9 * probabilities > 2 * GIB
    assert late.peaks[0].total == early.peaks[0].total


def test_the_head_recomputes_nothing() -> None:
    *layers, head = build("sppo", Shape(2, 1, 4, 2, recompute=RecomputeOptions("full"))).stages
    assert [len(stage.recompute) for stage in layers] == [2, 2] and head.recompute == ()
    assert [piece.kind for piece in head.pieces] == ["head"] and layers[-1].pieces[-1].kind == "mlp"
