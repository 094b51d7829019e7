"""Checkpoints under every schedule of the catalogue, at once and beside training, and of layers that several ranks
hold; one launch runs all."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checkpoint.runs import REPLICATED_LAYERS
from tests.checkpoint.schedules import NAMES, round_trips
from tests.distributed import run_ranks
from tests.selection import graded, selected

CORE = ("1f1b", "zbv", "weipipe", REPLICATED_LAYERS)
"""A stage a rank, several, and each way to place weights."""


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Return what is wrong under each schedule that is selected, by rank."""
    return run_ranks(
        round_trips, 2, str(tmp_path_factory.mktemp("checkpoints")), selected(request, "name", list(NAMES))
    )


@pytest.mark.parametrize("name", graded(list(NAMES), CORE))
def test_a_step_is_saved_and_loaded_bit_for_bit(ranks: list[dict[str, Any]], name: str) -> None:
    assert [results[name] for results in ranks] == ["", ""]
