"""The cases of test_equality.py with the head on every rank, whole or a part of it: every schedule that does not spread
it itself, tied and untied, with all that a head can be beside."""

from __future__ import annotations

from dataclasses import replace

from helixpipe.planning.memory.recompute import RecomputeOptions
from tests.runtime.case import Case

FULL = RecomputeOptions("full")

SPREAD_HEADS = [
    Case("1f1b", 4, 6, "llama", vocabulary="spread"),
    Case("1f1b", 4, 3, "gpt", tied=True, vocabulary="spread"),  # one rank has no microbatch
    Case("gpipe", 2, 3, "gpt", tied=True, tp=2, sequence_parallel=True, vocabulary="spread"),
    Case("interleaved-1f1b", 2, 4, "llama", v=2, tied=True, vocabulary="spread"),
    Case("adapipe", 2, 4, "gpt", memory_limit=7.0, vocabulary="spread"),
    Case("chimera", 4, 4, "llama", vocabulary="spread"),
    Case("chimera", 2, 6, "gpt", tied=True, vocabulary="spread"),
    Case("hanayo", 2, 4, "llama", v=2, tied=True, vocabulary="spread"),
    Case("zb1p", 4, 6, "gpt", tied=True, vocabulary="spread"),
    Case("zb2p", 2, 3, "llama", tp=2, vocabulary="spread"),
    Case("zbv", 2, 5, "llama", loss_chunk=5, vocabulary="spread"),
    Case("zbv", 2, 4, "gpt", tied=True, recompute=FULL, vocabulary="spread"),
    Case("zb-interleaved", 2, 4, "llama", v=2, tied=True, vocabulary="spread"),
    Case("terapipe", 2, 2, "gpt", lengths=(5, 7), vocabulary="spread"),
    Case("seq1f1b", 4, 3, "llama", tied=True, lengths=(5, 4, 3), vocabulary="spread"),
    Case("seq1f1b-zb", 2, 3, "gpt", lengths=(3, 3, 3, 3), loss_chunk=2, vocabulary="spread"),
    Case("seq1f1b-interleaved", 2, 3, "llama", v=2, lengths=(5, 7), documents=5, vocabulary="spread"),
    Case("infinipipe", 2, 3, "mixed", lengths=(5, 4, 3), vocabulary="spread"),
    Case("sppo", 2, 3, "llama", tied=True, lengths=(6, 4, 2), offload=3, late=True, vocabulary="spread"),
    Case("1f1b", 2, 4, "llama", cp=2, cp_comm_type="p2p", vocabulary="spread"),
    Case("none", 1, 2, "gpt", tied=True, vocabulary="spread"),
]

SPLIT_HEADS = [
    replace(case, vocabulary="split", tied=case.tied != (number % 2 == 0))
    for number, case in enumerate(SPREAD_HEADS)
    if case.schedule != "chimera"  # which has the head on two ranks
]
"""Where one is tied the other is not, half of the time."""
