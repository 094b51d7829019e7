"""Models of each family give what transformers' give, and their folders come back as they were."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.huggingface import families
from tests.huggingface.families import FAMILIES


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for found in run_ranks(families.compare, 2, str(tmp_path_factory.mktemp("models")), timeout=400.0):
        for case, result in found.items():
            merged[case] = max(merged.get(case, result), result) if isinstance(result, tuple) else result
    return merged


@pytest.mark.parametrize("case", ["logits", "every piece", "cut 3", "cut 4", "cut 8", "tp2", "anew"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(results: dict[str, Any], name: str, case: str) -> None:
    difference, where = results[f"{name} {case}"]
    experts = name.startswith(("mixtral", "qwen3-experts", "qwen3-some", "deepseek"))  # all have scores in float32
    assert difference < (1e-5 if experts else 1e-9), where


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_is_transformers_to_its_float32(results: dict[str, Any], name: str) -> None:
    assert results[f"{name} loss"][0] < 1e-6


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_comes_back_byte_for_byte(results: dict[str, Any], name: str) -> None:
    assert results[f"{name} files"] == []


@pytest.mark.parametrize("name", FAMILIES)
def test_the_imported_checkpoint_loads_as_the_folder_does(results: dict[str, Any], name: str) -> None:
    assert results[f"{name} checkpoint"]
