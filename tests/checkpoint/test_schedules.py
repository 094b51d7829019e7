"""Checkpoints under every schedule of the catalogue, at once and beside training, and of layers that several ranks
hold; one launch runs all."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checkpoint.schedules import NAMES, round_trips
from tests.distributed import run_ranks


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What is wrong under each schedule that is selected, by rank."""
    own = [item for item in request.session.items if item.path == request.path]
    selected = {item.callspec.params["name"] for item in own if isinstance(item, pytest.Function)}
    names = [name for name in NAMES if name in selected]
    return run_ranks(round_trips, 2, str(tmp_path_factory.mktemp("checkpoints")), names)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_saved_and_loaded_bit_for_bit(ranks: list[dict[str, Any]], name: str) -> None:
    assert [results[name] for results in ranks] == ["", ""]
