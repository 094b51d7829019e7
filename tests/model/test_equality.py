"""Our pieces against plain megatron-core on one process: loss and every gradient, wherever the model is cut."""

from __future__ import annotations

from typing import Any

import pytest

from helixpipe.program.stages import model_pieces
from tests.distributed import run_ranks
from tests.model import equality

CUTS = [f"after-{piece}" for piece in model_pieces(2)[:-1]]
MODELS = ["gpt-tied", "gpt-untied", "llama-tied", "llama-untied"]
PARALLEL = [f"{model}-tp2-{sp}" for model in ("gpt-tied", "llama-tied", "llama-untied") for sp in ("nosp", "sp")]


@pytest.fixture(scope="module")
def differences() -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for results in run_ranks(equality.compare, 2):
        for case, result in results.items():
            merged[case] = max(merged.get(case, result), result)
    return merged


@pytest.mark.parametrize("model", MODELS)
def test_gradients_equal_megatron_core(differences: dict[str, Any], model: str) -> None:
    for cut in ("whole", "every-piece"):
        difference, name = differences[f"{model}-{cut}"]
        assert difference < 1e-9, f"{name} ({cut})"


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_equal_when_two_ranks_hold_one_side_of_a_cut_each(
    differences: dict[str, Any], model: str, cut: str
) -> None:
    difference, name = differences[f"{model}-{cut}"]
    assert difference < 1e-9, name


@pytest.mark.parametrize("model", MODELS)
def test_loss_and_its_gradients_equal_to_its_float32(differences: dict[str, Any], model: str) -> None:
    assert differences[f"{model}-loss"][0] < 1e-6
    difference, name = differences[f"{model}-loss-gradients"]
    assert difference < 1e-4, name


@pytest.mark.parametrize("case", PARALLEL)
def test_tensor_parallel_equals_one_process(differences: dict[str, Any], case: str) -> None:
    assert differences[f"{case}-weights"][0] == 0.0, "initial weights depend on the tensor-parallel size"
    difference, name = differences[f"{case}-gradients"]
    assert difference < 1e-9, name
    assert differences[f"{case}-loss"][0] < 1e-6
