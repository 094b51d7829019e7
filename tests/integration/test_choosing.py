"""In no row of docs/choosing.md is a schedule slower with `auto` than without, simulated.

Settings are those that benchmarks/choosing.py tries first of each schedule, with fewer microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks.choosing import ROWS, Row, names, program_of, savings, variants
from benchmarks.simulated import Result, Setting, result_of, simulated
from helixpipe.common.errors import UserError
from helixpipe.costs.models import OFF
from schedules import CATALOGUE
from tests.selection import graded

MICROBATCHES = 8
PLACES = [(row, name) for row in range(1, len(ROWS) + 1) for at, name in enumerate(names()) if (row + at) % 6 == 0]
"""A part of them, since each takes seconds: every row, and every schedule on several of them."""
CORE = {(3, "1f1b"), (3, "zb1p"), (7, "gpipe"), (2, "chimera")}


def result(setting: Setting, row: Row, way: str) -> Result | None:
    """Of a step; None where the schedule refuses the shape or the step does not fit. way: of `--overlap-tp-comm`; auto
    as of one schedule alone."""
    plan = row.plan(chunk_size=setting.chunk_size)
    ways = plan.costs.ways_to_hide(setting.chunks) if way == "auto" else (plan.costs,)
    found = []
    for costs in ways:
        own = replace(plan, costs=costs)
        try:
            found.append(result_of(setting, simulated(own, program_of(setting, own))))
        except UserError:
            continue
    return max((each for each in found if each.fits), key=lambda each: each.tokens, default=None)


def first_fitting(name: str, row: Row) -> Iterator[tuple[Setting, Result]]:
    """Yield the setting of each variant that keeps most of what fits, with its step."""
    for variant in variants(CATALOGUE[name], row):
        for setting in savings(variant, row):
            found = result(setting, row, OFF)
            if found is not None:
                yield setting, found
                break


@pytest.mark.parametrize("place", graded(sorted({*PLACES, *CORE}), CORE), ids=lambda place: f"row{place[0]}-{place[1]}")
def test_no_schedule_is_slower_with_auto(place: tuple[int, str]) -> None:
    number, name = place
    row = replace(ROWS[number - 1], microbatches=MICROBATCHES)
    setting, plain = next(first_fitting(name, row), (None, None))
    if setting is None or plain is None:
        return  # nothing fits, and auto can only do better
    spread = replace(setting, vocabulary="auto")
    for each, way in ((setting, "auto"), (spread, OFF), (spread, "auto")):
        found = result(each, row, way)
        assert found is not None and found.tokens >= plain.tokens * (1 - 1e-9), (each.vocabulary, way)
