"""FLOPs, saved bytes, messages and weights of every piece equal what torch counts of the real ones, exactly."""

from __future__ import annotations

from typing import Any

import pytest

from tests.costs import divided, layouts, leaving
from tests.distributed import run_ranks
from tests.selection import graded, selected

CASES = [*layouts.CASES, *layouts.HALVES_CASES, *layouts.CONTEXT_CASES]
CORE = {*leaving.CASES[:2], "llama-tp1-slices", "qwen3-tp2-sp", "gpt-cp2-p2p", "llama-cp2-a2a", "llama-tp2-sp-halves"}
"""Each way to cut a model."""


@pytest.fixture(scope="module")
def counts(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(leaving.compare, 2, selected(request, "case", CASES))


@pytest.mark.parametrize(
    "what", ["flops", "saved", "stash", "deferred", "message", "parameters", "recompute", "helix", "peak"]
)
@pytest.mark.parametrize("case", graded(CASES, CORE))
def test_counts_equal_torch(counts: list[dict[str, Any]], case: str, what: str) -> None:
    check(counts, case, what)


@pytest.mark.parametrize("case", graded(leaving.CASES, CORE))
def test_what_leaves_equals_what_is_counted(counts: list[dict[str, Any]], case: str) -> None:
    """Bytes that the executor offloads of each unit; storages that move, each once."""
    check(counts, case, "leaving")


@pytest.fixture(scope="module")
def of_parts() -> list[dict[str, Any]]:
    return run_ranks(divided.compare, 2, [*divided.CASES, *divided.CASES_OVER_CONTEXT])


@pytest.mark.parametrize("what", ["flops", "saved", "deferred", "message", "sums", "parameters"])
@pytest.mark.parametrize("case", [*divided.CASES, *divided.CASES_OVER_CONTEXT])
def test_counts_of_a_divided_head_equal_torch(of_parts: list[dict[str, Any]], case: str, what: str) -> None:
    check(of_parts, case, what)


def check(counts: list[dict[str, Any]], case: str, what: str) -> None:
    counted = 0
    for rank, results in enumerate(counts):
        rows = [row for row in results[case] if row[0].startswith(what)]
        wrong = [f"{name}: torch {theirs}, ours {ours:g}" for name, theirs, ours in rows if theirs != ours]
        assert not wrong, f"rank {rank}: " + "; ".join(wrong[:12])
        counted += bool(rows)
    assert counted == (1 if case in layouts.CASES and layouts.CASES[case][1] == 1 else len(counts))
