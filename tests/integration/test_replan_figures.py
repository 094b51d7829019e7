"""The table of emulated runs that plan themselves anew: what its figures are of. No time is looked at."""

from __future__ import annotations

from benchmarks.report import written_into
from netlab.replan import PAGE, _figures
from netlab.replan_ranks import Cause, Watched

CAUSE = Cause(ranks={2: 2.0}, first=5, end=11)


def test_steps_count_from_the_first_that_was_slow_or_well_again() -> None:
    seconds = [9.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 1.6, 1.6, 1.6, 1.1, 1.1, 1.0]
    plans = [0] * 7 + [1] * 5 + [2]
    lines = ["iteration 6: rank 2 is at 0.50 of its speed; a step takes 2.00 times as long as at first"]
    cells = _figures(Watched(seconds, plans, lines), CAUSE, unchanged=2.0, oracle=1.5)
    assert cells == ("1.000", "2.000", "2 steps", "3 steps", "1.600", "1.500", "80%", "2 steps")


def test_what_never_happened_is_told() -> None:
    cells = _figures(Watched([1.0] * 13, [0] * 13, []), CAUSE, unchanged=2.0, oracle=1.5)
    assert cells == ("1.000", "2.000", "never", "never", "", "1.500", "0%", "never")


def test_the_table_has_its_place_in_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert "| mine |" in written_into(page, {"replan": ["| mine |"]})
