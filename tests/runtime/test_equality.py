"""Loss and every parameter's gradient under every schedule equal those of plain megatron-core in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.planning.reorder.improve import Budget, improve
from helixpipe.planning.reorder.starts import cut, split
from helixpipe.planning.vocabulary.spread import spread_heads
from helixpipe.program.files import save_program
from helixpipe.program.text import to_csv
from schedules import Shape, build
from tests.distributed import run_ranks
from tests.runtime.block_cases import GROUPS
from tests.runtime.case import built
from tests.runtime.equality import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    Case,
    check,
    fail_in_the_middle,
    peaks_of_stash,
    run_cases,
    run_csv,
)
from tests.selection import first_of_each, graded, selected

CASES = [case for group in GROUPS.values() for case in group]
SPREAD = (
    "schedule",
    "pp",
    "m",
    "style",
    "tp",
    "v",
    "tied",
    "layers",
    "lengths",
    "folds",
    "offload",
    "documents",
    "late",
    "graphs",
)
"""What most cases have some of."""
SIZES = ("mlp_chunk", "loss_chunk", "memory_limit")
"""Of which one will do."""


def kinds(case: Case) -> Iterator[tuple[object, ...]]:
    """Yield what `make test` has a case of at least: each schedule with fewer microbatches than ranks and with
    sequences cut; each style with tensor parallelism and tied weights; copies and late messages beside chunks;
    context parallelism over documents, with recomputation and without; heads on all ranks, tied and not, with fewer
    microbatches than ranks; layers that are unlike over a context and in blocks; communication of each kind
    hidden in each way; and every other setting."""
    if case.style in ("latent", "deepseek", "gated", "balanced"):
        yield case.style, bool(case.lengths), case.blocks, case.cp_comm_type if case.cp > 1 else ""
        return
    yield case.schedule, case.m < case.pp
    yield "cut", case.schedule, len(case.lengths) > 1
    yield case.style, case.tp, case.tied
    yield "copies", case.offload is not None, bool(case.lengths), case.late
    yield "heads", case.vocabulary, case.tied, case.m < case.pp
    yield "layers", case.style == "mixed", case.blocks, case.cp_comm_type if case.cp > 1 else ""
    yield "hidden", case.halves, case.pairs, case.cp_comm_type if case.cp > 1 else ""
    yield "graphs", case.graphs, case.pp, bool(case.lengths)
    yield "context", case.cp, case.documents is not None, case.recompute.granularity is None
    for each in fields(case):
        if each.name not in SPREAD:
            value = getattr(case, each.name)
            yield each.name, value is not None and value > 0 if each.name in SIZES else value


CORE = frozenset(first_of_each([case for case in CASES if case not in GROUPS["further elsewhere"]], kinds))


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[Case, list[dict[str, Any] | None]]:
    """Each case's results by rank. One launch for all: starting ranks costs more than running the cases."""
    cases = selected(request, "case", CASES)
    by_rank = run_ranks(run_cases, 4, built(cases), timeout=1200.0)
    return {case: [results[index] for results in by_rank] for index, case in enumerate(cases)}


@pytest.mark.parametrize("case", graded(CASES, CORE), ids=str)
def test_equal_to_one_process(case: Case, results: dict[Case, list[dict[str, Any] | None]]) -> None:
    check(case, results[case])


ON_GPU = {
    dtype: [
        replace(case, dtype=dtype)
        for name, group in GROUPS.items()
        for case in group
        if name != "precision" and not case.sequence_parallel and (case.tp == 1 or dtype is torch.float64)
    ]
    for dtype in (torch.float64, torch.float32, torch.bfloat16)
}
"""All but sequence parallelism, whose collectives gloo has for the CPU only."""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ON_GPU, ids=str)
def test_equal_to_one_process_on_a_gpu(dtype: torch.dtype) -> None:
    """Four ranks share the GPUs there are, over gloo."""
    cases = ON_GPU[dtype]
    by_rank = run_ranks(run_cases, 4, built(cases), timeout=1500.0)
    failures = []
    for index, case in enumerate(cases):
        try:
            check(case, [results[index] for results in by_rank])
        except AssertionError as error:
            failures.append(f"{case}: {[results[index] for results in by_rank]} {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("case", GROUPS["adapipe"], ids=str)
def test_adapipe_is_held_to_uneven_stages(case: Case) -> None:
    stages = case.program().stages
    assert len({len(stage.pieces) // 5 for stage in stages}) == 2
    assert len({tuple(tuple(piece.kind for piece in run) for run in stage.recompute) for stage in stages}) > 1


def test_program_of_ones_own(tmp_path: Path) -> None:
    """A file: the interleaved program on 2 ranks, loaded as 4 stages."""
    path = tmp_path / "mine.csv"
    to_csv(build("interleaved-1f1b", Shape(2, 4, 4, virtual_stages=2)), path)
    for (result,) in run_ranks(run_csv, 2, str(path), 4):  # both ranks are of the one pipeline
        assert result["gradient"][0] < GRADIENT_TOLERANCE[torch.float64]
        assert result["loss"] < LOSS_TOLERANCE[torch.float64]


def test_programs_that_a_search_found(tmp_path: Path) -> None:
    """And all that a search may do to one: other orders, cut sequences, split backwards, spread heads."""
    costs = PieceTimes({"qkv": 1.0, "attn": 2.0, "mlp": 3.0, "head": 2.0}, message=0.5)
    given = build("1f1b", Shape(2, 3, 4))
    found = improve(given, costs, Budget(400)).after.program
    assert found.ranks != given.ranks
    cut_up = improve(split(spread_heads(cut(given, 2), costs)), costs, Budget(400, orders_only=True)).after.program
    assert cut_up.num_chunks == 2 and cut_up.stages[-1].placement == "replicated"
    cases = []
    for program in (found, cut_up):
        path = tmp_path / f"{len(cases)}.json"
        save_program(program, path)
        lengths = (6, 6) if program.num_chunks == 2 else ()
        cases.append(Case(str(path), 2, 3, "llama", lengths=lengths))
    for results in zip(*run_ranks(run_cases, 2, cases), strict=True):
        assert results[0] is not None
        assert results[0]["gradient"][0] < GRADIENT_TOLERANCE[torch.float64]
        assert results[0]["loss"] < LOSS_TOLERANCE[torch.float64]


def test_three_ranks_help_each_other() -> None:
    """Chunks in three parts, which do not divide heads."""
    case = Case("sppo", 3, 1, "llama", tied=True, layers=3, lengths=(4, 4, 4), multiplex="both")
    check(case, [results[0] for results in run_ranks(run_cases, 3, [case])])


def test_a_failing_op_is_shown_and_ends_every_rank() -> None:
    first, second = run_ranks(fail_in_the_middle, 2, timeout=280.0)
    assert "out of order" in second
    assert "--> " in second and "RUN 1F1" in second and "pipeline rank 1" in second
    assert first != "finished"


def test_stash_is_as_small_as_the_schedule_says() -> None:
    expected = {"1f1b": [4, 3, 2, 1], "gpipe": [6, 6, 6, 6]}
    by_rank = run_ranks(peaks_of_stash, 4, list(expected), 6)
    for schedule, peaks in expected.items():
        assert [results[schedule][0] for results in by_rank] == peaks
        assert not any(sum(results[schedule][1]) for results in by_rank)
