"""Nothing is let go of while a message needs it, and nothing is used before it has come."""

from __future__ import annotations

import math

import pytest
import torch

from helixpipe.planning.memory.recompute import RecomputeOptions
from tests.distributed import run_ranks
from tests.runtime.equality import GRADIENT_TOLERANCE, LOSS_TOLERANCE, Case
from tests.runtime.poison import run_poisoned

CASES = [
    Case("1f1b", 2, 4, "gpt", tied=True),
    Case("interleaved-1f1b", 2, 4, "llama", v=2, recompute=RecomputeOptions("full")),
    Case("zb1p", 2, 4, "llama"),
    Case("seq1f1b", 2, 3, "gpt", lengths=(5, 4, 3)),
    Case("1f1b", 2, 3, "llama", cut_after="qkv", recompute=RecomputeOptions("without-attention")),
    Case("helix", 2, 8, "llama", folds=2, ship="attention", recompute=RecomputeOptions("without-attention")),
    Case("weipipe", 2, 8, "llama"),
    Case("wzb2", 2, 6, "gpt", layers=3),
]


def check(name: str, backend: str = "gloo") -> None:
    for found in run_ranks(run_poisoned, 2, name, CASES, backend=backend):
        for case, (gradient, loss, poisoned) in zip(CASES, found, strict=True):
            assert gradient < GRADIENT_TOLERANCE[torch.float64], case
            assert loss < LOSS_TOLERANCE[torch.float64], case
            assert poisoned > 0, case


def test_memory_lives_as_long_as_a_message_needs_it() -> None:
    """On the CPU; with a GPU's memory and streams, see test_happens_before.py."""
    check("gloo")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gloo", "nccl"] if torch.cuda.device_count() > 1 else ["gloo"])
def test_memory_lives_as_long_as_a_message_needs_it_on_a_gpu(name: str) -> None:
    """NCCL where each rank has a GPU of its own."""
    check(name, backend=name)


@pytest.mark.parametrize("name", ["hasty", "hurried"])
def test_a_transport_that_is_too_early_is_caught(name: str) -> None:
    results = run_ranks(run_poisoned, 2, name, CASES[:1])
    assert max(gradient for found in results for gradient, _, _ in found) == math.inf
