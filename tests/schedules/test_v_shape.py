"""V-Half and V-Min: a V in a half and a third of zbv's memory, with little more bubble."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.lower import lower
from helixpipe.planning.order.problem import problem
from helixpipe.program.workload import uniform
from helixpipe.simulate.simulator import Simulation, simulate
from schedules import CATALOGUE, Shape, build
from schedules.zero_bubble import ZeroBubbleOptions
from tests.lowering.random_programs import random_costs

EQUAL = PieceTimes({"mlp": 1.0})  # F = I = W = 1 a layer
SHARES = {"v-half": lambda p: p / 2 + 1, "v-min": lambda p: (p + 4) / 3}
STEPS = {"v-half": 3 / 2, "v-min": 2}
"""Of the bubble, in F of a rank for each rank but the first."""


def run(name: str, p: int, m: int, costs: PieceTimes = EQUAL, limit: int | None = None) -> Simulation:
    """Two layers a rank."""
    options = None if name == "1f1b" else ZeroBubbleOptions(limit)
    return simulate(lower(build(name, Shape(p, m, 2 * p, costs=costs), options), costs), costs)


def test_eight_ranks_in_half_the_memory() -> None:
    """Primus reaches 322 units of half a layer's F, with p = 8 and m = 24, for V-Half."""
    figures = {name: run(name, 8, 24) for name in ("1f1b", "zbv", "v-half", "v-min")}
    assert {name: (each.makespan, max(each.peak_activation)) for name, each in figures.items()} == {
        "1f1b": (186, 16),
        "zbv": (151, 16),
        "v-half": (161, 10),
        "v-min": (167, 8),
    }


@pytest.mark.parametrize("name", SHARES)
def test_bubble_and_memory_for_equal_costs(name: str) -> None:
    """Of a rank's F, which is two layers' here."""
    assert CATALOGUE[name].bubble == {3 / 2: "at most 3(p-1)F/2", 2: "at most 2(p-1)F"}[STEPS[name]]
    for p in (1, 2, 3, 4, 5, 6, 8):
        for m in (p, 2 * p, 3 * p + 1):
            result = run(name, p, m)
            assert p - 1 <= result.bubble_time <= STEPS[name] * (p - 1) * 2
            assert max(result.peak_activation) <= 2 * min(SHARES[name](p), p) + 1e-9


@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(SHARES)),
    p=st.integers(1, 5),
    m=st.integers(1, 9),
    limit=st.none() | st.integers(1, 6),
    seed=st.integers(0, 2**32),
)
def test_any_times_and_any_limit(name: str, p: int, m: int, limit: int | None, seed: int) -> None:
    """The V, within its memory, no faster than is possible, and with the memory of 1F1B no slower than that."""
    drawn = random_costs(Random(seed))
    costs = PieceTimes(drawn.forward, max(drawn.backward_ratio, 1.0), drawn.message)
    result = run(name, p, m, costs, limit)
    allowed = limit or min(SHARES[name](p), p)
    assert max(result.peak_activation) <= 2 * allowed + 1e-9
    program = result.lowered.program
    assert [{op.stage for op in ops} for ops in program.ranks] == [{r, 2 * p - 1 - r} for r in range(p)]
    homes = (*range(p), *reversed(range(p)))
    makespan, span = problem(name, program.stages, homes, uniform(m), allowed, costs).lower_bounds()
    assert result.makespan >= makespan * (1 - 1e-9)
    assert result.shifted_bubble_time + result.ideal >= span * (1 - 1e-9)
    if not costs.message and allowed >= min(p, m):
        assert result.makespan <= run("1f1b", p, m, costs).makespan * (1 + 1e-9) + 1e-9


def test_less_memory_is_slower_and_zbv_in_as_little_is_the_same() -> None:
    for p, m in ((4, 12), (6, 18), (8, 24)):
        whole, half, third = (run(name, p, m).makespan for name in ("zbv", "v-half", "v-min"))
        assert whole < half < third < run("1f1b", p, m).makespan
        assert run("zbv", p, m, limit=p // 2 + 1).makespan == half


def test_attention_which_has_no_w_is_scheduled_too() -> None:
    """W of no time runs at once where a rank idles, and takes none."""
    costs = PieceTimes({"attn": 1.0})
    for name in (*SHARES, "zbv", "zb1p"):
        result = run(name, 4, 8, costs)
        assert result.bubble_time >= 0 and max(result.peak_activation) <= 8
    assert run("zbv", 4, 8, costs).makespan < run("1f1b", 4, 8, costs).makespan
