"""The MLP over slices of the sequence gives the whole MLP's gradients, with the whole MLP's communication."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.model import slices


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(slices.compare, 2)


@pytest.mark.parametrize("style", slices.STYLES)
@pytest.mark.parametrize(
    ("layout", "size"),
    [(layout, size) for layout, (tp, _) in slices.PARALLEL.items() for size in (*slices.SIZES[tp], "split")],
)
def test_gradients_equal_those_of_megatron_core(
    ranks: list[dict[str, Any]], layout: str, style: str, size: int | str
) -> None:
    """Every parameter's, the second layer's bias among them, which a sum over slices must count once."""
    for results in ranks:
        difference, name = results[f"{layout}-{style}-{size}"]
        assert difference < 1e-9, name


@pytest.mark.parametrize("variant", slices.VARIANTS)
@pytest.mark.parametrize("layout", slices.PARALLEL)
def test_other_activations_and_dropout_equal_the_whole_mlp(
    ranks: list[dict[str, Any]], layout: str, variant: str
) -> None:
    for results in ranks:
        difference, name = results[f"{layout}-{variant}"]
        assert difference < 1e-9, name


@pytest.mark.parametrize("layout", slices.PARALLEL)
@pytest.mark.parametrize("style", slices.STYLES)
def test_ranks_communicate_once_for_all_slices(ranks: list[dict[str, Any]], style: str, layout: str) -> None:
    gather, scatter, reduce = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
    expected = {
        "tp1": [[], []],
        "tp2": [[reduce], [reduce]],
        "tp2-sp": [[gather, scatter], [gather, gather, scatter]],
    }
    for results in ranks:
        found = results[f"{layout}-{style}-collectives"]
        assert found[1] == found[5] == expected[layout]
        assert [sorted(names) for names in found[0]] == expected[layout]


def test_all_layers_share_two_buffers_of_a_sequence(ranks: list[dict[str, Any]]) -> None:
    elements = slices.SEQUENCE * slices.BATCH * 32
    for results in ranks:
        assert results["buffers"] == [("chunked mlp", elements), ("mpu", elements)]


@pytest.mark.parametrize("style", slices.STYLES)
def test_checkpoints_and_evaluation_are_those_of_the_whole_mlp(ranks: list[dict[str, Any]], style: str) -> None:
    for results in ranks:
        assert results[f"{style}-entries"] == set()
        difference, kept = results[f"{style}-evaluation"]
        assert difference < 1e-6 and not kept


@pytest.mark.parametrize("style", slices.STYLES)
def test_slices_lose_no_precision_in_bfloat16(ranks: list[dict[str, Any]], style: str) -> None:
    """Slices are summed in the float32 gradient buffers, however many they are."""
    for results in ranks:
        errors = {size: error for size, (error, _) in results[f"{style}-bf16"].items()}
        assert errors[0] < 2e-2
        assert errors[1] < 1.25 * errors[0] and errors[5] < 1.25 * errors[0]
