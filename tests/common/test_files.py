"""Output files: whole or not at all, tried beforehand, never written through a link that somebody laid."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helixpipe.common.errors import UserError
from helixpipe.common.files import try_file, try_folder, whole_file


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    with whole_file(target) as temporary:
        temporary.write_text("all of it")
        assert not target.exists()
    assert target.read_text() == "all of it"
    with pytest.raises(ZeroDivisionError), whole_file(target) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"] and target.read_text() == "all of it"


def test_no_temporary_file_goes_through_a_link_laid_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the name could be foreseen: the file is made anew or not at all."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr(os, "urandom", bytes)
    (tmp_path / f".out.json.{'0' * 16}.tmp").symlink_to(victim)
    with pytest.raises(UserError, match=r"cannot write .*out\.json: File exists"), whole_file(tmp_path / "out.json"):
        raise AssertionError("not reached")
    assert victim.read_text() == "precious"


def test_names_of_temporary_files_are_not_repeated(tmp_path: Path) -> None:
    with whole_file(tmp_path / "a") as first, whole_file(tmp_path / "a") as second:
        assert first != second and len(first.name) > 16


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path, "No such file or directory"),
        (lambda path: path.parent.mkdir(parents=True), None),
        (lambda path: path.mkdir(parents=True), "it is a directory"),
        (lambda path: path.parent.parent.joinpath("folder").touch(), "Not a directory"),
    ],
)
def test_a_file_is_tried_before_work_begins(tmp_path: Path, make: object, reason: str | None) -> None:
    path = tmp_path / "folder" / "out.json"
    make(path)  # type: ignore[operator]
    before = sorted(tmp_path.rglob("*"))
    if reason is None:
        try_file("--output", path)
    else:
        with pytest.raises(UserError, match=f"--output: cannot write {path}: {reason}"):
            try_file("--output", path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk_is_noticed_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"--output: cannot write .*No space left on device"):
        try_file("--output", tmp_path / "out")
    with pytest.raises(UserError, match=r"--save: cannot write into the folder .*No space left on device"):
        try_folder("--save", tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    try_folder("--save", tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--save: cannot write into the folder .*/file: it is a file\."):
        try_folder("--save", tmp_path / "file")
    with pytest.raises(UserError, match="--save: cannot write into the folder /proc/none"):
        try_folder("--save", "/proc/none")
    try_file("--output", "/dev/null")
