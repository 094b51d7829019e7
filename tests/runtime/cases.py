"""The cases of test_equality.py, by group."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from helixpipe.planning.memory.recompute import RecomputeOptions
from schedules.weipipe import WeipipeOptions
from tests.runtime.case import Case
from tests.runtime.context_cases import context
from tests.runtime.document_cases import documents
from tests.runtime.offload_cases import offloading

STYLES = ("gpt", "llama")
ZERO_BUBBLE = ("zb1p", "zb2p", "zbv", "v-half", "v-min", "zb-interleaved")


def pipelines(pp: int) -> list[Case]:
    """Every schedule with m below p, equal to p, and not a multiple of p where that is allowed; tied for GPT style."""
    cases = []
    for style, (schedule, v) in product(STYLES, (("gpipe", None), ("1f1b", None), ("interleaved-1f1b", 2))):
        counts = (1, pp + 1, 2 * pp) if v is None else (pp, 2 * pp)
        for m in counts:
            cases.append(Case(schedule, pp, m, style, v=v, tied=style == "gpt", layers=pp * (v or 1)))
    return cases


L18 = """
    11111111 11222222 11333333 12112233 12223311 12331122 13121323 13232131 13313212
    21133221 21211332 21322113 22123132 22231213 22312321 23132312 23213123 23321231
