"""The cases of test_equality.py whose tokens run in two halves, so that tensor-parallel collectives are hidden."""

from __future__ import annotations

from typing import Any

import torch

from helixpipe.planning.memory.recompute import RecomputeOptions
from schedules.weipipe import WeipipeOptions
from tests.runtime.case import Case

WITHOUT_ATTENTION, FULL = RecomputeOptions("without-attention"), RecomputeOptions("full", recompute_early=False)
SELECTIVE = RecomputeOptions("selective", recompute_modules=("core_attn", "mlp"))
SPLIT: dict[str, Any] = {"tp": 2, "sequence_parallel": True, "halves": True}
WHOLE: dict[str, Any] = {"tp": 2, "halves": True}
SWAPPED: dict[str, Any] = {"cp": 2, "cp_comm_type": "a2a", "halves": True}
CHUNKS = (6, 4, 2)
"""The last has one row a rank with sequence parallelism, which no half has less than."""

HALVES = [
    *(Case("1f1b", 2, 3, style, tied=style == "gpt", **tp) for style in ("gpt", "llama") for tp in (SPLIT, WHOLE)),
    Case("none", 1, 2, "gpt", halves=True),
    # I and W apart
    Case("zb1p", 2, 3, "llama", **SPLIT),
    Case("zb1p", 2, 3, "gpt", tied=True, **WHOLE),
    Case("zbv", 2, 4, "gpt", split=True, **SPLIT),
    # chunks of sequences
    Case("seq1f1b", 2, 3, "llama", lengths=CHUNKS, **SPLIT),
    Case("seq1f1b", 2, 3, "gpt", tied=True, lengths=(5, 4, 3), **WHOLE),
    Case("seq1f1b-zb", 2, 3, "llama", lengths=CHUNKS, recompute=WITHOUT_ATTENTION, **SPLIT),
    Case("sppo", 2, 3, "llama", lengths=CHUNKS, blocks=True, **SPLIT),
    Case("seq1f1b", 2, 2, "llama", lengths=(8, 4), offload=3, **SPLIT),
    # recomputation, cuts inside layers, slices
    *(Case("1f1b", 2, 3, "llama", recompute=options, **SPLIT) for options in (WITHOUT_ATTENTION, FULL, SELECTIVE)),
    *(
        Case("1f1b", 2, 2, style, cut_after=kind, **tp)
        for kind, style, tp in (
            ("norm", "gpt", SPLIT),
            ("qkv", "llama", SPLIT),
            ("attn", "gpt", WHOLE),
            ("proj", "llama", SPLIT),
        )
    ),
    Case("seq1f1b", 2, 3, "llama", lengths=(8, 4), cut_after="qkv", **SPLIT),
    Case("1f1b", 2, 3, "gpt", mlp_chunk=5, loss_chunk=5, **SPLIT),
    Case("zb1p", 2, 3, "llama", mlp_chunk=7, **WHOLE),
    # weights that travel
    Case("helix", 2, 4, "gpt", folds=1, ship="qkv", layers=2, tied=True, **SPLIT),
    Case("wzb1", 2, 4, "llama", layers=4, weipipe=WeipipeOptions(), **SPLIT),
    # documents, windows, context parallelism
    Case("1f1b", 2, 3, "llama", documents=2, **SPLIT),
    Case("1f1b", 2, 3, "mixed", documents=4, **WHOLE),
    Case("1f1b", 2, 3, "mixed", **SPLIT),
    Case("seq1f1b", 2, 3, "mixed", lengths=(6, 6), documents=6, **SPLIT),
    Case("1f1b", 1, 2, "llama", cp=2, cp_comm_type="p2p", **WHOLE),
    Case("1f1b", 1, 2, "llama", cp=2, cp_comm_type="a2a", **SPLIT),
    Case("seq1f1b", 1, 2, "llama", lengths=(8, 4), cp=2, cp_comm_type="p2p", **WHOLE),
    Case("1f1b", 2, 2, "llama", dtype=torch.bfloat16, **SPLIT),
    # rows swapped for heads: by halves, whose rows ranks share; 12 and 8 tokens have halves of as many rows, 4 have not
    Case("1f1b", 2, 3, "gpt", tied=True, **SWAPPED),
    Case("none", 1, 1, "llama", cp=4, cp_comm_type="a2a", halves=True),
    Case("none", 1, 2, "mixed", documents=4, **SWAPPED),
    Case("zb1p", 2, 3, "llama", **SWAPPED),
    Case("1f1b", 2, 2, "llama", documents=2, recompute=WITHOUT_ATTENTION, **SWAPPED),
    *(Case("1f1b", 2, 2, "llama", cut_after=kind, **SWAPPED) for kind in ("qkv", "attn")),
    Case("seq1f1b", 2, 3, "llama", lengths=(6, 4, 2), documents=3, recompute=SELECTIVE, **SWAPPED),
    Case("seq1f1b-zb", 2, 2, "gpt", tied=True, lengths=(8, 4), mlp_chunk=3, **SWAPPED),
    Case("seq1f1b", 1, 2, "llama", lengths=(8, 4), cp=2, cp_comm_type="a2a", **SPLIT),
    Case("helix", 2, 4, "llama", layers=2, folds=2, ship="qkv", **SWAPPED),
    Case("weipipe", 2, 4, "llama", layers=2, **SWAPPED),
    # a ring hides what it sends, and one tensor-parallel rank has nothing to
    Case("1f1b", 2, 2, "llama", cp=2, cp_comm_type="p2p", halves=True),
]
