"""The cases of test_equality.py with gated attention and learned sinks, in layers of which some attend to a window and
some have no RoPE."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.runtime.case import Case
from tests.runtime.mixed_cases import CHUNKS, MIXED

CASES = [
    # of these `make test` runs the first: weights of attention that are shipped, and each way to attend
    Case("helix", 2, 4, "gated", folds=2, ship="qkv", split=True),
    Case("seq1f1b", 2, 2, "gated", lengths=CHUNKS, documents=4),
    Case("seq1f1b", 2, 2, "gated", lengths=CHUNKS, documents=4, blocks=True),
    *(Case("seq1f1b", 2, 2, "gated", lengths=(4, 8), documents=3, cp=2, cp_comm_type=way) for way in ("a2a", "p2p")),
    # every schedule, and all else that layers which are unlike are run with, but for
    # bfloat16, whose scores megatron-core rounds
    *(replace(case, style="gated") for case in MIXED if case.dtype is torch.float64),
    Case("sppo", 2, 2, "gated", lengths=CHUNKS, offload=3),
    Case("infinipipe", 2, 2, "gated", lengths=CHUNKS, documents=4),
    Case("weipipe", 2, 2, "gated", lengths=CHUNKS),
    # what ranks exchange, hidden
    Case("1f1b", 2, 3, "gated", tp=2, sequence_parallel=True, pairs=True),
    Case("1f1b", 2, 3, "gated", tp=2, sequence_parallel=True, halves=True),
    Case("seq1f1b", 2, 2, "gated", tp=2, sequence_parallel=True, lengths=(8, 4), halves=True),
    Case("seq1f1b", 2, 2, "gated", lengths=(4, 8), cp=2, cp_comm_type="a2a", halves=True),
]
GATED = list(dict.fromkeys(CASES))
