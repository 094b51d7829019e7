"""Checkpoints that are written beside training (--async-save), on two ranks; one process group runs all cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import async_cases, cases
from tests.distributed import run_ranks
from tests.selection import graded

CORE = ("pp2", "zero", "half offloaded", "sharded", "spread head zero")
"""Of each way to keep weights and moments one."""
TOO_LARGE = "could not be written (File too large)"


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    own = (item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path)
    layouts = [item.callspec.params["layout"] for item in own if item.originalname == BESIDE]
    folder: Path = tmp_path_factory.mktemp("beside")
    with pytest.raises(RuntimeError, match=r"died with exit code -9|Connection (closed|reset) by peer"):
        run_ranks(async_cases.killed, 2, str(folder / "killed"))
    return run_ranks(async_cases.all_cases, 2, str(folder), layouts)


@pytest.mark.parametrize("layout", graded(list(async_cases.LAYOUTS), CORE))
def test_what_is_written_beside_training_is_what_would_have_been_written_at_once(
    ranks: list[dict[str, Any]], layout: str
) -> None:
    """Byte for byte, though training goes on before the first byte is written; nothing is to be seen before it is."""
    assert [results[layout] for results in ranks] == ["", ""]


BESIDE = test_what_is_written_beside_training_is_what_would_have_been_written_at_once.__name__


def test_a_second_save_waits_for_the_first(ranks: list[dict[str, Any]]) -> None:
    first, second = (results["in turn"] for results in ranks)
    assert first == ["begins 1", "waits", "has 1", "begins 2", "waits", "has 2"]
    assert second == ["begins 1", "waits", "begins 2", "waits"]


def test_older_checkpoints_go_as_they_do_without(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        assert results["retained"] == ["iter_0000004", "iter_0000006", cases.TRACKER]


@pytest.mark.parametrize("how", ["beside", "at once"])
@pytest.mark.parametrize(
    ("case", "words", "kept"),
    [
        ("first", f"iter_0000001/__1_0.distcp {TOO_LARGE}; no checkpoint is there yet.", []),
        ("shard", f"iter_0000002/__1_0.distcp {TOO_LARGE}; iter_0000001 is kept.", ["iter_0000001", cases.TRACKER]),
        ("common", f"iter_0000002/common.pt {TOO_LARGE}; iter_0000001 is kept.", ["iter_0000001", cases.TRACKER]),
        ("index", f"iter_0000002/.metadata {TOO_LARGE}; iter_0000001 is kept.", ["iter_0000001", cases.TRACKER]),
    ],
)
def test_a_file_that_cannot_be_written_is_named_and_so_is_what_is_kept(
    ranks: list[dict[str, Any]], case: str, words: str, kept: list[str], how: str
) -> None:
    first, second = (results[f"{case}, {how}"] for results in ranks)
    assert first == second
    told, there = first
    assert told.startswith("--save ") and told.endswith(f": {words}") and "\n" not in told
    assert there == kept


def test_no_memory_for_the_copy(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        told, there = results["no memory"]
        assert told.startswith("--async-save: the host of rank 1 has no memory for a copy")
        assert told.endswith("; leave it out; iter_0000001 is kept.") and "can't allocate memory" in told
        assert there == ["iter_0000001", cases.TRACKER]


def test_the_save_after_a_failed_one(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        assert results["afterwards"] == ["iter_0000001", "iter_0000002", cases.TRACKER]


def test_the_folder_is_this_jobs_until_the_checkpoint_is_there(ranks: list[dict[str, Any]]) -> None:
    told, there = ranks[0]["locked"]
    assert "is in use by another job (process " in told
    assert there == ["iter_0000001", cases.TRACKER]
    for results in ranks:
        told, there = results["taken over"]
        assert "was taken over by another job" in told and told.endswith("; no checkpoint is there yet.")
        assert there == [".lock"]


def test_a_run_that_fails_gives_up_what_it_still_writes(ranks: list[dict[str, Any]]) -> None:
    """A checkpoint that is given up is never given its name, however late."""
    for results in ranks:
        told, there = results["given up"]
        assert told.endswith(": the run has ended before all of it was written; no checkpoint is there yet.")
        assert there == []


def test_a_rank_killed_while_it_writes(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        after = results["resumed after a kill"]
        assert {"iter_0000003", cases.TRACKER} <= set(after["left"])
        assert ".lock" in after["left"] or ".iter_0000005.tmp" not in after["left"], "nobody would remove it"
        assert after["at"] == 3 and after["whole"]
        assert after["then"] == ["iter_0000003", "iter_0000005", cases.TRACKER]


def test_a_kill_at_any_moment_leaves_the_last_complete_checkpoint(tmp_path: Path) -> None:
    """Between any two changes that a rank makes in the folder, and in the middle of each file."""
    (tmp_path / "moments").mkdir()
    first, second = run_ranks(async_cases.at_every_moment, 2, str(tmp_path))
    assert first == second
    assert [moment for moment in first if not moment[3]] == []
    assert {at for _, _, at, _ in first} == {3, 5, 6} and len(first) > 40
    assert all(tracker == at for _, tracker, at, _ in first)
