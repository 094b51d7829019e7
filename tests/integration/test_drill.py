"""The fault drill: what its table and exit status say. No time is looked at."""

from __future__ import annotations

import pytest

from benchmarks import drill
from benchmarks.drill import FAULTS, Drill, Options, Row
from benchmarks.report import ROOT, written_into
from helixpipe.common.errors import UserError

PAGE = ROOT / "docs" / "resilience.md"
GOOD = Row("a fault", "2 s", "9 s", 5, equal=True)


@pytest.mark.parametrize(
    ("row", "status"),
    [
        (GOOD, 0),
        (Row("unlike", "2 s", "9 s", 5, equal=False), 1),
        (Row("not noticed", "never", "9 s", 5, equal=True), 1),
        (Row("did not go on", "2 s", "never", 5, equal=True), 1),
        (Row("left out", not_run="needs root"), 0),
    ],
)
def test_a_row_that_failed_fails_the_drill_one_that_was_not_run_says_so(
    row: Row, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drill, "FAULTS", {"good": lambda _: GOOD, "other": lambda _: row})
    outcome = drill.run(Options())
    assert outcome.status == status and ("FAILED: " + row.fault in outcome.text) == bool(status)
    assert ("not run: left out: needs root" in outcome.text) == bool(row.not_run)
    assert "| a fault | 2 s | 9 s | 5 | yes |" in outcome.text


def test_a_fault_that_there_is_not_is_refused() -> None:
    with pytest.raises(UserError, match=r"--rows earthquake is not a fault; valid values are killed, "):
        drill.run(Options(rows=("earthquake",)))


def test_losses_are_equal_where_every_line_is_that_of_the_undisturbed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def line(number: int, loss: str) -> str:
        return f"iteration {number:8d}/ 60 | lm loss: {loss} | grad norm: 1.0 |"

    own = Drill(ROOT)
    monkeypatch.setattr(
        own, "expected", lambda *_: {1: "lm loss: 2.5 grad norm: 1.0", 2: "lm loss: 2.4 grad norm: 1.0"}
    )
    both = "\n".join([line(1, "2.5"), line(2, "2.4")])
    assert own.equal(both) and own.equal(line(1, "2.5"), both)
    assert not own.equal(line(1, "2.5")) and not own.equal(both, line(2, "2.3"))
    assert drill._without(both, 1) == line(1, "2.5")


def test_a_links_speed_is_read_from_what_the_run_says() -> None:
    said = (
        "iteration 30: rank 1's link to rank 0 is at 0.21 of its speed, rank 0 is at 0.9 of its speed; a step takes\n"
        "iteration 46: rank 0's link to rank 1 has its first speed again; a step takes"
    )
    assert drill.link_speeds(said) == [(30, 0.21), (46, 1.0)]


def test_the_table_has_its_place_in_the_page() -> None:
    assert "| mine |" in written_into(PAGE.read_text(encoding="utf-8"), {"drill": ["| mine |"]})
    assert set(FAULTS) >= {"killed", "stopped", "slow", "full-disk", "cut-link", "slow-link", "flip-message"}
