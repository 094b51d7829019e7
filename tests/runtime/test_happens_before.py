"""On a device where nothing happens in an order that nobody asked for, no step uses memory too early or too late.

Two steps of every case run on the CPU, each kernel, copy and message with the vector clock of its stream
(`happens_before/`). Whatever two of them do with the same memory must be ordered by waits that the code has; so must
what is done with memory that the allocator may have given out again.
"""

from __future__ import annotations

import pytest

from schedules import CATALOGUE
from tests.distributed import run_ranks
from tests.runtime.case import Case, built
from tests.runtime.happens_before.cases import OFFLOADING, OTHERS, SCHEDULES
from tests.runtime.happens_before.ranks import Found, run_checked
from tests.selection import first_of_each, graded, selected

CASES = [*SCHEDULES, *OTHERS, *OFFLOADING]


def kinds(case: Case) -> set[object]:
    """Return what `make test` has a case of at least: every schedule, weights that are sent, cuts inside a layer,
    blocks, divided heads, weights in parts, pieces replayed from graphs, collectives inside ops in halves and in
    pairs, and copies beside whole sequences, chunks and weights that travel."""
    copies = case.offload is not None and (bool(case.lengths), case.folds > 0, case.schedule.startswith(("we", "wz")))
    hidden = case.halves, case.pairs, case.cp_comm_type if case.cp > 1 else ""
    parts = case.sharded, case.gathered_once
    others = case.multiplex, case.vocabulary, ("graphs", case.graphs)
    return {case.schedule, case.ship, case.cut_after, *others, hidden, copies, parts}


CORE = frozenset(first_of_each(CASES, kinds)) | set(OFFLOADING[:3])
OVER_GLOO = frozenset(
    [*(case for case in SCHEDULES if case.schedule in ("1f1b", "weipipe")), OTHERS[0], *OFFLOADING[:3]]
)
"""The core's cases over gloo: its messages, weights that travel, several tensors a message, copies."""

Results = dict[Case, list[Found]]


@pytest.fixture(scope="module")
def over_nccl(request: pytest.FixtureRequest) -> Results:
    return results_over("nccl", request)


@pytest.fixture(scope="module")
def over_gloo(request: pytest.FixtureRequest) -> Results:
    return results_over("gloo", request)


def results_over(transport: str, request: pytest.FixtureRequest) -> Results:
    """By rank, of each case. One launch for all: starting ranks costs more than running the cases."""
    cases = selected(request, "case", CASES)
    by_rank = run_ranks(run_checked, 4, transport, built(cases), timeout=900.0)
    return {case: [results[number] for results in by_rank] for number, case in enumerate(cases)}


def check(results: list[Found]) -> None:
    for rank, result in enumerate(results):
        assert not result.findings, f"on rank {rank}: " + "\n".join(result.findings)
        assert result.kernels > 50 and result.freed > 50 and result.sent > 0, "a rank that ran nothing proves nothing"


@pytest.mark.parametrize("case", graded(CASES, CORE), ids=str)
def test_all_that_is_done_with_memory_is_ordered_over_nccl(case: Case, over_nccl: Results) -> None:
    check(over_nccl[case])


@pytest.mark.parametrize("case", graded(CASES, OVER_GLOO), ids=str)
def test_all_that_is_done_with_memory_is_ordered_over_gloo(case: Case, over_gloo: Results) -> None:
    check(over_gloo[case])


@pytest.mark.parametrize("case", graded(OFFLOADING, OVER_GLOO), ids=str)
def test_copies_run_beside_them(case: Case, over_nccl: Results, over_gloo: Results) -> None:
    """Or nothing was proved of them: activations left, to memory of the host that was used again."""
    for results in (over_nccl, over_gloo):
        own = results[case][: case.pp]
        assert sum(result.moved > 0 for result in own) >= case.pp - 1  # one may run nothing
        assert any(result.again > 0 for result in own)


@pytest.mark.parametrize("case", graded(CASES, OVER_GLOO), ids=str)
def test_both_transports_bring_the_same(case: Case, over_nccl: Results, over_gloo: Results) -> None:
    """Their gradients are those of test_equality.py then, whose messages are gloo's."""
    for one, other in zip(over_nccl[case], over_gloo[case], strict=True):
        assert one.gradients == pytest.approx(other.gradients, rel=1e-6) and one.gradients > 0
        assert one.strided == other.strided
    if case == OTHERS[0]:
        assert all(each.strided for each in over_nccl[case][: case.pp]), "no views: nothing was proved of their copies"


def test_every_schedule_is_among_them() -> None:
    assert {case.schedule for case in CASES} == {schedule for schedule in CATALOGUE if schedule != "none"}
