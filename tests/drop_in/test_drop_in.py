"""The drop-in for megatron-core's forward_backward_func: same losses, gradients and weights as with its own."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from schedules.drop_in import get_forward_backward_func
from tests.distributed import run_ranks
from tests.drop_in.comparing import compare, run_documented
from tests.drop_in.loop import Case
from tests.selection import graded

FLOAT32_TOLERANCE = 2e-6
BF16_TOLERANCE = 2e-2

ZERO_BUBBLE: tuple[tuple[str, int, bool], ...] = (
    ("zb1p", 1, False),
    ("zbv", 2, True),
    ("zb2p", 1, False),
    ("zb-interleaved", 2, False),
)
"""Their chunks a rank, and whether these lie in a V."""


def zero_bubble(pp: int, m: int, chosen: slice = slice(4), **settings: Any) -> list[Case]:
    """All of them, or the first or the second two: one of one chunk a rank and one of two."""
    return [Case(name, pp, m, v=v, in_a_v=in_a_v, **settings) for name, v, in_a_v in ZERO_BUBBLE[chosen]]


FIRST, SECOND = slice(2), slice(2, 4)


GROUPS = {
    "p1": (1, [Case("none", 1, 3, tied=True), Case("none", 1, 1, per_token=True), Case("zb1p", 1, 2, tied=True)]),
    "p2": (
        2,
        [
            *(Case("1f1b", 2, m, tied=m > 1) for m in (1, 2, 5)),
            Case("1f1b", 2, 4, llama=True, per_token=True, deallocate=False),
            Case("1f1b", 2, 3, bf16=True, tied=True),
            Case("1f1b", 2, 3, recompute=True),
            Case("gpipe", 2, 3, tied=True),
            Case("interleaved-1f1b", 2, 2, v=2, tied=True),
            Case("interleaved-1f1b", 2, 4, v=2, llama=True, per_token=True),
            Case("hanayo", 2, 3, v=2, in_a_v=True, llama=True),
            Case("zb1p", 2, 5, tied=True, options=(("zb_max_inflight", 3),)),
            *zero_bubble(2, 4, FIRST, llama=True, per_token=True),
            *zero_bubble(2, 1, SECOND),
            *zero_bubble(2, 3, bf16=True, recompute=True),
            *(
                Case(schedule, 2, 3, bare=True, frozen=frozen)
                for schedule in ("1f1b", "zb1p")
                for frozen in (True, False)
            ),
        ],
    ),
    "p4": (
        4,
        [
            *(Case("1f1b", 4, m, tied=True) for m in (2, 6)),
            Case("gpipe", 4, 3, llama=True, tied=True),
            Case("interleaved-1f1b", 4, 4, v=2, llama=True, per_token=True),
            Case("interleaved-1f1b", 4, 8, v=2, tied=True),
            Case("zb1p", 4, 2, tied=True),
            *zero_bubble(4, 6, llama=True, per_token=True),
        ],
    ),
    "p2-tp2": (
        4,
        [
            Case("1f1b", 2, 3, tp=2, tied=True),
            *zero_bubble(2, 3, FIRST, tp=2),
            *zero_bubble(2, 4, SECOND, tp=2, llama=True, sequence_parallel=True),
        ],
    ),
    "p2-dp2": (
        4,
        [
            Case("1f1b", 2, 3, tied=True, overlap=True),
            Case("zb1p", 2, 3, tied=True, overlap=True, distributed_optimizer=True, per_token=True),
            Case("zbv", 2, 4, v=2, in_a_v=True, overlap=True, distributed_optimizer=True, per_token=True),
        ],
    ),
}


@pytest.mark.parametrize("group", graded(list(GROUPS), ("p1", "p2", "p2-dp2")))
def test_equals_megatron_core(group: str) -> None:
    """Exactly where both run the same chunks; else the place of weights in the gradient buffers, and with it the
    rounding of float32 kernels, differs."""
    world_size, cases = GROUPS[group]
    for rank, results in enumerate(run_ranks(compare, world_size, cases, timeout=600)):
        for case, result in zip(cases, results, strict=True):
            where = f"{case} on rank {rank}: {result}"
            exact = case.same_chunks and case.pp > 1 and not case.distributed_optimizer
            tolerance = 0.0 if exact else BF16_TOLERANCE if case.bf16 else FLOAT32_TOLERANCE
            assert result["counts"], where
            for what in ("losses", "validation", "collected"):
                assert result[what] <= tolerance, where
            for what in ("gradients", "weights"):
                assert result[what][0] <= tolerance, where


def test_closing_releases_the_communicators_once() -> None:
    """Those of the transport; a later call makes them anew."""
    function, closed = get_forward_backward_func("1f1b"), []
    function.close()
    function._transport = SimpleNamespace(close=lambda: closed.append(True))
    function.close()
    function.close()
    assert closed == [True] and function._transport is None


def test_documented_code() -> None:
    document = (Path(__file__).parents[2] / "docs" / "megatron_core.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", document, flags=re.DOTALL)
    assert len(blocks) == 4  # test_own_model.py runs the last
    (zb1p, zbv), (zb1p_last, zbv_last) = run_ranks(run_documented, 2, blocks[:3], timeout=600)
    assert zb1p["losses"] == zb1p["expected"] == [] and len(zb1p_last["expected"]) == 4
    assert zb1p_last["losses"] == zb1p_last["expected"] and zbv["losses"] == zbv_last["losses"]
    assert zbv["losses"] == pytest.approx(zbv_last["expected"], rel=FLOAT32_TOLERANCE)
    assert all(result["gradients"][0] <= FLOAT32_TOLERANCE for result in (zb1p, zbv, zb1p_last, zbv_last))