"""
"""Taguchi's orthogonal array: a column of two levels and seven of three; in whatever two columns, all combinations of
levels, equally often."""


def helix_cases() -> list[Case]:
    """The order, the cuts, recomputation and parallel sizes by `L18`."""
    cases = []
    for row in L18.split():
        loops, a, b, c, d, e, f, g = (int(level) for level in row)
        ship = ("none", "qkv", "attention")[a - 1]
        pp, tp = ((2, 2), (4, 1), (2, 1))[c - 1]
        style = ("gpt", "llama", "llama")[d - 1]
        recompute = (RecomputeOptions(), RECOMPUTATIONS[0], RECOMPUTATIONS[2])[e - 1]
        size: dict[str, Any] = {"tp": tp, "sequence_parallel": tp > 1, "layers": pp * f, "folds": b}
        size |= {"ship": ship, "spread": g > 1, "recompute": recompute, "tied": style == "gpt"}
        cases.append(Case("helix", pp, pp * b * loops, style, **size))
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
    six_in_turn = WeipipeOptions(weipipe_eager=False, weipipe_slots=6)
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
        Case("wzb1", 4, 8, "llama", layers=5, weipipe=one_in_turn),
        Case("wzb2", 2, 6, "llama", layers=3, weipipe=six_in_turn),
        Case("weipipe-naive", 4, 7, "gpt", layers=4, weipipe=six_in_turn),
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


KEEPING = {
    "p4": pipelines(4),
    "p2-dp2": pipelines(2)[::2],
    "p2-tp2": [
        Case("gpipe", 2, 3, "gpt", tp=2, tied=True),
        Case("1f1b", 2, 4, "llama", tp=2),
        Case("interleaved-1f1b", 2, 4, "gpt", tp=2, v=2, tied=True, layers=4),
        Case("gpipe", 2, 4, "llama", tp=2, sequence_parallel=True),
        Case("1f1b", 2, 3, "gpt", tp=2, tied=True, sequence_parallel=True),
        Case("interleaved-1f1b", 2, 2, "llama", tp=2, v=2, sequence_parallel=True, layers=4),
    ],
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
        for i, (pp, tp, sp) in enumerate(((4, 1, False), (2, 2, False), (2, 2, True)))
        for schedule, v, style, recompute in (
            ("1f1b", None, STYLES[i % 2], RecomputeOptions()),
            ("interleaved-1f1b", 1, STYLES[(i + 1) % 2], RecomputeOptions("without-attention")),
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
    + [Case("gpipe", 2, 4, "gpt", tied=True, recompute=RECOMPUTATIONS[2])]
    + [
        Case("1f1b", 2, 3, STYLES[j], recompute=RECOMPUTATIONS[i % 2], cut_after=kind, tied=j == 0)
        for i, (j, kind) in enumerate(((0, "norm"), (0, "qkv"), (1, "attn"), (1, "proj")))
    ],
    "chunks": [
        # each schedule in both styles, and each way to cut the sequence under two schedules
        Case("seq1f1b", 4, 1, "gpt", tied=True, lengths=(7, 5)),
        Case("seq1f1b", 4, 2, "llama", lengths=(2, 2, 2, 2, 1, 1, 1, 1)),
        Case("seq1f1b-zb", 4, 3, "llama", lengths=(5, 4, 3)),
        Case("seq1f1b-zb", 4, 5, "gpt", tied=True, lengths=(3, 3, 3, 3)),
        Case("seq1f1b-interleaved", 2, 1, "gpt", v=2, tied=True, lengths=(7, 5)),
        Case("seq1f1b-interleaved", 2, 3, "llama", v=2, lengths=(5, 4, 3)),
        Case("terapipe", 2, 5, "gpt", tied=True, lengths=(3, 3, 3, 3)),
        Case("terapipe", 2, 2, "llama", lengths=(2, 2, 2, 2, 1, 1, 1, 1)),
        Case("infinipipe", 2, 3, "gpt", tied=True, lengths=(5, 4, 3)),
        Case("infinipipe", 4, 2, "llama", lengths=(7, 5)),
        Case("infinipipe", 2, 3, "llama", lengths=(5, 4, 3), layers=4, memory_limit=3.0),  # some backwards are split
        Case("sppo", 4, 1, "llama", lengths=(5, 4, 3)),
        Case("sppo", 4, 3, "gpt", tied=True, lengths=(2, 2, 2, 2, 1, 1, 1, 1)),
        # tensor parallelism
        Case("sppo", 2, 3, "llama", tp=2, sequence_parallel=True, lengths=(6, 4, 2)),
        Case("sppo", 2, 2, "gpt", tp=2, tied=True, lengths=(8, 4), recompute=RECOMPUTATIONS[0]),
        Case("seq1f1b", 2, 3, "llama", tp=2, lengths=(6, 4, 2)),
        Case("seq1f1b-zb", 2, 3, "gpt", tp=2, tied=True, sequence_parallel=True, lengths=(6, 4, 2)),
        Case("seq1f1b-interleaved", 2, 3, "llama", tp=2, v=2, sequence_parallel=True, lengths=(6, 4, 2)),
        # recomputation
        *(
            Case(schedule, 2, 3, style, v=v, tied=style == "gpt", lengths=(6, 2, 4), recompute=options)
            for i, (schedule, v, style) in enumerate(
                (("seq1f1b", None, "llama"), ("seq1f1b-interleaved", 2, "gpt"), ("seq1f1b-zb", None, "llama"))
            )
            for options in RECOMPUTATIONS[i::3]
        ),
        *(
            Case("seq1f1b", 2, 2, style, tp=2, sequence_parallel=True, lengths=(8, 4), recompute=options)
            for style, options in zip(STYLES, (RECOMPUTATIONS[0], RECOMPUTATIONS[3]), strict=True)
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
            if i != j
            for style, tp in ((("gpt", 2), ("llama", 1))[(i + 2 * j) % 3 % 2],)
        ),
        Case("1f1b", 4, 5, "gpt", mlp_chunk=6),
        Case("zb1p", 4, 5, "llama", mlp_chunk=6),
        Case("1f1b", 2, 3, "llama", tp=2, split=True, mlp_chunk=7),
        Case("1f1b", 2, 3, "gpt", dropout=0.2, mlp_chunk=5),
        Case("seq1f1b", 2, 3, "llama", lengths=(5, 4, 3), dropout=0.2, mlp_chunk=2),
        Case("1f1b", 2, 3, "gpt", cut_after="proj", mlp_chunk=5),
        Case("wzb1", 2, 4, "gpt", tied=True, mlp_chunk=5),
    ],
    "loss-slices": [
        *(Case("none", 1, 2, style, tied=tied, loss_chunk=5) for style, tied in (("gpt", True), ("llama", False))),
        Case("none", 1, 2, "llama", tp=2, tied=True, sequence_parallel=True, loss_chunk=5),
        Case("1f1b", 4, 5, "llama", tied=True, loss_chunk=6),
        Case("1f1b", 2, 3, "gpt", tp=2, tied=True, sequence_parallel=True, loss_chunk=5),
        Case("1f1b", 2, 3, "llama", tp=2, split=True, loss_chunk=7),
        Case("1f1b", 2, 3, "gpt", dropout=0.2, recompute=RECOMPUTATIONS[0], loss_chunk=5),
        Case("1f1b", 2, 3, "llama", dtype=torch.float32, loss_chunk=5),
        Case("1f1b", 2, 3, "gpt", dtype=torch.bfloat16, loss_chunk=5),
        Case("gpipe", 2, 3, "gpt", tied=True, loss_chunk=5, again=True),
        Case("interleaved-1f1b", 2, 4, "llama", v=2, recompute=RECOMPUTATIONS[3], loss_chunk=1),
        Case("seq1f1b", 2, 3, "gpt", tp=2, tied=True, sequence_parallel=True, lengths=(6, 4, 2), loss_chunk=3),
        Case("seq1f1b-zb", 2, 3, "llama", lengths=(6, 2, 4), mlp_chunk=3, loss_chunk=4, again=True),
        Case("terapipe", 2, 3, "llama", lengths=(6, 2, 4), tied=True, loss_chunk=4),
        Case("zb1p", 4, 5, "llama", loss_chunk=50),
        Case("zb1p", 2, 3, "gpt", tp=2, sequence_parallel=True, loss_chunk=5, again=True),
        Case("zbv", 2, 4, "gpt", tied=True, loss_chunk=5),
        Case("helix", 2, 4, "gpt", tp=2, tied=True, sequence_parallel=True, layers=2, folds=2, loss_chunk=5),
        Case("helix", 4, 8, "llama", folds=2, ship="qkv", split=True, loss_chunk=7, again=True),
        Case("chimera", 2, 4, "llama", tied=True, loss_chunk=5),
        Case("wzb1", 2, 4, "gpt", tied=True, mlp_chunk=5, loss_chunk=5),
        Case("gpipe", 2, 3, "llama", tp=2, sequence_parallel=True, loss_chunk=5, offload=3),
        Case("seq1f1b-zb", 2, 3, "gpt", tied=True, lengths=(6, 2, 4), loss_chunk=4, offload=5),
    ],
    "inner-cuts": [
        Case(
            "1f1b", 2, 3, STYLES[(i + tp) % 2], tp=tp, tied=(i + tp) % 2 == 0, sequence_parallel=tp > 1, cut_after=kind
        )
        for (i, kind), tp in product(enumerate(("norm", "qkv", "attn", "proj")), (1, 2))
    ]
    # several tensors a message, and messages that overtake each other
    + [Case("gpipe", 2, 6, "llama", cut_after="qkv", late=True)],
    "zero-bubble": [
        *(
            Case(schedule, 4, m, style, tied=style == "gpt", layers=8)
            for schedule, (style, m) in product(ZERO_BUBBLE, (("gpt", 1), ("llama", 5)))
        ),
        *(
            Case(schedule, 2, m, style, tp=2, tied=style == "gpt", sequence_parallel=True, layers=4)
            for schedule, (style, m) in zip(ZERO_BUBBLE, (("gpt", 6), ("llama", 5)) * 3, strict=True)
        ),
    ],
    "adapipe": [
        Case("adapipe", pp, m, style, tp=tp, tied=style == "gpt", layers=layers, memory_limit=limit)
        for i, (pp, tp, m, layers, limit) in enumerate(
            ((4, 1, 6, 7, 2.0), (4, 1, 6, 5, 1.5), (4, 1, 2, 7, 1.5), (2, 1, 6, 5, 1.5), (2, 1, 2, 7, 2.5))
        )
        for style in (STYLES[i % 2],)
    ]
    + [
        Case("adapipe", 2, 6, "llama", tp=2, sequence_parallel=True, layers=5, memory_limit=1.5),
        Case("adapipe", 4, 6, "llama", layers=7, memory_limit=1.5, dropout=0.2),
    ],
    "helix": [
        *helix_cases(),
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
        Case("shared middle", 2, 4, "llama", layers=3, split=True),
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
        for dtype, style, chosen in (
            (torch.float32, "gpt", ("1f1b", "weipipe")),
            (torch.bfloat16, "llama", ("1f1b", "zb1p", "seq1f1b", "helix", "weipipe")),
        )
        for schedule in chosen
        for lengths, folds in (((5, 4, 3) if schedule == "seq1f1b" else (), 2 if schedule == "helix" else 0),)
    ],
    "dropout": [
        Case(schedule, pp, 4, "llama", v=v, dropout=0.2)
        for pp in (2, 4)
        for schedule, v in (("gpipe", None), ("1f1b", None), ("interleaved-1f1b", 2 if pp == 2 else 1))
    ],
}

GROUPS = KEEPING | {
    "documents": documents(RECOMPUTATIONS),
    "context": context(RECOMPUTATIONS),
    "offload": offloading(KEEPING),
}
