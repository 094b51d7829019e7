"""Every kind of schedule times expert-parallel sizes 1, 2 and 4: losses and gradients equal those of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.runtime.case import Case, built
from tests.runtime.equality import check, run_cases
from tests.runtime.expert_cases import GRID
from tests.selection import selected


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[Case, list[dict[str, Any] | None]]:
    """Each case's results by rank."""
    cases = selected(request, "case", GRID)
    by_rank = run_ranks(run_cases, 8, built(cases), timeout=1200.0)
    return {case: [found[index] for found in by_rank] for index, case in enumerate(cases)}


@pytest.mark.thorough
@pytest.mark.parametrize("case", GRID, ids=str)
def test_equal_to_one_process(case: Case, results: dict[Case, list[dict[str, Any] | None]]) -> None:
    check(case, results[case])
