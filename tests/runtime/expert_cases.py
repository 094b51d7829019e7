"""The cases of test_equality.py with experts, and all auxiliary losses, in every second layer."""

from __future__ import annotations

import torch

from helixpipe.planning.memory.recompute import RecomputeOptions
from tests.runtime.case import RAGGED, Case

WITHOUT_ATTENTION = RecomputeOptions("without-attention", recompute_early=False)
FULL = RecomputeOptions("full", recompute_early=False)
SELECTIVE = RecomputeOptions("selective", recompute_modules=("core_attn", "mlp"))
CHUNKS = (5, 4, 3)

BALANCED_OVER_THE_STEP = [
    Case("seq1f1b", 2, 3, "balanced", lengths=CHUNKS),
    *(Case(name, 2, 3, "balanced") for name in ("1f1b", "gpipe", "zb1p")),
    Case("interleaved-1f1b", 2, 4, "balanced", v=2),
    Case("zbv", 2, 4, "balanced", layers=4),
    Case("seq1f1b-interleaved", 2, 4, "balanced", v=2, lengths=CHUNKS),
    Case("helix", 2, 4, "balanced", folds=2, ship="qkv"),
    Case("sppo", 2, 3, "balanced", lengths=CHUNKS, offload=3),
    Case("infinipipe", 2, 3, "balanced", lengths=CHUNKS),
    Case("1f1b", 2, 3, "balanced", tp=2, sequence_parallel=True, recompute=FULL),
    Case("seq1f1b", 2, 3, "balanced", padded=1, lengths=CHUNKS),
    Case("seq1f1b", 2, 2, "balanced", padded=1, lengths=(4, 8), cp=2, cp_comm_type="a2a"),
]
EXPERT_PARALLEL = [
    *(Case(name, 2, 2, "experts", ep=2) for name in ("1f1b", "zb1p")),
    Case("interleaved-1f1b", 2, 2, "experts", v=2, ep=2),
    Case("zbv", 2, 2, "experts", layers=4, ep=2),
    Case("seq1f1b", 2, 2, "experts", lengths=CHUNKS, ep=2),
    Case("seq1f1b-interleaved", 2, 2, "experts", v=2, lengths=CHUNKS, ep=2),
    Case("sppo", 2, 2, "experts", lengths=CHUNKS, offload=3, ep=2),
    Case("infinipipe", 2, 2, "experts", lengths=CHUNKS, ep=2),
    Case("helix", 2, 4, "experts", folds=2, ship="qkv", ep=2),
    Case("weipipe", 2, 4, "experts", layers=4, ep=2),
    Case("none", 1, 2, "experts", ep=4),
    Case("seq1f1b", 1, 2, "experts", lengths=(4, 8), ep=4),
    Case("none", 1, 2, "experts", tp=2, sequence_parallel=True, ep=2),
    # exchanges beside other work
    *(Case(name, 2, 3, "experts", ep=2, pairs=True) for name in ("1f1b", "zb1p")),
    Case("interleaved-1f1b", 2, 4, "experts", v=2, ep=2, pairs=True),
    Case("seq1f1b", 2, 2, "experts", lengths=CHUNKS, ep=2, pairs=True),
    Case("seq1f1b", 2, 2, "experts", lengths=CHUNKS, ep=2, pairs=True, recompute=SELECTIVE),
    Case("1f1b", 2, 2, "experts", tp=2, sequence_parallel=True, pairs=True),
    Case("1f1b", 2, 2, "experts", ep=2, halves=True),
    Case("seq1f1b", 2, 2, "experts", lengths=CHUNKS, ep=2, halves=True),
    Case("zbv", 2, 2, "experts", layers=4, tp=2, sequence_parallel=True, halves=True),
]
"""Over several pipelines, each with some of every layer's experts."""

GRID = [
    case
    for ep in (1, 2, 4)
    for case in (
        Case("1f1b", 2, 2, "experts", ep=ep),
        Case("interleaved-1f1b", 2, 2, "experts", v=2, ep=ep),
        Case("zbv", 2, 2, "experts", layers=4, ep=ep),
        Case("seq1f1b", 2, 2, "experts", lengths=(4, 8), ep=ep),
        Case("seq1f1b-interleaved", 2, 2, "experts", v=2, lengths=(4, 8), ep=ep),
        Case("helix", 2, 4, "experts", folds=2, ship="qkv", ep=ep),
        Case("weipipe", 2, 4, "experts", layers=4, ep=ep),
        Case("sppo", 2, 2, "experts", lengths=(4, 8), offload=3, ep=ep),
        Case("infinipipe", 2, 2, "experts", lengths=(4, 8), documents=4, ep=ep),
    )
]
"""Schedules times expert-parallel sizes, on two pipeline ranks: those of size 4 need eight ranks. Chunks have as many
tokens as vector instructions take, so that all routers round alike."""

