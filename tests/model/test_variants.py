"""Norms of heads, centered norms, wider heads and scaled RoPE against plain megatron-core, under chunks, tensor,
sequence and context parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helixpipe.model.rope_scaling import RopeScaling, frequencies
from tests.distributed import run_ranks
from tests.model import variants
from tests.model.variants import VARIANTS

CASES = ("1-chunks-loss", "1-chunks", "3-chunks-loss", "3-chunks", "tp2-False", "tp2-True", "cp2")


@pytest.fixture(scope="module")
def differences() -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for results in run_ranks(variants.compare, 2):
        for case, result in results.items():
            merged[case] = max(merged.get(case, result), result)
    return merged


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradients_equal_megatron_core(differences: dict[str, Any], name: str, case: str) -> None:
    difference, where = differences[f"{name}-{case}"]
    assert difference < 1e-9, where


def test_what_scaling_leaves_alone() -> None:
    plain = frequencies(16, 10000, RopeScaling())
    assert torch.equal(frequencies(16, 10000, RopeScaling(interpolation=3.0)), plain / 3)
    turns = plain * 100 / (2 * torch.pi)  # in the original length
    for kind, slow, fast in (("llama3", 1.0, 4.0), ("yarn", 0.2, 9.0)):
        scaling = RopeScaling(kind, 8.0, original_length=100, beta_fast=9.0, beta_slow=0.2)
        scaled = frequencies(16, 10000, scaling)
        assert torch.equal(scaled[turns > fast], plain[turns > fast]) and (turns > fast).any()
        torch.testing.assert_close(scaled[turns < slow / 4], plain[turns < slow / 4] / 8)
        between = (turns > slow) & (turns < fast)
        assert between.any() and torch.all((scaled < plain)[between] & (scaled > plain / 8)[between])


def test_yarn_lengthens_queries_and_keys() -> None:
    assert RopeScaling("yarn", 1.0).length == RopeScaling("llama3", 8.0).length == 1
    assert RopeScaling("yarn", 10.0).length == pytest.approx(0.1 * 2.302585 + 1)
    assert RopeScaling("yarn", 10.0, mscale_all_dim=1.0).length == 1
