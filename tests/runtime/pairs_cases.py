"""The cases of test_equality.py in which forwards run beside backwards of other units."""

from __future__ import annotations

from typing import Any

import torch

from helixpipe.planning.memory.recompute import RecomputeOptions
from tests.runtime.case import Case

WITHOUT_ATTENTION, FULL = RecomputeOptions("without-attention"), RecomputeOptions("full", recompute_early=False)
SPLIT: dict[str, Any] = {"tp": 2, "sequence_parallel": True, "pairs": True}
WHOLE: dict[str, Any] = {"tp": 2, "pairs": True}
SWAPPED: dict[str, Any] = {"cp": 2, "cp_comm_type": "a2a", "pairs": True}
RING: dict[str, Any] = {"cp": 2, "cp_comm_type": "p2p", "pairs": True}

PAIRS = [
    *(Case("1f1b", 2, 4, style, tied=style == "gpt", **tp) for style in ("gpt", "llama") for tp in (SPLIT, WHOLE)),
    Case("interleaved-1f1b", 2, 4, "gpt", v=2, tied=True, **SPLIT),
    Case("1f1b", 2, 3, "gpt", pairs=True),
    # I and W apart
    Case("zb1p", 2, 4, "llama", **SPLIT),
    Case("zbv", 2, 4, "gpt", tied=True, **WHOLE),
    Case("1f1b", 2, 3, "llama", split=True, **SPLIT),
    # chunks of sequences
    Case("seq1f1b", 2, 3, "llama", lengths=(6, 4, 2), **SPLIT),
    Case("seq1f1b", 2, 3, "gpt", tied=True, lengths=(5, 4, 3), **WHOLE),
    Case("seq1f1b-zb", 2, 3, "llama", lengths=(6, 4, 2), recompute=WITHOUT_ATTENTION, **SPLIT),
    Case("sppo", 2, 3, "llama", lengths=(6, 4, 2), blocks=True, **SPLIT),
    # recomputation, offloading, cuts inside layers, slices, a step that opens twice
    *(Case("1f1b", 2, 4, "llama", recompute=options, **SPLIT) for options in (WITHOUT_ATTENTION, FULL)),
    Case("1f1b", 2, 4, "llama", offload=3, **SPLIT),
    Case("1f1b", 2, 4, "llama", cut_after="qkv", **SPLIT),
    Case("1f1b", 2, 4, "gpt", cut_after="proj", **WHOLE),
    Case("1f1b", 2, 4, "gpt", mlp_chunk=5, loss_chunk=5, **SPLIT),
    Case("1f1b", 2, 4, "gpt", again=True, late=True, **SPLIT),
    # other places of the head, documents, windows, context parallelism
    Case("1f1b", 2, 4, "llama", vocabulary="spread", **SPLIT),
    Case("1f1b", 2, 4, "gpt", tied=True, vocabulary="split", **SPLIT),
    Case("1f1b", 2, 4, "mixed", documents=4, **WHOLE),
    Case("seq1f1b", 2, 3, "mixed", lengths=(6, 6), documents=6, **SPLIT),
    Case("1f1b", 1, 3, "llama", cp=2, cp_comm_type="a2a", **SPLIT),
    Case("1f1b", 1, 3, "llama", cp=2, cp_comm_type="p2p", **WHOLE),
    Case("1f1b", 2, 4, "llama", dtype=torch.bfloat16, **SPLIT),
    # context parallelism alone: rows swapped for heads, and rings
    *(Case("1f1b", 2, 4, "gpt", tied=True, **way) for way in (SWAPPED, RING)),
    Case("1f1b", 1, 3, "llama", cp=4, cp_comm_type="a2a", pairs=True),
    *(Case("zb1p", 2, 4, "llama", **way) for way in (SWAPPED, RING)),
    Case("seq1f1b", 2, 3, "llama", lengths=(4, 8), documents=3, recompute=WITHOUT_ATTENTION, **RING),
    Case("seq1f1b", 2, 3, "llama", lengths=(6, 4, 2), documents=3, recompute=FULL, **SWAPPED),
    Case("seq1f1b-zb", 2, 2, "gpt", lengths=(4, 4, 4), mlp_chunk=3, again=True, **RING),
    Case("interleaved-1f1b", 2, 4, "llama", v=2, offload=3, **SWAPPED),
    Case("1f1b", 2, 4, "mixed", documents=4, cut_after="qkv", **RING),
    Case("seq1f1b", 1, 3, "llama", lengths=(8, 4), cp=2, cp_comm_type="p2p", **SPLIT),
]
