"""The drop-in for megatron-core's forward_backward_func: same losses, gradients and weights as with its own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.megatron.loop import Case, compare

EXACT = [
    *(Case("1f1b", 2, m, tied=tied) for m in (1, 2, 5) for tied in (False, True)),
    Case("1f1b", 2, 4, llama=True, per_token=True, deallocate=False),
    Case("1f1b", 2, 3, bf16=True, tied=True),
    Case("interleaved-1f1b", 2, 2, v=2, tied=True),
    Case("interleaved-1f1b", 2, 4, v=2, llama=True, per_token=True),
]


@pytest.mark.parametrize("cases", [EXACT], ids=["exact"])
def test_try(cases: list[Case]) -> None:
    for result in run_ranks(compare, 2, cases):
        for case, each in zip(cases, result, strict=True):
            print(case, each)
    assert False
