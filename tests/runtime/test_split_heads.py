"""Programs whose head is divided over their ranks: loss and every gradient equal those of the whole, in float64."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.runtime import split_heads
from tests.runtime.case import Case
from tests.runtime.split_heads import Divided
from tests.selection import graded, selected

CASES = {
    4: [
        Divided(Case("1f1b", 4, 5, "llama")),
        Divided(Case("gpipe", 4, 3, "gpt"), vocabulary=50),
        Divided(Case("1f1b", 2, 3, "llama", tp=2, sequence_parallel=True), vocabulary=52),
        Divided(Case("seq1f1b", 4, 3, "llama", lengths=(6, 4, 2)), vocabulary=51),
        Divided(Case("zb1p", 4, 5, "gpt"), weights_apart=True),
        Divided(Case("zbv", 4, 5, "llama", layers=8), vocabulary=50, weights_apart=True),
        Divided(Case("1f1b", 2, 3, "gpt", tp=2, loss_chunk=5), weights_apart=True),
        Divided(Case("interleaved-1f1b", 4, 4, "gpt", v=2, layers=8)),
    ],
    3: [
        Divided(Case("1f1b", 3, 4, "llama", layers=3, loss_chunk=5), vocabulary=50),
        Divided(Case("interleaved-1f1b", 3, 3, "llama", v=2, layers=6), vocabulary=49),
        Divided(Case("seq1f1b", 3, 2, "gpt", lengths=(5, 7), layers=3), vocabulary=47, recomputed=True),
        Divided(Case("hanayo", 3, 3, "llama", v=2, layers=6), vocabulary=49),
    ],
    2: [
        Divided(Case("1f1b", 2, 1, "gpt"), vocabulary=49),
        Divided(Case("zbv", 2, 3, "gpt"), vocabulary=49),
        Divided(Case("gpipe", 2, 3, "llama", loss_chunk=5)),
    ],
}  # fmt: skip


EVERY = [case for cases in CASES.values() for case in cases]
CORE = {CASES[4][2], CASES[4][5]}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[Divided, list[dict[str, Any]]]:
    wanted = selected(request, "divided", EVERY)
    chosen = {size: [case for case in cases if case in wanted] for size, cases in CASES.items()}
    return {
        case: [each[index] for each in by_rank]
        for size, cases in chosen.items()
        for by_rank in [run_ranks(split_heads.run, size, cases) if cases else []]
        for index, case in enumerate(cases)
    }


@pytest.mark.parametrize("divided", graded(EVERY, CORE), ids=str)
def test_equal_to_the_whole(divided: Divided, results: dict[Divided, list[dict[str, Any]]]) -> None:
    by_rank, case = results[divided], divided.case
    for result in by_rank:
        error, parameter = result["gradient"]
        assert error < 1e-9, parameter
        assert result["loss"] < 1e-12 and result["evaluation"] < 1e-12
        assert result["left"] == 0
    for counted in ("losses", "evaluated"):  # the rank of the last part reports them
        assert sorted(result[counted] for result in by_rank) == [0] * (case.pp - 1) * case.tp + [case.m] * case.tp
    rows = [result["rows"] for result in by_rank]
    assert sum(rows) == divided.vocabulary and max(rows) - min(rows) <= 1
