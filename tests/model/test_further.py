"""Heads that predict further tokens (multi-token prediction) against megatron-core's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

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


def test_losses_are_means_over_microbatches_however_they_are_cut() -> None:
    """A unit that is run again counts once; another step begins anew."""
    kept = FurtherLosses(2)
    units = [UnitContext(3, 0), UnitContext(3, 1, 0, 0, 2, row_length=8), UnitContext(3, 1, 1, 2, 6, row_length=8)]
    for unit, share in zip([units[0], *units], (9.0, 1.0, 2.0, 4.0), strict=True):
        kept.write(unit, [torch.tensor(share), torch.tensor(10 * share)])
    assert kept.sums(3).tolist() == [7.0, 70.0, 2.0]
    assert kept.sums(4).tolist() == [0.0, 0.0, 0.0] and not FurtherLosses(0).sums(3).numel()
    kept.write(UnitContext(4, 0), [torch.tensor(5.0)] * 2)
    assert kept.sums(4).tolist() == [5.0, 5.0, 1.0]
    kept.forget()  # that was no part of the step
    kept.write(UnitContext(4, 1), [torch.tensor(2.0)] * 2)
    assert kept.sums(4).tolist() == [2.0, 2.0, 1.0]


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
