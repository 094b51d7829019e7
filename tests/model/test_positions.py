"""Learned positions over tensor-parallel ranks: each holds its rows, and weights, results and checkpoints stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.model import positions
from tests.model.positions import EVEN, TABLE, UNEVEN


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    return run_ranks(positions.compare, 2, str(folder))


@pytest.mark.parametrize("batch", ["counted", "given"])
@pytest.mark.parametrize("split", [False, True], ids=["nosp", "sp"])
@pytest.mark.parametrize("rows", [EVEN, UNEVEN])
def test_results_and_gradients_are_those_of_one_rank(
    ranks: list[dict[str, Any]], rows: int, split: bool, batch: str
) -> None:
    for results in ranks:
        equal, (difference, name), _, _ = results[f"{rows} {split} {batch}"]
        assert equal
        assert difference < 1e-9, name


def test_one_collective_sums_words_and_positions(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        assert results[f"{EVEN} False counted"][2:] == (["all_reduce"], [])
        assert results[f"{EVEN} True counted"][2] == ["reduce_scatter_tensor"]


def test_ranks_share_the_rows_that_one_rank_would_draw(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        assert results[f"{EVEN} rows"] == (EVEN // 2, True)
        assert results[f"{UNEVEN} rows"] == (UNEVEN, True)


def test_the_checkpoint_has_one_table(ranks: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(ranks):
        ((key, place, replica),) = results["entries of two ranks"]
        assert (key, place[0], place[1], replica) == (TABLE, (EVEN, 32), (rank * EVEN // 2, 0), (0, 0, 0))
        ((key, place, _),) = results["entries of one rank"]
        assert (key, place[0], place[1]) == (TABLE, (EVEN, 32), (0, 0))


def test_checkpoints_change_the_tensor_parallel_size(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        assert results["one to two"] and results["two to one"]


def test_chunks_look_up_their_own_positions(ranks: list[dict[str, Any]]) -> None:
    assert all(results["chunks"] for results in ranks)
