"""The cases of test_equality.py with layers that are unlike: some attend to a window, some have no RoPE."""

from __future__ import annotations

import torch

from helixpipe.planning.memory.recompute import RecomputeOptions
from tests.runtime.case import RAGGED, Case

WITHOUT_ATTENTION = RecomputeOptions("without-attention", recompute_early=False)
SELECTIVE = RecomputeOptions("selective", recompute_modules=("core_attn", "mlp"))
CHUNKS = (5, 4, 3)

MIXED = [
    # every schedule
    Case("none", 1, 2, "mixed", layers=3),
    *(Case(name, 2, 3, "mixed") for name in ("gpipe", "1f1b", "zb1p", "zb2p")),
    Case("adapipe", 2, 3, "mixed", layers=5),
    *(Case(name, 2, 4, "mixed", v=2) for name in ("interleaved-1f1b", "hanayo", "zb-interleaved")),
    *(Case(name, 2, 4, "mixed", layers=4) for name in ("zbv", "chimera")),
    *(
        Case(name, 2, 2, "mixed", lengths=CHUNKS)
        for name in ("terapipe", "seq1f1b", "seq1f1b-zb", "infinipipe", "sppo")
    ),
    Case("seq1f1b-interleaved", 2, 2, "mixed", v=2, lengths=CHUNKS),
    *(Case("helix", 2, 4, "mixed", folds=2, ship=ship, split=ship == "qkv") for ship in ("none", "qkv", "attention")),
    *(Case(name, 2, 4, "mixed", layers=3) for name in ("weipipe-naive", "weipipe", "wzb1", "wzb2")),
    # cuts inside layers, recomputation, offloading, tensor parallelism, dropout
    Case("1f1b", 2, 3, "mixed", cut_after="qkv", recompute=SELECTIVE),
    Case("1f1b", 2, 3, "mixed", tp=2, tied=True, sequence_parallel=True, recompute=WITHOUT_ATTENTION),
    Case("seq1f1b", 2, 2, "mixed", lengths=CHUNKS, recompute=WITHOUT_ATTENTION, offload=3),
    Case("seq1f1b", 2, 2, "mixed", lengths=CHUNKS, dropout=0.2),
    Case("1f1b", 2, 2, "mixed", dtype=torch.bfloat16),
    # documents
    Case("1f1b", 2, 3, "mixed", documents=2),
    Case("seq1f1b", 2, 3, "mixed", lengths=(1, 10, 1), documents=6),
    Case("seq1f1b", 2, 2, "mixed", lengths=CHUNKS, documents=4, dropout=0.2),
    Case(RAGGED, 2, 5, "mixed"),
    # keys and values in blocks
    Case("seq1f1b", 2, 2, "mixed", lengths=CHUNKS, blocks=True),
    Case("sppo", 2, 2, "mixed", lengths=(3, 2, 4, 3), documents=5, blocks=True),
    Case("sppo", 2, 1, "mixed", lengths=(4, 4, 4), multiplex="both"),
    # context-parallel ranks
    *(
        Case("seq1f1b", 2, 2, "mixed", lengths=(4, 8), documents=documents, cp=2, cp_comm_type=way)
        for way in ("a2a", "p2p")
        for documents in (None, 3)
    ),
    Case("none", 1, 2, "mixed", cp=4, cp_comm_type="a2a"),
    Case("1f1b", 2, 2, "mixed", cp=2, cp_comm_type="p2p"),
]
