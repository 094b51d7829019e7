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
    blocks, divided heads, and copies beside whole sequences, chunks and weights that travel."""
    copies = case.offload is not None and (bool(case.lengths), case.folds > 0, case.schedule.startswith(("we", "wz")))
    return {case.schedule, case.ship, case.cut_after, case.multiplex, case.vocabulary, copies}


CORE = frozenset(first_of_each(CASES, kinds)) | set(OFFLOADING[:3])
TRANSPORTS = ("nccl", "gloo")

Results = dict[tuple[str, Case], list[Found]]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Results:
    """By rank, of each transport and case. One launch for all: starting ranks costs more than running the cases."""
    cases, transports = selected(request, "case", CASES), selected(request, "transport", TRANSPORTS)
    by_rank = run_ranks(run_checked, 4, transports, built(cases), timeout=900.0)
    return {
        (transport, case): [each[i][j] for each in by_rank]
        for i, transport in enumerate(transports)
        for j, case in enumerate(cases)
    }


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("case", graded(CASES, CORE), ids=str)
def test_all_that_is_done_with_memory_is_ordered(transport: str, case: Case, results: Results) -> None:
    for rank, found in enumerate(results[transport, case]):
        assert not found.findings, f"on rank {rank}: " + "\n".join(found.findings)
        assert found.kernels > 50 and found.freed > 50 and found.sent > 0, "a rank that ran nothing proves nothing"


@pytest.mark.parametrize("case", graded(OFFLOADING, CORE), ids=str)
def test_copies_run_beside_them(case: Case, results: Results) -> None:
    """Or nothing was proved of them: activations left, to memory of the host that was used again."""
    for transport in TRANSPORTS:
        found = results[transport, case][: case.pp]
        assert sum(each.moved > 0 for each in found) >= case.pp - 1  # one may run nothing
        assert any(each.again > 0 for each in found)


@pytest.mark.parametrize("case", graded(CASES, CORE), ids=str)
def test_both_transports_bring_the_same(case: Case, results: Results) -> None:
    """Their gradients are those of test_equality.py then, whose messages are gloo's."""
    over_nccl, over_gloo = (results[transport, case] for transport in TRANSPORTS)
    for one, other in zip(over_nccl, over_gloo, strict=True):
        assert one.gradients == pytest.approx(other.gradients, rel=1e-6) and one.gradients > 0
        assert one.strided == other.strided


def test_every_schedule_is_among_them() -> None:
    assert {case.schedule for case in CASES} == {schedule for schedule in CATALOGUE if schedule != "none"}
