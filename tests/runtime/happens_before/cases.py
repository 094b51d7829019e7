"""What is run under the checker: every schedule whose ranks send something, and what else decides who uses which memory."""

from __future__ import annotations

from helixpipe.planning.recompute import RecomputeOptions
from schedules.weipipe import WeipipeOptions
from tests.runtime.case import Case

FULL, WITHOUT_ATTENTION = RecomputeOptions("full"), RecomputeOptions("without-attention")

SCHEDULES = [
    Case("gpipe", 4, 3, "gpt", tied=True),
    Case("1f1b", 4, 5, "llama"),
    Case("adapipe", 4, 3, "llama", layers=7, memory_limit=1.5),
    Case("interleaved-1f1b", 4, 4, "gpt", v=2, tied=True, layers=8),
    Case("chimera", 4, 4, "llama"),
    Case("hanayo", 4, 3, "llama", v=2, layers=8),
    Case("zb1p", 4, 4, "llama"),
    Case("zb2p", 4, 4, "gpt"),
    Case("zbv", 4, 3, "gpt", layers=8),
    Case("zb-interleaved", 4, 4, "llama", layers=8),
    Case("terapipe", 4, 2, "llama", lengths=(5, 4, 3)),
    Case("seq1f1b", 4, 2, "gpt", lengths=(5, 4, 3)),
    Case("seq1f1b-interleaved", 4, 2, "llama", v=2, layers=8, lengths=(6, 6)),
    Case("seq1f1b-zb", 4, 2, "llama", lengths=(7, 5)),
    Case("helix", 4, 8, "llama", folds=2, ship="none"),
    Case("weipipe-naive", 4, 4, "llama"),
    Case("weipipe", 4, 6, "llama"),
    Case("wzb1", 4, 4, "gpt", tied=True),
    Case("wzb2", 4, 4, "llama"),
]

OTHERS = [
    # inside a layer: several tensors a message, some of them views
    *(Case("1f1b", 2, 3, "llama", cut_after=kind) for kind in ("norm", "qkv", "attn", "proj")),
    Case("1f1b", 2, 3, "gpt", cut_after="qkv", recompute=WITHOUT_ATTENTION, split=True),
    Case("seq1f1b", 2, 2, "llama", lengths=(7, 5), cut_after="qkv", recompute=WITHOUT_ATTENTION),
    # weights that are borrowed
    Case("helix", 4, 8, "llama", folds=2, ship="qkv"),
    Case("helix", 4, 8, "llama", folds=2, ship="attention", recompute=WITHOUT_ATTENTION),
    Case("helix", 2, 4, "llama", folds=2, ship="attention", split=True),
    Case("weipipe", 4, 6, "gpt", weipipe=WeipipeOptions(weipipe_eager=False, weipipe_slots=1), recompute=FULL),
    Case("wzb2", 4, 4, "llama", layers=5, weipipe=WeipipeOptions(weipipe_slots=1, weipipe_grad_dtype="bf16")),
    # memory that is let go of and filled again
    Case("1f1b", 4, 4, "llama", recompute=FULL),
    Case("interleaved-1f1b", 4, 4, "llama", v=1, recompute=WITHOUT_ATTENTION, split=True),
]
