"""Heads that predict further tokens (multi-token prediction) against megatron-core's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helixpipe.common.errors import UserError
from helixpipe.model import Microbatch, UnitContext
from helixpipe.model.documents import Documents
from helixpipe.model.further_tokens import FurtherLosses
from helixpipe.model.further_tokens import further as moved
from helixpipe.model.options import check_supported
from tests.distributed import run_ranks
from tests.model import further
from tests.model.common import make_config, make_options


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    (by_variant,) = run_ranks(further.compare, 1)
    return cast(dict[str, Any], by_variant)


@pytest.mark.parametrize("variant", further.VARIANTS)
def test_gradients_and_losses_equal_megatron_core(found: dict[str, Any], variant: str) -> None:
    (difference, name), losses, logged = found[variant]
    assert difference < 1e-9, name
    assert len(losses) > 0 and losses == pytest.approx(logged, rel=1e-5)  # in float32


@given(
    rows=st.lists(st.lists(st.sampled_from((0.0, 1.0)), min_size=6, max_size=6), min_size=2, max_size=6),
    size=st.integers(1, 6),
    chunk=st.integers(1, 6),
)
def test_losses_are_means_over_tokens_however_they_are_cut(rows: list[list[float]], size: int, chunk: int) -> None:
    """Micro-batch size and chunks change nothing, and a unit that is run again counts once."""
    kept, mask = FurtherLosses(2), torch.tensor(rows)
    loss = torch.arange(1.0, mask.numel() + 1).view_as(mask)
    config = make_config("further", mtp_num_layers=2)
    for number, first in enumerate(range(0, len(rows), size)):
        own, of_rows = mask[first : first + size], loss[first : first + size]
        tokens = torch.zeros(own.shape, dtype=torch.int64)
        batch = Microbatch(tokens, tokens, own)
        for at, offset in enumerate(range(0, 6, chunk)):
            unit = UnitContext(3, number, at, offset, min(chunk, 6 - offset), row_length=6)
            here = (of_rows * own)[:, unit.tokens].sum()
            for _ in range(2):
                kept.beside(here, [(here, batch), (10 * here, batch)], config, batch, unit)
    assert kept.sums(3).tolist() == [[(loss * mask).sum(), 10 * (loss * mask).sum()], [mask.sum()] * 2]
    assert kept.sums(4).tolist() == [[0.0, 0.0]] * 2 and not FurtherLosses(0).sums(3).numel()
    kept.write(UnitContext(4, 0), [torch.tensor(5.0)] * 2, [torch.tensor(2.0)] * 2)
    kept.forget()  # that was no part of the step
    kept.write(UnitContext(4, 1), [torch.tensor(2.0)] * 2, [torch.tensor(1.0)] * 2)
    assert kept.sums(4).tolist() == [[2.0, 2.0], [1.0, 1.0]]


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


def test_halves_are_refused_beside_layers_that_run_whole() -> None:
    options = replace(make_options("further", False), overlap_tp_comm="halves")
    with pytest.raises(UserError, match=r"--overlap-tp-comm halves gathers the rows .* --mtp-num-layers"):
        check_supported(make_config("further"), options)
    check_supported(make_config("further"), replace(options, overlap_tp_comm="pairs"))
