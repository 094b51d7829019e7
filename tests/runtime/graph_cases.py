"""Cases of test_equality.py whose pieces are replayed from graphs, and some that ask for them in vain."""

from __future__ import annotations

from helixpipe.planning.memory.recompute import RecomputeOptions
from tests.runtime.case import Case

FULL = RecomputeOptions("full", recompute_early=False)

GRAPHS = [
    Case("none", 1, 3, "gpt", tied=True, graphs=True),
    Case("gpipe", 2, 3, "llama", graphs=True),
    Case("1f1b", 4, 5, "gpt", tied=True, graphs=True),
    Case("1f1b", 2, 5, "llama", cut_after="qkv", graphs=True, again=True),
    Case("1f1b", 2, 5, "llama", recompute=RecomputeOptions("without-attention"), graphs=True),
    Case("1f1b", 2, 4, "llama", recompute=FULL, graphs=True),
    Case("interleaved-1f1b", 2, 4, "gpt", v=2, tied=True, graphs=True),
    Case("seq1f1b", 2, 4, "llama", lengths=(5, 5, 2), graphs=True),
    Case("seq1f1b", 4, 3, "gpt", tied=True, lengths=(4, 4, 4), graphs=True, late=True),
    Case("seq1f1b-interleaved", 2, 3, "llama", v=2, lengths=(7, 5), recompute=FULL, graphs=True),
    Case("sppo", 2, 3, "llama", lengths=(5, 7), offload=3, graphs=True),
    Case("helix", 2, 8, "llama", folds=2, graphs=True),
    Case(
        "helix",
        2,
        4,
        "gpt",
        tied=True,
        folds=1,
        ship="qkv",
        recompute=RecomputeOptions("without-attention"),
        graphs=True,
    ),
    Case("1f1b", 2, 4, "mixed", graphs=True),
    Case("1f1b", 2, 4, "gated", graphs=True),
    Case("1f1b", 2, 4, "experts", graphs=True),
    Case("1f1b", 2, 4, "latent", graphs=True),
    Case("seq1f1b", 2, 3, "llama", lengths=(5, 4, 3), documents=5, graphs=True),
    Case("zbv", 2, 4, "llama", graphs=True),
    Case("weipipe", 2, 4, "llama", graphs=True),
]
EAGER = [case for case in GRAPHS if case.schedule in ("zbv", "weipipe") or case.offload or case.documents is not None]
"""Those of them for which nothing is captured."""
