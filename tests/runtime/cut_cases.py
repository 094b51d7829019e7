"""Cases of test_equality.py under schedules that are not made for chunks, each with two and with three uneven ones."""

from __future__ import annotations

from tests.runtime.case import Case
from tests.runtime.cases import RECOMPUTATIONS

CUT = [
    *(
        case
        for pp, m, schedules in (
            (1, 2, ("none",)),
            (2, 4, ("gpipe", "interleaved-1f1b", "chimera", "hanayo", "helix", "weipipe-naive", "weipipe")),
            (2, 3, ("1f1b", "zb1p", "zbv", "v-half", "wzb1")),
            (4, 5, ("zb2p", "v-min", "zb-interleaved", "wzb2")),
        )
        for schedule in schedules
        for v in (2 if "interleaved" in schedule else None,)
        for folds in (2 if schedule == "helix" else 0,)
        for style, lengths in (("gpt", (7, 5)), ("llama", (5, 4, 3)))
        for case in (
            Case(schedule, pp, m, style, v=v, tied=style == "gpt", layers=2 * pp, lengths=lengths, folds=folds),
        )
    ),
    Case("adapipe", 2, 4, "llama", layers=5, lengths=(5, 4, 3), memory_limit=1.8),
    Case("helix", 2, 4, "llama", lengths=(5, 7), folds=1, ship="attention", recompute=RECOMPUTATIONS[0]),
    Case("helix", 2, 2, "llama", tp=2, sequence_parallel=True, layers=2, lengths=(8, 4), folds=1, ship="qkv"),
    Case("weipipe", 2, 3, "llama", lengths=(5, 4, 3), blocks=True, recompute=RECOMPUTATIONS[1]),
    Case("zbv", 2, 4, "llama", tp=2, sequence_parallel=True, lengths=(6, 4, 2), recompute=RECOMPUTATIONS[1]),
    Case("v-half", 4, 6, "llama", layers=8, lengths=(2, 4, 4, 2)),
    Case("hanayo", 2, 3, "llama", v=4, layers=8, lengths=(5, 4, 3), recompute=RECOMPUTATIONS[0]),
    Case("chimera", 4, 4, "llama", lengths=(5, 4, 3), documents=3),
    Case("1f1b", 2, 3, "gpt", lengths=(5, 4, 3), loss_chunk=4, mlp_chunk=3),
    Case("interleaved-1f1b", 4, 3, "llama", v=2, layers=8, lengths=(3, 5, 4)),
]