EXPERTS = [
    # every schedule
    Case("none", 1, 2, "experts", layers=3),
    *(Case(name, 2, 3, "experts") for name in ("gpipe", "1f1b", "zb1p", "zb2p")),
    *(Case(name, 2, 4, "experts", v=2) for name in ("interleaved-1f1b", "hanayo", "zb-interleaved")),
    *(Case(name, 2, 4, "experts", layers=4) for name in ("zbv", "chimera")),
    *(Case(name, 2, 2, "experts", lengths=CHUNKS) for name in ("terapipe", "seq1f1b", "seq1f1b-zb", "infinipipe")),
    Case("sppo", 2, 2, "experts", lengths=CHUNKS, offload=3),
    Case("seq1f1b-interleaved", 2, 2, "experts", v=2, lengths=CHUNKS),
    *(Case("helix", 2, 4, "experts", folds=2, ship=ship, split=ship == "qkv") for ship in ("none", "qkv", "attention")),
    *(Case(name, 2, 4, "experts", layers=3) for name in ("weipipe-naive", "weipipe", "wzb1", "wzb2")),
    # cuts inside layers, recomputation, tensor parallelism
    Case("1f1b", 2, 3, "experts", cut_after="proj", recompute=SELECTIVE),
    Case("1f1b", 2, 3, "experts", tp=2, tied=True, sequence_parallel=True, recompute=WITHOUT_ATTENTION),
    Case("seq1f1b", 2, 2, "experts", lengths=CHUNKS, recompute=FULL, offload=3, again=True),
    Case("seq1f1b", 2, 2, "experts", tp=2, sequence_parallel=True, lengths=(6, 4, 2)),
    Case("1f1b", 2, 2, "experts", dtype=torch.bfloat16),
    # chunks under schedules whose microbatches were whole, keys and values in blocks
    *(Case(name, 2, 2, "experts", layers=4, lengths=CHUNKS) for name in ("zbv", "weipipe")),
    Case("helix", 2, 4, "experts", folds=2, ship="qkv", lengths=CHUNKS),
    Case("sppo", 2, 2, "experts", lengths=CHUNKS, blocks=True),
    # documents, whose auxiliary losses are those of their microbatch
    Case("1f1b", 2, 3, "experts", documents=2),
    Case("seq1f1b", 2, 3, "experts", lengths=(1, 10, 1), documents=6),
    Case(RAGGED, 2, 5, "experts"),
    # padding, which no loss and no load counts
    Case("1f1b", 2, 3, "experts", padded=1),
    Case("seq1f1b", 2, 3, "experts", padded=1, lengths=CHUNKS),
    Case("helix", 2, 4, "experts", padded=1, folds=2, ship="qkv"),
    Case("zbv", 2, 4, "experts", padded=1, layers=4),
    Case("weipipe", 2, 4, "experts", padded=1, layers=3),
    Case("seq1f1b", 2, 2, "experts", padded=1, lengths=CHUNKS, ep=2, pairs=True),
    Case("1f1b", 2, 2, "experts", padded=1, ep=2, halves=True),
    Case("1f1b", 2, 2, "experts", padded=1, tp=2, sequence_parallel=True, pairs=True),
    Case("1f1b", 2, 2, "experts", padded=1, tp=2, sequence_parallel=True, recompute=FULL),
    Case("seq1f1b", 2, 2, "experts", padded=1, tp=2, sequence_parallel=True, lengths=(6, 4, 2), halves=True),
    *(
        Case("seq1f1b", 2, 2, "experts", padded=1, lengths=(4, 8), cp=2, cp_comm_type=way, halves=halves)
        for way, halves in (("a2a", False), ("p2p", False), ("a2a", True))
    ),
    *(Case("infinipipe", 2, 2, "experts", padded=1, lengths=(4, 8), documents=documents) for documents in (None, 4)),
    Case("1f1b", 2, 3, "deepseek", padded=1),
    Case("sppo", 2, 3, "experts", padded=1, lengths=CHUNKS, offload=3),
    # context-parallel ranks
    *EXPERT_PARALLEL,
    *(
        Case("seq1f1b", 2, 2, "experts", lengths=(4, 8), documents=documents, cp=2, cp_comm_type=way)
        for way in ("a2a", "p2p")
        for documents in (None, 3)
    ),
]
