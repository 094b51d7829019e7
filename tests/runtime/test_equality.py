"""Loss and every parameter's gradient under every schedule equal those of plain megatron-core in one process."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from helixpipe.planning.recompute import RecomputeOptions
from helixpipe.program.program import to_csv
from schedules import Shape, build
from schedules.weipipe import WeipipeOptions
from tests.distributed import chosen, run_ranks
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

STYLES = ("gpt", "llama")


def pipelines(pp: int, tp: int = 1, **extra: Any) -> list[Case]:
    """Every schedule with m below p, equal to p, and not a multiple of p where that is allowed; tied for GPT style."""
    cases = []
    for style, (schedule, v) in product(STYLES, (("gpipe", None), ("1f1b", None), ("interleaved-1f1b", 2))):
        counts = (1, pp + 1, 2 * pp) if v is None else (pp, 2 * pp)
        for m in counts:
            layers = pp * (v or 1)
            cases.append(Case(schedule, pp, m, style, tp=tp, v=v, tied=style == "gpt", layers=layers, **extra))
    return cases


RECOMPUTATIONS = (
    RecomputeOptions("without-attention"),
    RecomputeOptions("full", recompute_early=False),
    RecomputeOptions("without-attention", recompute_early=False),
    RecomputeOptions("selective", recompute_modules=("core_attn", "mlp")),
    RecomputeOptions("full", recompute_method="block", recompute_num_layers=1),
    RecomputeOptions("full", recompute_method="uniform", recompute_num_layers=2),
)


def weipipe_cases() -> list[Case]:
    """N from below P to 4P; L = P, 2P and uneven; both styles, tied and untied; TP with sequence parallelism; every
    option; each with one of the four schedules at least."""
    full, inside = RecomputeOptions("full"), RecomputeOptions("full", recompute_early=False)
    without, selective = RecomputeOptions("without-attention"), RecomputeOptions("selective", recompute_early=False)
    one, one_in_turn = WeipipeOptions(weipipe_slots=1), WeipipeOptions(weipipe_eager=False, weipipe_slots=1)
    six, six_in_turn = WeipipeOptions(weipipe_slots=6), WeipipeOptions(weipipe_eager=False, weipipe_slots=6)
    bf16 = WeipipeOptions(weipipe_grad_dtype="bf16")
    split: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
    return [
        Case("weipipe-naive", 4, 4, "gpt", tied=True, layers=4),
        Case("weipipe", 4, 16, "llama", layers=4),
        Case("wzb1", 4, 8, "gpt", tied=True, layers=8),
        Case("wzb2", 4, 6, "llama", layers=7),
        Case("weipipe-naive", 4, 9, "llama", tied=True, layers=5),
        # fewer microbatches than ranks: some ranks own weights and run nothing
        Case("weipipe", 4, 3, "gpt", tied=True, layers=6),
        Case("wzb1", 4, 2, "llama", layers=5),
        Case("wzb2", 4, 1, "llama", tied=True, layers=4),
        Case("weipipe", 2, 1, "gpt", layers=2),
        # tensor parallelism
        Case("weipipe-naive", 2, 4, "gpt", tied=True, layers=2, **split),
        Case("weipipe", 2, 8, "llama", layers=3, **split),
        Case("wzb1", 2, 5, "llama", tied=True, layers=4, **split),
        Case("wzb2", 2, 4, "gpt", layers=3, **split),
        Case("weipipe", 2, 3, "gpt", tp=2, tied=True, layers=4),
        # recomputation
        Case("weipipe", 4, 8, "llama", layers=4, recompute=full),
        Case("wzb1", 2, 4, "gpt", tied=True, layers=4, recompute=without, **split),
        Case("wzb2", 4, 5, "gpt", layers=6, recompute=selective),
        Case("weipipe-naive", 2, 4, "llama", layers=4, recompute=inside),
        # room for weights, turn by turn
        Case("weipipe", 4, 9, "gpt", layers=4, weipipe=one_in_turn),
        Case("wzb1", 4, 8, "llama", layers=5, weipipe=one),
        Case("wzb2", 2, 6, "llama", layers=3, weipipe=six_in_turn),
        Case("weipipe-naive", 4, 8, "gpt", layers=4, weipipe=six),
        # dropout
        Case("weipipe", 4, 6, "llama", layers=4, dropout=0.2),
        Case("wzb2", 2, 4, "llama", layers=2, dropout=0.2, recompute=inside),
        # gradients that travel in bfloat16
        Case("weipipe", 4, 16, "gpt", layers=4, weipipe=bf16),
        Case("wzb2", 2, 4, "llama", layers=3, weipipe=bf16, **split),
        # messages that overtake each other
        Case("weipipe", 4, 8, "llama", layers=4, late=True),
        Case("wzb1", 4, 6, "gpt", layers=5, weipipe=one, late=True),
        Case("wzb2", 2, 6, "llama", layers=3, weipipe=six_in_turn, late=True, **split),
    ]


GROUPS = {
    "p4": pipelines(4),
    "p2-dp2": pipelines(2),
    "p2-tp2": pipelines(2, tp=2)[::2] + pipelines(2, tp=2, sequence_parallel=True)[1::2],
    "p1": [Case("none", 1, m, style, tied=tied) for m in (1, 3) for style in STYLES for tied in (False, True)]
    + [Case("1f1b", 1, 3, "llama"), Case("gpipe", 1, 2, "gpt", tied=True)],
    "split": [
        Case(
            schedule,
            pp,
            4,
            style,
            tp=tp,
            v=v,
            tied=style == "gpt",
            sequence_parallel=sp,
            split=True,
            recompute=recompute,
        )
        for (pp, tp, sp), style in product(((4, 1, False), (2, 2, False), (2, 2, True)), STYLES)
        for schedule, v, recompute in (
            ("1f1b", None, RecomputeOptions()),
            ("interleaved-1f1b", 1, RecomputeOptions("without-attention")),
        )
    ],
    "recompute": [
        Case(schedule, pp, 4, style, v=v, tp=tp, tied=style == "gpt", dropout=dropout, recompute=options, split=split)
        for i, (pp, tp, schedule, v, split, style, dropout) in enumerate(
            (
                (4, 1, "1f1b", None, False, "llama", 0.2),
                (2, 2, "interleaved-1f1b", 2, True, "llama", 0.0),
                (2, 2, "1f1b", None, False, "gpt", 0.0),
                (2, 1, "zbv", None, False, "gpt", 0.0),
            )
        )
        for options in RECOMPUTATIONS[i % 2 :: 2]
    ]
    + [Case("gpipe", 2, 4, "gpt", tied=True, recompute=options) for options in RECOMPUTATIONS[::2]]
    + [
        Case("1f1b", 2, 3, STYLES[(i + j) % 2], recompute=options, cut_after=kind, tied=(i + j) % 2 == 0)
        for (i, kind), (j, options) in product(
            enumerate(("norm", "qkv", "attn", "proj")), enumerate(RECOMPUTATIONS[:2])
        )
    ],
    "chunks": [
        *(
            Case(schedule, pp, m, style, v=v, tied=style == "gpt", lengths=lengths)
            for pp, schedule, v in (
                (4, "seq1f1b", None),
                (4, "seq1f1b-zb", None),
                (2, "seq1f1b-interleaved", 2),
                (2, "terapipe", None),
            )
            for style, m, lengths in (
                ("gpt", 1, (7, 5)),
                ("llama", 3, (5, 4, 3)),
                ("gpt", 5, (3, 3, 3, 3)),
                ("llama", 2, (2, 2, 2, 2, 1, 1, 1, 1)),
            )
        ),
        *(
            Case(schedule, 2, 3, style, tp=2, v=v, tied=style == "gpt", sequence_parallel=sp, lengths=(6, 4, 2))
            for index, (schedule, v) in enumerate((("seq1f1b", None), ("seq1f1b-zb", None), ("seq1f1b-interleaved", 2)))
            for style, sp in zip(STYLES, (index % 2 == 0, index % 2 == 1), strict=True)
        ),
        *(
            Case(schedule, 2, 3, style, v=v, tied=style == "gpt", lengths=(6, 2, 4), recompute=options)
            for i, (schedule, v, style) in enumerate(
                (("seq1f1b", None, "llama"), ("seq1f1b-interleaved", 2, "gpt"), ("seq1f1b-zb", None, "llama"))
            )
            for options in RECOMPUTATIONS[i % 2 :: 2]
        ),
        *(
            Case("seq1f1b", 2, 2, style, tp=2, sequence_parallel=True, lengths=(8, 4), recompute=options)
            for style, options in zip(STYLES * 2, RECOMPUTATIONS[:4], strict=True)
        ),
        *(
            Case("seq1f1b", 2, 3, "llama", lengths=(5, 7), recompute=options, cut_after=kind)
            for kind, options in (("norm", RECOMPUTATIONS[2]), ("qkv", RecomputeOptions()), ("attn", RECOMPUTATIONS[2]))
        ),
        *(
            Case(schedule, pp, 3, "llama", lengths=(5, 4, 3), dropout=0.2, recompute=options)
            for schedule, pp, options in (
                ("seq1f1b", 2, RecomputeOptions()),
                ("seq1f1b", 4, RECOMPUTATIONS[0]),
                ("seq1f1b-zb", 2, RECOMPUTATIONS[1]),
            )
        ),
        Case("seq1f1b", 1, 2, "gpt", lengths=(4, 4, 4)),
    ],
    "mlp-slices": [
        *(
            Case(
                schedule,
                2,
                3,
                style,
                tp=tp,
                tied=style == "gpt",
                sequence_parallel=tp > 1,
                lengths=lengths,
                recompute=options,
                mlp_chunk=size,
            )
            for (i, (schedule, lengths, size)), (j, options) in product(
                enumerate((("1f1b", (), 5), ("seq1f1b", (6, 4, 2), 4), ("seq1f1b-zb", (6, 2, 4), 3))),
                enumerate((RecomputeOptions(), RECOMPUTATIONS[0], RECOMPUTATIONS[3])),
            )
            for style, tp in ((("gpt", 2), ("llama", 1))[(i + j) % 2],)
        ),
        *(Case(schedule, 4, 5, style, mlp_chunk=6) for schedule, style in product(("1f1b", "zb1p"), STYLES)),
        *(Case("1f1b", 2, 3, style, tp=2, split=True, mlp_chunk=7) for style in STYLES),
        *(Case("1f1b", 2, 3, style, dropout=0.2, mlp_chunk=5) for style in STYLES),
        Case("seq1f1b", 2, 3, "llama", lengths=(5, 4, 3), dropout=0.2, mlp_chunk=2),
        Case("1f1b", 2, 3, "gpt", cut_after="proj", mlp_chunk=5),
    ],
    "inner-cuts": [
        Case(
            "1f1b", 2, 3, STYLES[(i + tp) % 2], tp=tp, tied=(i + tp) % 2 == 0, sequence_parallel=tp > 1, cut_after=kind
        )
        for (i, kind), tp in product(enumerate(("norm", "qkv", "attn", "proj")), (1, 2))
    ],
    "zero-bubble": [
        Case(schedule, pp, m, style, tp=tp, tied=style == "gpt", sequence_parallel=tp > 1, layers=2 * pp)
        for (pp, tp), schedule, (style, m) in product(
            ((4, 1), (2, 2)), ("zb1p", "zb2p", "zbv", "zb-interleaved"), (("gpt", 1), ("gpt", 6), ("llama", 5))
        )
    ],
    "adapipe": [
        Case("adapipe", pp, m, style, tp=tp, tied=style == "gpt", layers=layers, memory_limit=limit)
        for style, (pp, tp, m, layers, limit) in product(
            STYLES, ((4, 1, 6, 7, 2.0), (4, 1, 6, 5, 1.5), (4, 1, 2, 7, 1.5), (2, 1, 6, 5, 1.5), (2, 1, 2, 7, 2.5))
        )
    ]
    + [
        Case("adapipe", 2, 6, "llama", tp=2, sequence_parallel=True, layers=5, memory_limit=1.5),
        Case("adapipe", 4, 6, "llama", layers=7, memory_limit=1.5, dropout=0.2),
    ],
    "helix": [
        # An orthogonal array: whatever two settings, all combinations of their values are here, equally often.
        *(
            Case(
                "helix",
                pp,
                pp * folds * loops,
                style,
                tp=tp,
                tied=style == "gpt",
                sequence_parallel=tp > 1,
                layers=pp * (1 + (a + b + c + 1) % 3),
                folds=folds,
                ship=ship,
                spread=(b + c) % 3 > 0,
                recompute=(RecomputeOptions(), RECOMPUTATIONS[0], RECOMPUTATIONS[2])[(a + 2 * b + c) % 3],
            )
            for (a, ship), (b, folds), (c, loops) in product(
                enumerate(("none", "qkv", "attention")), enumerate((1, 2, 3)), enumerate((1, 2, 3))
            )
            for pp, tp in (((2, 2), (4, 1), (2, 1))[(a + b + 2 * c) % 3],)
            for style in (("gpt", "llama", "llama")[(a + 2 * b + 2 * c) % 3],)
        ),
        *(
            Case("helix", 2, 3 * 2, "llama", layers=6, folds=3, ship=ship, split=True, spread=spread)
            for ship, spread in (("none", True), ("attention", False))
        ),
        *(
            Case("helix", 4, 8, "llama", layers=4, folds=2, ship=ship, dropout=0.2, recompute=options)
            for ship, options in (
                ("none", RecomputeOptions("without-attention")),
                ("qkv", RecomputeOptions()),
                ("attention", RecomputeOptions("without-attention")),
            )
        ),
        Case("helix", 1, 2, "llama", layers=2, folds=2, ship="attention"),
        Case("helix", 2, 4, "gpt", tp=2, sequence_parallel=True, layers=2, folds=2, ship="attention", mlp_chunk=5),
        Case("helix", 2, 4, "llama", tp=2, tied=True, sequence_parallel=True, layers=2, folds=2),
        Case("helix", 4, 12, "llama", tied=True, layers=12, folds=3, ship="qkv"),
    ],
    "replicated": [
        Case("shared middle", 2, 4, "gpt", tied=True, layers=3),
        Case("shared middle", 2, 4, "llama", tp=2, sequence_parallel=True, layers=3),
    ],
    "chimera": [
        Case("chimera", 4, 4, "gpt", tied=True),
        Case("chimera", 4, 8, "llama", late=True),
        Case("chimera", 4, 2, "llama", tied=True),
        Case("chimera", 2, 4, "gpt", tp=2, tied=True, sequence_parallel=True),
        Case("chimera", 2, 4, "llama", tp=2, split=True, recompute=RECOMPUTATIONS[0]),
        Case("chimera", 4, 4, "llama", dropout=0.2, recompute=RECOMPUTATIONS[1]),
    ],
    "hanayo": [
        Case("hanayo", 4, 4, "gpt", v=2, tied=True, layers=8),
        Case("hanayo", 2, 5, "llama", v=4, layers=8, late=True),
        Case("hanayo", 4, 3, "llama", layers=8, recompute=RECOMPUTATIONS[1]),
        Case("hanayo", 2, 4, "gpt", v=2, tp=2, tied=True, sequence_parallel=True),
        Case("hanayo", 2, 4, "llama", v=2, split=True, dropout=0.2),
    ],
    "weipipe": weipipe_cases(),
    "precision": [
        Case(schedule, 2, 4, style, lengths=lengths, folds=folds, dtype=dtype, layers=4)
        for dtype, style in ((torch.float32, "gpt"), (torch.bfloat16, "llama"))
        for schedule, lengths, folds in (
            ("1f1b", (), 0),
            ("zb1p", (), 0),
            ("seq1f1b", (5, 4, 3), 0),
            ("helix", (), 2),
            ("weipipe", (), 0),
        )
    ],
    "dropout": [
        Case(schedule, pp, 4, "llama", v=v, dropout=0.2)
        for pp in (2, 4)
        for schedule, v in (("gpipe", None), ("1f1b", None), ("interleaved-1f1b", 2 if pp == 2 else 1))
    ],
}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[Case, list[dict[str, Any]]]:
    """Results by rank of each case that was chosen. One launch for all: starting ranks costs more than running them."""
    cases = chosen(request, "case", [case for group in GROUPS.values() for case in group])
    by_rank = run_ranks(run_cases, 4, cases, timeout=600.0)
    return {case: [results[index] for results in by_rank] for index, case in enumerate(cases)}


@pytest.mark.parametrize("case", [case for group in GROUPS.values() for case in group], ids=str)
def test_equal_to_one_process(case: Case, results: dict[Case, list[dict[str, Any]]]) -> None:
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
    by_rank = run_ranks(run_cases, 4, cases, timeout=1500.0)
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
    for (result,) in run_ranks(run_csv, 2, str(path), 4):
        assert result["gradient"][0] < GRADIENT_TOLERANCE[torch.float64]
        assert result["loss"] < LOSS_TOLERANCE[torch.float64]


def test_a_failing_op_is_shown_and_ends_every_rank() -> None:
    first, second = run_ranks(fail_in_the_middle, 2, timeout=60.0)
    assert "out of order" in second
    assert "--> " in second and "RUN 1F1" in second and "pipeline rank 1" in second
    assert first != "finished"


def test_stash_is_as_small_as_the_schedule_says() -> None:
    expected = {"1f1b": [4, 3, 2, 1], "gpipe": [6, 6, 6, 6]}
    by_rank = run_ranks(peaks_of_stash, 4, list(expected), 6)
    for schedule, peaks in expected.items():
        assert [results[schedule][0] for results in by_rank] == peaks
        assert not any(sum(results[schedule][1]) for results in by_rank)
