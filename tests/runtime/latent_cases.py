"""The cases of test_equality.py with multi-latent attention, alone and with experts and a further token."""

from __future__ import annotations

import torch

from helixpipe.planning.memory.recompute import RecomputeOptions
from tests.runtime.case import RAGGED, Case

WITHOUT_ATTENTION = RecomputeOptions("without-attention", recompute_early=False)
FULL = RecomputeOptions("full", recompute_early=False)
SELECTIVE = RecomputeOptions("selective", recompute_modules=("core_attn", "mlp"))
CHUNKS = (5, 4, 3)

LATENT = [
    # of these `make test` runs the first: weights of attention that are shipped; chunks that keep latents; all of
    # DeepSeek-V3's layers, with a split backward
    Case("helix", 2, 4, "latent", folds=2, ship="none"),
    Case("seq1f1b", 2, 2, "latent", lengths=CHUNKS, documents=4),
    Case("zbv", 2, 2, "deepseek", layers=4, ep=2),
    # every schedule
    Case("none", 1, 2, "latent", layers=3),
    *(Case(name, 2, 3, "latent") for name in ("gpipe", "1f1b", "zb1p", "zb2p")),
    Case("adapipe", 2, 3, "latent", layers=5),
    *(Case(name, 2, 4, "latent", v=2) for name in ("interleaved-1f1b", "hanayo", "zb-interleaved")),
    *(Case(name, 2, 4, "latent", layers=4) for name in ("zbv", "chimera")),
    *(Case(name, 2, 2, "latent", lengths=CHUNKS) for name in ("terapipe", "seq1f1b", "seq1f1b-zb", "infinipipe")),
    Case("infinipipe", 2, 2, "latent", lengths=CHUNKS, documents=4),
    Case("sppo", 2, 2, "latent", lengths=CHUNKS, offload=3),
    Case("seq1f1b-interleaved", 2, 2, "latent", v=2, lengths=CHUNKS),
    *(Case("helix", 2, 4, "latent", folds=2, ship=ship, split=ship == "qkv") for ship in ("qkv", "attention")),
    Case("helix", 2, 4, "latent", folds=1, lengths=CHUNKS),
    *(Case(name, 2, 4, "latent", layers=3) for name in ("weipipe-naive", "weipipe", "wzb1", "wzb2")),
    Case("weipipe", 2, 2, "latent", lengths=CHUNKS),
    # cuts inside layers, recomputation, offloading, tensor parallelism
    *(Case("1f1b", 2, 3, "latent", cut_after=role, recompute=SELECTIVE) for role in ("qkv", "attn")),
    Case("1f1b", 2, 3, "latent", tp=2),
    Case("1f1b", 2, 3, "latent", tp=2, tied=True, sequence_parallel=True, recompute=WITHOUT_ATTENTION),
    Case("zb1p", 2, 3, "latent", tp=2, sequence_parallel=True),
    Case("seq1f1b", 2, 2, "latent", tp=2, sequence_parallel=True, lengths=(6, 4, 2)),
    Case("1f1b", 2, 3, "latent", tp=2, sequence_parallel=True, pairs=True),
    Case("seq1f1b", 2, 2, "latent", lengths=CHUNKS, recompute=FULL, offload=3, again=True),
    Case("seq1f1b", 2, 2, "latent", lengths=CHUNKS, recompute=WITHOUT_ATTENTION, offload=5),
    Case("1f1b", 2, 2, "latent", dtype=torch.bfloat16),
    *(Case("seq1f1b", 2, 2, "latent", lengths=CHUNKS, documents=documents, dropout=0.2) for documents in (None, 4)),
    # documents, blocks
    Case("1f1b", 2, 3, "latent", documents=2),
    Case("seq1f1b", 2, 3, "latent", lengths=(1, 10, 1), documents=6),
    Case(RAGGED, 2, 5, "latent"),
    Case("seq1f1b", 2, 2, "latent", lengths=CHUNKS, blocks=True),
    Case("seq1f1b", 2, 3, "latent", lengths=(5, 7), cut_after="qkv", blocks=True, again=True),
    Case("sppo", 2, 2, "latent", lengths=(3, 2, 4, 3), documents=5, blocks=True),
    Case("sppo", 2, 1, "latent", lengths=(4, 4, 4), multiplex="both"),
    # experts in all layers but the first, shared ones, and a further token
    Case("1f1b", 2, 3, "deepseek", ep=2),
    Case("1f1b", 2, 3, "deepseek", ep=2, pairs=True),
    Case("seq1f1b", 2, 2, "deepseek", lengths=CHUNKS, ep=2),
    Case("helix", 2, 4, "deepseek", folds=2, ship="qkv", ep=2),
    Case("weipipe", 2, 4, "deepseek", layers=4, ep=2),
    Case("sppo", 2, 2, "deepseek", lengths=CHUNKS, offload=3, ep=2),
    Case("infinipipe", 2, 2, "deepseek", lengths=CHUNKS, documents=4, ep=2),
    Case("1f1b", 2, 2, "deepseek", tp=2, sequence_parallel=True),
]
