"""The cases of test_equality.py: those of `cases`, under a limit, and with keys and values in blocks on one rank and on
a team's."""

from __future__ import annotations

from helixpipe.planning.memory.recompute import RecomputeOptions
from tests.runtime import cases
from tests.runtime.case import Case
from tests.runtime.cut_cases import CUT
from tests.runtime.expert_cases import BALANCED_OVER_THE_STEP, EXPERTS
from tests.runtime.further_cases import FURTHER, FURTHER_ELSEWHERE
from tests.runtime.gated_cases import GATED
from tests.runtime.graph_cases import GRAPHS
from tests.runtime.halves_cases import HALVES
from tests.runtime.latent_cases import LATENT
from tests.runtime.mixed_cases import MIXED
from tests.runtime.pairs_cases import PAIRS
from tests.runtime.vocabulary_cases import SPLIT_HEADS, SPREAD_HEADS

WITHOUT_ATTENTION = RecomputeOptions("without-attention", recompute_early=False)
FULL = RecomputeOptions("full", recompute_early=False)

GROUPS = cases.GROUPS | {
    "limits": [  # layers of all units recomputed, and of some of them
        Case("zb1p", 2, 5, "llama", layers=4, memory_limit=3.4),
        Case("zbv", 2, 5, "gpt", tied=True, layers=4, memory_limit=2.2),
        Case("seq1f1b-zb", 2, 4, "llama", lengths=(5, 4, 3), layers=4, memory_limit=2.55),
    ],
    "divisions": [  # stages of unlike numbers of layers, of embedding or head alone
        Case("1f1b", 4, 3, "gpt", tied=True, layers=4, stage_layers=(0, 2, 1, 1)),
        Case("interleaved-1f1b", 2, 4, "llama", v=2, layers=4, stage_layers=(1, 1, 2, 0)),
        Case("zbv", 2, 5, "llama", tied=True, layers=5, stage_layers=(1, 3, 1, 0)),
        Case("sppo", 2, 3, "gpt", layers=4, lengths=(5, 7), stage_layers=(3, 1)),
    ],
    "blocks": [
        Case("sppo", 4, 1, "llama", lengths=(5, 4, 3), blocks=True),
        Case("sppo", 4, 3, "gpt", tied=True, lengths=(2, 2, 2, 2, 1, 1, 1, 1), blocks=True, offload=3),
        Case("sppo", 2, 3, "llama", tp=2, sequence_parallel=True, lengths=(6, 4, 2), blocks=True),
        Case("seq1f1b-zb", 2, 3, "llama", lengths=(6, 2, 4), recompute=FULL, blocks=True),
        Case(
            "seq1f1b-interleaved", 2, 3, "gpt", v=2, tied=True, lengths=(5, 7), recompute=WITHOUT_ATTENTION, blocks=True
        ),
        Case("seq1f1b", 2, 3, "llama", lengths=(5, 7), cut_after="qkv", blocks=True, again=True),
        Case("seq1f1b", 2, 3, "llama", lengths=(5, 4, 3), documents=5, blocks=True),
    ],
    "multiplex": [
        Case("sppo", 4, 1, "llama", lengths=(6, 6), multiplex="left"),
        Case("sppo", 4, 1, "gpt", tied=True, lengths=(4, 4, 4), multiplex="both", late=True),
        Case("sppo", 2, 1, "llama", tied=True, lengths=(4, 3, 3, 2), multiplex="both", recompute=FULL),
        Case("sppo", 2, 1, "gpt", lengths=(4, 4, 4), multiplex="left", recompute=WITHOUT_ATTENTION, offload=2),
        Case("sppo", 2, 1, "llama", tied=True, lengths=(4, 3, 3, 2), multiplex="both", recompute=FULL, offload=13),
        Case("sppo", 2, 1, "llama", tp=2, sequence_parallel=True, lengths=(4, 4, 4), multiplex="both"),
    ],
    "mixed": MIXED,
    "gated": GATED,
    "heads": [*SPREAD_HEADS, *SPLIT_HEADS],
    "halves": HALVES,
    "pairs": PAIRS,
    "cut": CUT,
    "experts": EXPERTS,
    "balanced": BALANCED_OVER_THE_STEP,
    "further": FURTHER,
    "further elsewhere": FURTHER_ELSEWHERE,
    "latent": LATENT,
    "graphs": GRAPHS,
}
