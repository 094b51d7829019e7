"""A change for good is found within a few values, noise and pauses are none."""

from __future__ import annotations

from math import exp
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helixpipe.adapt.changes import FIRST, IN_A_ROW, SKIPPED, ChangePoint

SETTLED = SKIPPED + FIRST


def settled(level: float = 1.0, noise: float = 0.0, rng: Random | None = None) -> ChangePoint:
    series, rng = ChangePoint(), rng or Random(0)
    for _ in range(SETTLED):
        assert not series.add(level * exp(rng.uniform(-noise, noise)))
    assert series.known
    return series


@settings(max_examples=60)
@given(st.integers(0, 1 << 30), st.floats(0.0, 0.05), st.sampled_from([0.0, 0.01]))
@example(116754, 0.0, 0.01)
def test_a_thousand_steps_of_noise_are_no_change(seed: int, noise: float, pauses: float) -> None:
    """Nor are pauses, of fewer steps than make a change."""
    rng, series, paused = Random(seed), ChangePoint(), 0
    for _ in range(500):  # every second step of 1,000 is timed
        paused = paused + 1 if rng.random() < pauses and paused < IN_A_ROW - 1 else 0
        assert not series.add(exp(rng.gauss(0.0, noise)) * (3.0 if paused else 1.0))
    assert series.factor == 1.0


@settings(max_examples=60)
@given(st.integers(0, 1 << 30), st.floats(1e-6, 1e3), st.floats(0.0, 0.05), st.sampled_from([4.0, 2.0, 0.5, 0.25]))
def test_twice_as_long_or_half_is_found_within_ten_steps(seed: int, level: float, noise: float, factor: float) -> None:
    """Noise has bounds here: the spread of eight values without may be anything."""
    rng = Random(seed)
    series = settled(level, noise, rng)
    found = next(at for at in range(1, 6) if series.add(level * factor * exp(rng.uniform(-noise, noise))))
    assert found * 2 <= 10 and found >= IN_A_ROW
    assert series.factor == pytest.approx(factor, rel=0.2)


def test_what_becomes_slower_and_well_again_has_its_first_level() -> None:
    series = settled(2.0)
    assert [series.add(8.0) for _ in range(3)] == [False, False, True]
    assert series.factor == pytest.approx(4.0) and series.first_level == pytest.approx(2.0)
    assert not any(series.add(8.1) for _ in range(50))
    assert [series.add(2.05) for _ in range(3)] == [False, False, True]
    assert series.factor == 1.0


def test_two_slow_values_however_slow_are_no_change() -> None:
    series = settled()
    assert not any(series.add(value) for value in (100.0, 100.0, 1.0, 100.0, 100.0, 1.0, 1.0, 1.0))
    assert not any(series.add(1.0) for _ in range(20))


def test_a_small_change_takes_longer_and_less_than_fifteen_percent_is_never_found() -> None:
    series = settled()
    assert [series.add(1.3) for _ in range(5)].index(True) == 4
    series = settled()
    assert not any(series.add(1.14) for _ in range(200))


def test_after_a_restart_other_values_are_the_same_level() -> None:
    series = settled()
    for _ in range(3):
        series.add(2.0)
    assert series.factor == 2.0
    series.restart()
    assert not any(series.add(10.0) for _ in range(SETTLED + 20))
    assert series.factor == 2.0 and series.first_level == pytest.approx(5.0)
