"""What ranks report says which of them, or which link, is slow, how slow, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.adapt.measured_costs import MeasuredCosts
from helixpipe.adapt.monitor import Change, Monitor, Part
from helixpipe.adapt.reports import Expected, RankTimes, Received, message_times
from helixpipe.simulate.simulator import simulate
from tests.adapt.paper_steps import BASE, STEP, lowered_of, program, reports, true_costs

FIRST_SLOW = 20


def changes(monitor: Monitor, steps: range, costs: MeasuredCosts, rng: Random, noise: float) -> list[Change]:
    found = (monitor.take(reports(monitor.lowered, costs, step, rng, noise)) for step in steps)
    return [each for each in found if each is not None]


def test_a_report_survives_being_sent() -> None:
    report = reports(lowered_of(program()), true_costs(program()), 4)[1]
    assert RankTimes.from_json(report.to_json()) == report
    assert report.received and report.ops


@pytest.mark.parametrize(
    ("ranks", "links", "part", "said"),
    [
        ({2: 2.0}, {}, Part("rank", (2,)), "rank 2 is at 0.50 of its speed; a step takes 1."),
        (
            {},
            {(1, 2): 4.0},
            Part("link", (1, 2)),
            "rank 1's link to rank 2 is at 0.25 of its speed; a step takes 1.",
        ),
        (
            {},
            {(3, 2): 4.0},
            Part("link", (3, 2)),
            "rank 3's link to rank 2 is at 0.25 of its speed; a step takes 1.",
        ),
    ],
)
@pytest.mark.parametrize("name", ["1f1b", "zb1p"])
def test_one_slow_part_is_found_and_named(
    name: str, ranks: Mapping[int, float], links: Mapping[tuple[int, int], float], part: Part, said: str
) -> None:
    own, rng = program(name), Random(1)
    (factor,) = [*ranks.values(), *links.values()]
    monitor = Monitor(lowered_of(own), BASE)
    assert not changes(monitor, range(2, FIRST_SLOW, STEP), true_costs(own), rng, 0.001) and monitor.known
    (change,) = changes(monitor, range(FIRST_SLOW, FIRST_SLOW + 30, STEP), true_costs(own, ranks, links), rng, 0.001)
    assert change.step <= FIRST_SLOW + 10
    assert [each.part for each in change.slow] == [part]
    assert change.slow[0].factor == pytest.approx(factor, rel=0.01)
    assert said in str(change).replace("0.49", "0.50").replace("0.51", "0.50").replace("0.24", "0.25").replace(
        "0.26", "0.25"
    )
    (back,) = changes(monitor, range(60, 80, STEP), true_costs(own), rng, 0.001)
    assert "has its first speed again; a step takes 1.00 times" in str(back) and not monitor.slow


def test_what_is_measured_predicts_the_slow_step() -> None:
    own, rng = program("1f1b"), Random(2)
    monitor = Monitor(lowered_of(own), BASE)
    slow = true_costs(own, {1: 2.0}, {(2, 3): 4.0})
    changes(monitor, range(2, FIRST_SLOW, STEP), true_costs(own), rng, 0.0)
    found = changes(monitor, range(FIRST_SLOW, 40, STEP), slow, rng, 0.0)
    lowered = monitor.lowered
    assert simulate(lowered, monitor.costs()).makespan == pytest.approx(simulate(lowered, slow).makespan, rel=0.02)
    true = simulate(lowered, slow).makespan / simulate(lowered, true_costs(own)).makespan
    assert found[-1].cost == pytest.approx(true, rel=0.02)


@settings(max_examples=3)
@given(st.integers(0, 1 << 30))
def test_no_false_alarm_in_a_thousand_noisy_steps(seed: int) -> None:
    own = program("1f1b")
    monitor = Monitor(lowered_of(own), BASE)
    rng, base = Random(seed), reports(lowered_of(own), true_costs(own), 0)
    for step in range(2, 1000, STEP):
        noisy = [_noisy(report, step, rng) for report in base]
        assert monitor.take(noisy) is None, step


def _noisy(report: RankTimes, step: int, rng: Random) -> RankTimes:
    factor = 1 + rng.gauss(0, 0.04)
    ops = tuple((*key, seconds * factor, count) for *key, seconds, count in report.ops)
    received = {
        number: each._replace(arrived=each.arrived + abs(rng.gauss(0, 0.02)))
        for number, each in report.received.items()
    }
    return replace(report, step=step, ops=ops, received=received)


def test_the_time_of_a_message_is_known_where_its_receiver_waits() -> None:
    messages = [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0)]
    sent = {0: 10.0, 1: 11.0, 2: 12.0, 3: 30.0}
    received = {
        0: Received(0.0, 5.0, 14.0),  # 4: it waits from before it was sent
        1: Received(0.0, 14.0, 18.0),  # 4: the link was busy until 14
        2: Received(0.0, 25.0, 25.0),  # unknown: it had come
        3: Received(32.0, 33.0, 36.0),  # 4: its receive came later than it
    }
    assert message_times(messages, sent, received) == [(4.0, 1.0), (4.0, 1.0), (4.0, 1.0)]
    late = {**received, 3: Received(0.0, 33.0, 36.0)}
    assert message_times(messages, {**sent, 3: 20.0}, late) == [(4.0, 1.0)] * 2  # behind one whose end is unknown


def test_a_step_is_that_of_the_slowest_replica() -> None:
    own = program("1f1b")
    lowered = lowered_of(own)
    one = reports(lowered, true_costs(own), 6)
    other = [replace(each, pipeline=1) for each in reports(lowered, true_costs(own, {3: 2.0}), 6)]
    seen = Expected(lowered, BASE).observation([*one, *other])
    assert seen.ranks[3] == pytest.approx(2.0) and seen.ranks[0] == pytest.approx(1.0)
    assert seen.seconds == other[0].end > one[0].end
