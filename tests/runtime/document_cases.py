"""Cases of test_equality.py with documents that do not see each other, and with microbatches that are not alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from helixpipe.planning.memory.recompute import RecomputeOptions
from tests.runtime.case import RAGGED, Case


def documents(recomputations: Sequence[RecomputeOptions]) -> list[Case]:
    """Chunks that begin and end anywhere in documents, under each schedule that takes chunks and some that do not; rows
    of several lengths and numbers of chunks."""
    return [
        *(Case("none", 1, 2, style, documents=1) for style in ("gpt", "llama")),
        Case("1f1b", 4, 3, "llama", documents=2),
        Case("zb1p", 2, 3, "gpt", tp=2, tied=True, sequence_parallel=True, documents=3, loss_chunk=5),
        Case("seq1f1b", 2, 3, "llama", lengths=(5, 4, 3), documents=4, recompute=recomputations[0]),
        Case("seq1f1b", 2, 3, "gpt", tp=2, tied=True, sequence_parallel=True, lengths=(6, 4, 2), documents=5),
        Case("seq1f1b-zb", 2, 3, "llama", lengths=(1, 10, 1), documents=6, mlp_chunk=3, again=True),
        Case("terapipe", 2, 2, "gpt", lengths=(2, 2, 2, 2, 2, 2), documents=7, offload=7),
        Case("helix", 2, 4, "llama", layers=2, folds=2, ship="qkv", documents=8, recompute=recomputations[2]),
        Case("weipipe", 2, 4, "llama", layers=3, documents=9, dtype=torch.float32),
        Case("sppo", 2, 2, "llama", lengths=(4, 4, 4), documents=10),
        *(Case(RAGGED, pp, 5, style, tied=style == "gpt") for pp in (1, 2, 4) for style in ("gpt", "llama")),
        Case(RAGGED, 2, 5, "llama", tp=2, sequence_parallel=False, split=True),
        Case(RAGGED, 2, 5, "gpt", recompute=recomputations[1], loss_chunk=3, mlp_chunk=2),
        Case(RAGGED, 2, 5, "llama", recompute=recomputations[3], again=True),
        Case(RAGGED, 2, 5, "llama", offload=3, late=True),
    ]
