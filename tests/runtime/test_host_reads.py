"""No op of any schedule makes the host wait for the device: on CUDA it would stop running ahead.

On the CPU the operations that would do so are refused; on a GPU torch refuses whatever does.
"""

from __future__ import annotations

import pytest

from helixpipe.planning.memory.recompute import RecomputeOptions
from schedules import CATALOGUE
from tests.distributed import run_ranks
from tests.runtime.equality import Case
from tests.runtime.host_reads import reads, run_without_reads

WITHOUT_ATTENTION = RecomputeOptions("without-attention")

CASES = [
    *(Case(name, 2, 4, "gpt", tied=True) for name in ("gpipe", "1f1b", "zb1p", "zb2p")),
    *(Case(name, 2, 4, "llama", v=v) for name, v in (("interleaved-1f1b", 2), ("zb-interleaved", None), ("zbv", None))),
    *(Case(name, 2, 4, "llama") for name in ("v-half", "v-min")),
    *(Case(name, 2, 4, "gpt", tied=True) for name in ("chimera", "hanayo")),
    *(
        Case(name, 2, 3, "llama", lengths=(5, 4, 3))
        for name in ("seq1f1b", "infinipipe", "seq1f1b-zb", "sppo", "terapipe")
    ),
    Case("seq1f1b-interleaved", 2, 4, "gpt", v=2, lengths=(6, 6)),
    Case("adapipe", 2, 6, "llama", layers=5, memory_limit=1.5),
    *(
        Case("helix", 2, 8, "llama", folds=2, ship=ship, recompute=WITHOUT_ATTENTION)
        for ship in ("none", "qkv", "attention")
    ),
    *(Case(name, 2, 6, "llama") for name in ("weipipe-naive", "weipipe", "wzb1", "wzb2")),
    Case("1f1b", 2, 4, "llama", dropout=0.2, recompute=RecomputeOptions("full", recompute_early=False)),
    Case("1f1b", 2, 4, "gpt", mlp_chunk=5, loss_chunk=5),
    Case("1f1b", 2, 4, "gpt", tied=True, vocabulary="split"),
    Case("seq1f1b", 2, 3, "llama", lengths=(5, 4, 3), vocabulary="split", loss_chunk=5),
    Case("none", 1, 2, "gpt", tp=2, tied=True, sequence_parallel=True),
]


@pytest.mark.thorough
def test_a_step_reads_no_number_of_a_tensor() -> None:
    for found in run_ranks(run_without_reads, 2, CASES):
        assert dict(zip(map(str, CASES), found, strict=False)) == dict.fromkeys(map(str, CASES), "")


@pytest.mark.gpu
def test_a_step_on_a_gpu_does_not_make_the_host_wait() -> None:
    cases = [case for case in CASES if not case.sequence_parallel]
    for found in run_ranks(run_without_reads, 2, cases):
        assert dict(zip(map(str, cases), found, strict=False)) == dict.fromkeys(map(str, cases), "")


def test_every_schedule_is_among_them() -> None:
    assert {case.schedule for case in CASES} == set(CATALOGUE)


def test_the_guard_knows_a_read() -> None:
    (said,) = run_ranks(reads, 1)
    assert said == ["read"] * 10 + [""] * 5
