"""Heads that predict further tokens (multi-token prediction) against megatron-core's."""

from __future__ import annotations

import pytest
import torch

from helixpipe.model import Microbatch
from helixpipe.model.documents import Documents
from helixpipe.model.further_tokens import further as moved
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


def test_tokens_further_on_end_with_their_document() -> None:
    tokens = torch.arange(1, 13).reshape(2, 6)
    batch = Microbatch(tokens, tokens + 20, tokens.float(), documents=Documents([[4, 2], [1, 5]]))
    found = moved(batch, 2, positions=True)
    assert found.tokens.tolist() == [[3, 4, 0, 0, 0, 0], [0, 10, 11, 12, 0, 0]]
    assert found.labels.tolist() == [[23, 24, 0, 0, 0, 0], [0, 30, 31, 32, 0, 0]]
    assert torch.equal(found.loss_mask, found.tokens.float())
    assert found.position_ids is not None
    assert found.position_ids.tolist() == [[2, 3, 0, 0, 0, 0], [0, 2, 3, 4, 0, 0]]
    whole = moved(Microbatch(tokens, tokens, tokens.float()), 1, positions=True)
    assert whole.tokens.tolist()[0] == [2, 3, 4, 5, 6, 0]
    assert whole.position_ids is not None and whole.position_ids.tolist()[0] == [1, 2, 3, 4, 5, 0]


def test_an_evaluation_leaves_further_tokens_out() -> None:
    assert run_ranks(further.evaluated, 1) == [True]
