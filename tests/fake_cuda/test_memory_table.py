"""What ranks allocate at the sizes of real models is what is predicted."""

from __future__ import annotations

import pytest

from benchmarks.memory_table import SETUPS, WITHIN, rows_of, short
from benchmarks.report import ROOT

BEYOND = ("full recomputation --use-distributed-optimizer",)
"""What flags end with whose predictions are not within 2 % on every rank: the page says why."""


def within() -> list[int]:
    """The numbers of the other jobs."""
    named = [(number, short(setup.flags)) for number, setup in enumerate(SETUPS, 1)]
    return [number for number, flags in named if not flags.endswith(BEYOND)]


@pytest.mark.thorough
@pytest.mark.parametrize("number", within())
def test_predictions_are_within_two_percent(number: int) -> None:
    rows = rows_of([number])
    assert len(rows) == 3 and WITHIN == 0.02
    assert {row.rank: row.error for row in rows if abs(row.error) > WITHIN} == {}


def test_the_page_has_every_rank_and_marks_what_is_not_within() -> None:
    page = (
        (ROOT / "docs/dry_run.md").read_text(encoding="utf-8").split("<!-- bench: memory -->\n")[1].split("<!-- end")[0]
    )
    lines = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(lines) == len(SETUPS)
    errors = [error.strip() for line in lines for error in line[-1].split(",")]
    assert len(errors) == sum(len(setup.job(at).ranks) for at, setup in enumerate(SETUPS, 1)) >= 40
    for error in errors:
        value = abs(float(error.strip("*%")))
        assert ("**" in error) == (value > 100 * WITHIN) or value == 100 * WITHIN
