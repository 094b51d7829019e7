"""The cases of test_equality.py in which context-parallel ranks share every chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from helixpipe.planning.memory.recompute import RecomputeOptions
from tests.runtime.case import Case

A2A: dict[str, Any] = {"cp": 2, "cp_comm_type": "a2a"}
P2P: dict[str, Any] = {"cp": 2, "cp_comm_type": "p2p"}


def context(options: Sequence[RecomputeOptions]) -> list[Case]:
    """Both ways to attend, with each kind of schedule and of chunks. options: of recomputation."""
    without, inside = options[0], options[2]
    return [
        Case("none", 1, 2, "llama", **P2P),
        Case("none", 1, 1, "llama", cp=4),  # fewer groups of keys than ranks
        Case("none", 1, 2, "llama", tp=2, sequence_parallel=True, **P2P),
        Case("none", 1, 2, "gpt", tp=2, tied=True, sequence_parallel=True, loss_chunk=5, **A2A),
        Case("1f1b", 2, 3, "gpt", tied=True, **P2P),
        Case("zb1p", 2, 3, "llama", **A2A),
        Case("seq1f1b", 2, 2, "llama", lengths=(4, 8), documents=3, recompute=without, **P2P),
        Case("seq1f1b", 2, 2, "gpt", lengths=(4, 4, 4), documents=10, **P2P),  # the last chunk needs not all before
        Case("seq1f1b", 2, 2, "llama", lengths=(8, 4), dtype=torch.bfloat16, **P2P),
        Case("1f1b", 2, 2, "gpt", dtype=torch.bfloat16, **A2A),
        Case("seq1f1b", 2, 2, "llama", lengths=(6, 4, 2), documents=3, recompute=inside, **A2A),
        Case("seq1f1b-zb", 2, 2, "llama", lengths=(4, 4, 4), mlp_chunk=3, again=True, **P2P),
        Case("sppo", 2, 2, "gpt", tied=True, lengths=(4, 8), offload=5, **P2P),
        Case("helix", 2, 4, "llama", layers=2, folds=2, ship="qkv", recompute=inside, **A2A),
        Case("helix", 2, 4, "gpt", layers=2, folds=2, ship="attention", tied=True, **P2P),
        Case("weipipe", 2, 4, "llama", layers=2, **A2A),
    ]
