"""Heads that predict further tokens (multi-token prediction) against megatron-core's."""

from __future__ import annotations

import pytest

from tests.distributed import run_ranks
from tests.model import further


@pytest.fixture(scope="module")
def differences() -> dict[str, tuple[float, str]]:
    (found,) = run_ranks(further.compare, 1)
    return found


@pytest.mark.parametrize("variant", further.VARIANTS)
def test_gradients_equal_megatron_core(differences: dict[str, tuple[float, str]], variant: str) -> None:
    difference, name = differences[variant]
    assert difference < 1e-9, name


def test_an_evaluation_leaves_further_tokens_out() -> None:
    assert run_ranks(further.evaluated, 1) == [True]
