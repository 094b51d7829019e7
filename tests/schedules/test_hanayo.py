"""Hanayo: stages in waves, the bubble that follows, and no worse than 1F1B anywhere."""

from __future__ import annotations

import re
from itertools import product

import pytest

from helixpipe.common.errors import ScheduleError
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.lower import lower
from helixpipe.simulate.simulator import Simulation, simulate
from schedules import Shape, build
from tests.selection import graded

RATIOS = (0.5, 1.0, 2.0, 3.0)
WAVES = (1, 2, 3)


def run(name: str, p: int, m: int, waves: int, ratio: float) -> Simulation:
    """One layer a stage, 2 stages a rank for each wave: F of a stage takes 1, B `ratio`."""
    costs = PieceTimes({"mlp": 1.0}, backward_ratio=ratio)
    v = 2 * waves if name == "hanayo" else None
    return simulate(lower(build(name, Shape(p, m, 2 * p * waves, virtual_stages=v)), costs), costs)


def test_stages_lie_back_and_forth() -> None:
    program = build("hanayo", Shape(3, 3, 12, virtual_stages=4))
    assert [program.holders(stage) for stage in range(12)] == [(r,) for r in (0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0)]
    assert all(stage.placement == "resident" for stage in program.stages)
    assert build("hanayo", Shape(3, 3, 12)) == build("hanayo", Shape(3, 3, 12, virtual_stages=2))


def test_the_order_of_one_wave() -> None:
    rows = [" ".join(map(str, ops)) for ops in build("hanayo", Shape(2, 3, 4)).ranks]
    assert rows == [
        "0F0 0F1 3F0 3B0 0F2 3F1 3B1 0B0 3F2 3B2 0B1 0B2",
        "1F0 2F0 1F1 2F1 2B0 1F2 1B0 2F2 2B1 1B1 2B2 1B2",
    ]


@pytest.mark.parametrize("p", graded([1, 2, 3, 4, 6, 8], (1, 2, 3)))
def test_bubble_and_memory(p: int) -> None:
    for waves, ratio in product(WAVES, RATIOS):
        v = 2 * waves
        for m in (p, 2 * p, 3 * p):
            result = run("hanayo", p, m, waves, ratio)
            forward, backward = v, v * ratio
            assert result.bubble_time == pytest.approx(2 * (p - 1) * max(forward, backward) / v)
            kept = [peak / v for peak in result.peak_activation]  # in microbatches of a rank's v layers
            assert max(kept) == p
            if m == p:
                assert kept == pytest.approx([p - (p - 1 - r) / v for r in range(p)])


@pytest.mark.parametrize("ratio", RATIOS)
def test_one_wave_takes_any_number_from_p_without_more_bubble(ratio: float) -> None:
    for p in (2, 3, 5):
        for m in range(p, 3 * p):
            assert run("hanayo", p, m, 1, ratio).bubble_time == pytest.approx(2 * (p - 1) * max(1, ratio))


@pytest.mark.parametrize("waves", graded(WAVES, (1, 2)))
def test_never_slower_than_1f1b(waves: int) -> None:
    for p in (1, 2, 3, 4, 5):
        for m, ratio in product(range(1, 2 * p + 2), RATIOS):
            ours, theirs = (run(name, p, m, waves, ratio) for name in ("hanayo", "1f1b"))
            assert ours.makespan <= theirs.makespan * (1 + 1e-9), (p, m, ratio)
            assert max(ours.peak_activation) <= 2 * waves * min(p, m)


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        (
            Shape(2, 4, 12, virtual_stages=3),
            "hanayo needs an even --num-virtual-stages-per-pipeline-rank, two for each wave, not 3; "
            "the nearest valid values are 2 and 4.",
        ),
        (
            Shape(2, 4, 12, virtual_stages=1),
            "hanayo needs an even --num-virtual-stages-per-pipeline-rank, two for each wave, not 1; "
            "the nearest valid values are 2 and 4.",
        ),
        (
            Shape(2, 4, 6),
            "--num-layers 6 cannot be divided evenly over 4 pipeline stages; the nearest valid values are 4 and 8, "
            "or divide them by --decoder-last-pipeline-num-layers 2 or "
            "--pipeline-model-parallel-layout 'Et*2|t*2|t|tL'.",
        ),
    ],
    ids=["odd", "one", "layers"],
)
def test_what_cannot_be_is_refused(shape: Shape, sentence: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{re.escape(sentence)}$"):
        build("hanayo", shape)
