"""Chimera: the paper's order and bubble, both for every even number of ranks, and no worse than 1F1B anywhere."""

from __future__ import annotations

import re

import pytest

from helixpipe.common.errors import ScheduleError
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.lower import lower
from helixpipe.program.stages import model_pieces
from helixpipe.simulate.simulator import Simulation, simulate
from schedules import Shape, build

SIZES = (2, 4, 6, 8)
RATIOS = (0.5, 1.0, 1.5, 2.0, 3.0)


def run(name: str, p: int, m: int, ratio: float, message: float = 0.0) -> Simulation:
    """One layer a stage: F takes 1, B `ratio`."""
    costs = PieceTimes({"mlp": 1.0}, backward_ratio=ratio, message=message)
    return simulate(lower(build(name, Shape(p, m, p)), costs), costs)


def test_the_papers_order() -> None:
    """Its figure of p = m = 4, with 0 and 2 for the microbatches that go down, 1 and 3 for those that go up."""
    rows = [" ".join(map(str, ops)) for ops in build("chimera", Shape(4, 4, 4)).ranks]
    assert rows == [
        "0F0 0F2 3F1 3B1 3F3 3B3 0B0 0B2",
        "1F0 2F1 1F2 2F3 2B1 1B0 2B3 1B2",
        "1F1 2F0 1F3 2F2 2B0 1B1 2B2 1B3",
        "0F1 0F3 3F0 3B0 3F2 3B2 0B1 0B3",
    ]


def test_every_stage_is_on_two_ranks() -> None:
    program, pieces = build("chimera", Shape(4, 4, 8)), model_pieces(8)
    assert all(stage.placement == "replicated" for stage in program.stages)
    assert [program.holders(stage) for stage in range(4)] == [(0, 3), (1, 2), (1, 2), (0, 3)]
    assert set(program.pieces_of_rank(3)) == {
        pieces[0],
        pieces[-1],
        *(each for each in pieces if each.layer in (0, 1, 6, 7)),
    }
    assert set(program.copies(0).values()) == {0} and set(program.copies(3).values()) == {1}


@pytest.mark.parametrize("p", SIZES)
def test_bubble_and_memory(p: int) -> None:
    for m in (p, p + 2, 2 * p, 3 * p):
        for ratio in RATIOS:
            result = run("chimera", p, m, ratio)
            assert result.bubble_time == pytest.approx((p - 2) * max(1, ratio))
            assert max(result.peak_activation) == p
            if m == p:
                assert result.peak_activation == [p / 2 + 1 + min(r, p - 1 - r) for r in range(p)]


@pytest.mark.parametrize("p", SIZES)
def test_the_papers_bubble_ratios(p: int) -> None:
    for m in (p, 2 * p, 3 * p):
        assert run("chimera", p, m, ratio=1).bubble_ratio == pytest.approx((p - 2) / (2 * m + p - 2))
    assert run("chimera", p, p, ratio=2).bubble_ratio == pytest.approx((p - 2) / (1.5 * p + p - 2))


@pytest.mark.parametrize("message", [0.0, 0.3, 3.0])
def test_never_slower_than_1f1b(message: float) -> None:
    for p in SIZES:
        for m in (2, 4, p, p + 2, 2 * p, 3 * p):
            for ratio in RATIOS:
                ours, theirs = (run(name, p, m, ratio, message).makespan for name in ("chimera", "1f1b"))
                assert ours <= theirs * (1 + 1e-9), (p, m, ratio)


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        (
            Shape(3, 4, 12),
            "chimera needs an even --pipeline-model-parallel-size, not 3; the nearest valid values are 2 and 4.",
        ),
        (
            Shape(1, 4, 12),
            "chimera needs an even --pipeline-model-parallel-size, not 1; the nearest valid values are 2 and 4.",
        ),
        (
            Shape(4, 7, 12),
            "chimera needs a number of microbatches that is a multiple of its pipelines, 2, not 7; "
            "the nearest valid values are 6 and 8.",
        ),
        (
            Shape(4, 4, 6),
            "--num-layers 6 cannot be divided evenly over 4 pipeline stages; the nearest valid values are 4 and 8, "
            "or divide them by --pipeline-model-parallel-layout 'Et*2|t*2|t|tL'.",
        ),
    ],
    ids=["odd ranks", "one rank", "odd microbatches", "layers"],
)
def test_what_cannot_be_is_refused(shape: Shape, sentence: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{re.escape(sentence)}$"):
        build("chimera", shape)
