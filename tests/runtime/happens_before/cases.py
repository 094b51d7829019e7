"""What is run under the checker: every schedule whose ranks send something, and what else decides who uses memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from helixpipe.planning.memory.recompute import RecomputeOptions
from schedules.weipipe import WeipipeOptions
from tests.runtime.case import Case

FULL, WITHOUT_ATTENTION = RecomputeOptions("full"), RecomputeOptions("without-attention")

SWAPPED: dict[str, Any] = {"cp": 2, "cp_comm_type": "a2a"}
RING: dict[str, Any] = {"cp": 2, "cp_comm_type": "p2p"}

SCHEDULES = [
    Case("gpipe", 4, 3, "gpt", tied=True),
    Case("1f1b", 4, 5, "gpt"),
    Case("adapipe", 4, 3, "gpt", layers=5, memory_limit=1.5),
    Case("interleaved-1f1b", 4, 4, "gpt", v=2, tied=True, layers=8),
    Case("chimera", 4, 4, "gpt"),
    Case("hanayo", 4, 3, "gpt", v=2, layers=8),
    Case("zb1p", 4, 3, "llama"),
    Case("zb2p", 4, 4, "gpt"),
    Case("zbv", 4, 3, "gpt", layers=8),
    Case("v-half", 2, 4, "llama"),
    Case("v-min", 4, 3, "gpt", layers=8),
    Case("zb-interleaved", 4, 3, "gpt", layers=8),
    Case("terapipe", 4, 2, "gpt", lengths=(7, 5)),
    Case("seq1f1b", 4, 2, "llama", lengths=(7, 5)),
    Case("seq1f1b-interleaved", 4, 2, "gpt", v=2, layers=8, lengths=(6, 6)),
    Case("seq1f1b-zb", 4, 2, "gpt", lengths=(7, 5)),
    Case("infinipipe", 4, 2, "llama", lengths=(7, 5)),
    Case("sppo", 4, 2, "gpt", tied=True, lengths=(7, 5)),
    Case("helix", 4, 4, "gpt", folds=1, ship="none"),
    Case("weipipe-naive", 4, 4, "gpt"),
    Case("weipipe", 4, 5, "gpt"),
    Case("wzb1", 4, 4, "gpt", tied=True),
    Case("wzb2", 4, 4, "gpt"),
]

OTHERS = [
    # inside a layer: several tensors a message, some of them views
    Case("1f1b", 2, 3, "gpt", cut_after="qkv"),
    Case("1f1b", 2, 3, "gpt", cut_after="attn", recompute=WITHOUT_ATTENTION, split=True),
    Case("seq1f1b", 2, 2, "gpt", lengths=(7, 5), cut_after="qkv", recompute=WITHOUT_ATTENTION),
    # weights that are borrowed
    Case("helix", 4, 4, "gpt", folds=1, ship="qkv"),
    Case("helix", 2, 4, "llama", folds=2, ship="attention", recompute=WITHOUT_ATTENTION, split=True),
    Case("weipipe", 4, 5, "gpt", weipipe=WeipipeOptions(weipipe_eager=False, weipipe_slots=1), recompute=FULL),
    Case("wzb2", 4, 3, "gpt", layers=5, weipipe=WeipipeOptions(weipipe_slots=1, weipipe_grad_dtype="bf16")),
    # keys and values in blocks, some of other ranks
    Case("sppo", 2, 1, "llama", lengths=(4, 4, 4), multiplex="both"),
    # a head that is divided over the ranks
    Case("1f1b", 4, 3, "llama", vocabulary="split"),
    Case("zbv", 2, 3, "gpt", tied=True, vocabulary="split", loss_chunk=5),
    # collectives inside ops, beside the other half of the tokens or beside another unit
    Case("1f1b", 2, 3, "llama", halves=True, **SWAPPED),
    Case("seq1f1b", 2, 2, "gpt", lengths=(8, 4), halves=True, tied=True, **SWAPPED),
    Case("1f1b", 2, 4, "llama", pairs=True, **SWAPPED),
    Case("zb1p", 2, 4, "gpt", pairs=True, **RING),
    Case("seq1f1b", 2, 3, "llama", lengths=(8, 4), recompute=WITHOUT_ATTENTION, pairs=True, **RING),
    # weights in parts: gathered before an op or ahead of it, gradients scattered after it or behind
    Case("1f1b", 2, 3, "llama", sharded=True),
    Case("zb1p", 2, 3, "gpt", sharded=True, gathered_once=True),
    # keys and values that go round a ring
    Case("1f1b", 2, 3, "llama", **RING),
    # pieces replayed from graphs, in memory that others send and receive meanwhile
    Case("1f1b", 2, 5, "llama", cut_after="qkv", graphs=True),
    Case("seq1f1b-interleaved", 2, 3, "gpt", v=2, lengths=(7, 5), graphs=True),
    # memory that is let go of and filled again
    Case("interleaved-1f1b", 4, 4, "gpt", v=1, recompute=WITHOUT_ATTENTION, split=True),
]

OFFLOADING = [replace(case, offload=seed) for seed, case in enumerate([*SCHEDULES[::2], *OTHERS[1::3]])]
"""With copies to the host and back, which are two more streams. The other half of the schedules adds nothing to it."""
