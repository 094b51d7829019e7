"""The loss over slices of the sequence: its gradients, when its value is there, and how much memory it takes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from helixpipe.common.errors import UserError
from helixpipe.model.options import check_supported
from tests.distributed import run_ranks
from tests.model import loss_slices
from tests.model.common import make_config, make_options


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(loss_slices.compare, 2)


@pytest.mark.parametrize("style", loss_slices.STYLES)
@pytest.mark.parametrize("layout", loss_slices.PARALLEL)
def test_gradients_equal_those_without_slices(ranks: list[dict[str, Any]], layout: str, style: str) -> None:
    """Of input, output layer and norm, under a loss mask; also where slices do not divide the sequence, or are more."""
    for results in ranks:
        for size in loss_slices.SIZES:
            difference, loss = results[f"{layout}-{style}-{size}"]
            assert difference < 1e-9 and loss < 1e-6, size


@pytest.mark.parametrize("style", loss_slices.STYLES)
@pytest.mark.parametrize("layout", loss_slices.PARALLEL)
def test_nothing_waits_for_w(ranks: list[dict[str, Any]], layout: str, style: str) -> None:
    for results in ranks:
        difference, waiting = results[f"{layout}-{style}-split"]
        assert difference < 1e-9 and waiting == 0


@pytest.mark.parametrize("layout", loss_slices.PARALLEL)
def test_hidden_states_are_exchanged_once_and_in_the_backward(ranks: list[dict[str, Any]], layout: str) -> None:
    """Beside the three sums over the vocabulary that each slice's loss needs."""
    gather, scatter, reduce = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
    expected = {"tp1": [], "tp2": [reduce], "tp2-sp": [gather, scatter]}[layout]
    for results in ranks:
        forward, backward = results[f"{layout}-collectives"]
        assert forward == []
        assert sorted(backward) == sorted([*expected, *[reduce] * 3 * 3])


@pytest.mark.parametrize("layout", loss_slices.PARALLEL)
def test_an_evaluation_has_its_loss_at_once(ranks: list[dict[str, Any]], layout: str) -> None:
    for results in ranks:
        difference, kept = results[f"{layout}-evaluation"]
        assert difference < 1e-6 and not kept


def test_the_loss_is_not_a_number_until_its_backward_has_run(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        *before, kept, loss = results["value"]
        assert all(math.isnan(value) for value in before)
        assert (kept, loss) == pytest.approx((1.0, 1.0), rel=1e-6)


def test_slices_lose_no_precision_in_bfloat16(ranks: list[dict[str, Any]]) -> None:
    """Slices are summed in the float32 gradient buffers, however many they are."""
    for results in ranks:
        errors = results["bf16"]
        assert errors[0] < 2e-2 and max(errors[1], errors[5]) < 1.25 * errors[0]


def test_the_peak_is_that_of_one_slice_as_predicted(ranks: list[dict[str, Any]]) -> None:
    for what, measured, predicted, without in ranks[0]["peaks"]:
        assert 0.98 * predicted < measured <= 1.02 * predicted, what
        assert measured < 0.55 * without, what


@pytest.mark.parametrize("size", [-1, 2.5, True, "8"])
def test_a_size_that_is_no_number_of_tokens_is_refused(size: Any) -> None:
    options = replace(make_options("gpt", tied=True), loss_chunk_size=size)
    with pytest.raises(UserError) as caught:
        check_supported(make_config("gpt"), options)
    assert str(caught.value) == f"--loss-chunk-size must be a number of tokens, or 0 for no slices, not {size!r}."
