"""What a checkpoint directory looks like on disk, without torch.distributed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from helixpipe.common.errors import CheckpointError
from megatron.pretrain.checkpoint import folder as folders


def make(directory: Path, *iterations: int, tracker: str | None = None) -> Path:
    for iteration in iterations:
        (directory / folders.folder_name(iteration)).mkdir(parents=True)
    if tracker is not None:
        (directory / folders.TRACKER).write_text(tracker)
    return directory


@pytest.mark.parametrize(
    ("tracker", "expected"),
    [
        ("20", ["iter_0000020", "iter_0000010"]),
        (" 10\n", ["iter_0000010"]),
        ("25", ["iter_0000025", "iter_0000020", "iter_0000010"]),
        ("release", ["release"]),
        (None, ["iter_0000030", "iter_0000020", "iter_0000010"]),
        ("12x", ["iter_0000030", "iter_0000020", "iter_0000010"]),
        ("-5", ["iter_0000030", "iter_0000020", "iter_0000010"]),
    ],
)
def test_candidates_follow_the_tracker(tmp_path: Path, tracker: str | None, expected: list[str]) -> None:
    found = folders.candidates(make(tmp_path, 10, 20, 30, tracker=tracker))
    assert list(found.names) == expected
    assert len(found.notes) == (tracker in (None, "12x", "-5"))


def test_candidates_of_an_empty_directory(tmp_path: Path) -> None:
    assert folders.candidates(tmp_path / "none") == folders.Candidates(())
    assert folders.candidates(tmp_path) == folders.Candidates(())
    with pytest.raises(CheckpointError, match=r"'nonsense', not a number: .* there is none"):
        folders.candidates(make(tmp_path, tracker="nonsense"))


def test_publishing_replaces_a_folder_and_clears_leftovers(tmp_path: Path) -> None:
    make(tmp_path, 10)
    (tmp_path / "iter_0000010" / "old").touch()
    for owner in ("aaaa", "bbbb", "cccc"):
        (tmp_path / f".iter_0000020.tmp-{owner}").mkdir()
    temporary = folders.begin(tmp_path, 10, "aaaa", heir_of=("bbbb",))
    (temporary / "new").write_text("new")
    folders.publish(temporary, folders.describe_files(temporary, ["new"]), 10)
    others = ".iter_0000020.tmp-cccc"  # another job may be writing there
    assert sorted(path.name for path in tmp_path.iterdir()) == [others, "iter_0000010"]
    assert sorted(path.name for path in (tmp_path / "iter_0000010").iterdir()) == ["manifest.json", "new"]


def test_run_killed_between_the_two_renames_gets_its_folder_back(tmp_path: Path) -> None:
    make(tmp_path, 10, tracker="20")
    (tmp_path / ".iter_0000020.replaced").mkdir()
    assert folders.candidates(tmp_path).names == ("iter_0000020", "iter_0000010")
    assert (tmp_path / "iter_0000020").is_dir()


def test_tracker_is_replaced_whole(tmp_path: Path) -> None:
    folders.write_tracker(tmp_path, 10)
    folders.write_tracker(tmp_path, 20)
    assert folders.read_tracker(tmp_path) == 20
    assert [path.name for path in tmp_path.iterdir()] == [folders.TRACKER]
    (tmp_path / folders.TRACKER).write_bytes(b"\xff")
    assert folders.read_tracker(tmp_path) is None


def test_removed_folder_never_looks_like_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, 10)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # killed before anything was removed
    folders.remove(tmp_path / "iter_0000010", "aaaa")
    assert folders.iterations(tmp_path) == []
    monkeypatch.undo()
    folders.begin(tmp_path, 20, "aaaa")
    assert len(list(tmp_path.iterdir())) == 1
