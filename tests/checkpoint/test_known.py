"""What may be in a checkpoint, and where its files may lie."""

from __future__ import annotations

import enum
import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer import enums
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megatron.pretrain.checkpoint import folder as folders
from megatron.pretrain.checkpoint import known
from megatron.pretrain.checkpoint.folder import MalformedError
from megatron.pretrain.checkpoint.known import UntrustedError


@pytest.mark.parametrize(
    "name",
    ["builtins.eval", "os.system", "torch.load", "torch.hub.load", "megatron.core.utils.x", "collections.Counter"],
)
def test_an_index_may_name_its_own_classes_alone(tmp_path: Path, name: str) -> None:
    module, _, function = name.rpartition(".")
    (tmp_path / ".metadata").write_bytes(f"c{module}\n{function}\n.".encode())
    with pytest.raises(UntrustedError, match=rf"\.metadata is not loaded: it asks for {name},"):
        known.read_index(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"nonsense", b"c\x01\x02\n!\n.", pickle.dumps([1]), pickle.dumps([[]] * 3)[:-3]]
)
def test_an_index_that_is_none_is_corrupt(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(MalformedError, match="corrupt"):
        known.read_index(tmp_path)


def test_data_types_are_known_and_what_else_torch_has_is_not(tmp_path: Path) -> None:
    index = Metadata({}, planner_data=[torch.bfloat16, torch.Size([1])])
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    assert known.read_index(tmp_path).planner_data == [torch.bfloat16, torch.Size([1])]


def test_objects_are_tensors_and_plain_values() -> None:
    def through(value: Any) -> Any:
        stream = io.BytesIO()
        torch.save(value, stream)
        stream.seek(0)
        return known.load_objects(stream, "rng_state")

    assert through([{"a": (1, None)}, 2.5]) == [{"a": (1, None)}, 2.5]
    with pytest.raises(UntrustedError, match=r"rng_state is not loaded: it asks for fractions\.Fraction,"):
        from fractions import Fraction

        through(Fraction(1, 2))


def test_an_enumeration_of_a_newer_megatron_core_is_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = enum.Enum("NewScope", {"layer": 3}, module=enums.__name__)  # type: ignore[misc]
    stream = io.BytesIO()
    with monkeypatch.context() as patched:
        patched.setattr(enums, "NewScope", newer, raising=False)
        torch.save({"scopes": [newer.layer], "number": 1}, stream)
    stream.seek(0)
    assert known.load_objects(stream, "common.pt") == {"scopes": [3], "number": 1}


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "deeper/file"])
def test_files_of_a_checkpoint_lie_in_its_folder(tmp_path: Path, path: str) -> None:
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (tmp_path / "common.pt").write_text("x")
    index = Metadata({}, storage_data={MetadataIndex("a"): _StorageInfo(path, 0, 1)})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    assert folders.problem(tmp_path, known.read_index) == f"it names a file elsewhere, {path}"


def test_nothing_is_read_before_its_checksum_is_right(tmp_path: Path) -> None:
    for name in ("metadata.json", "common.pt", ".metadata", "__0_0.distcp"):
        (tmp_path / name).write_text("as written")
    names = ["metadata.json", "common.pt", ".metadata", "__0_0.distcp"]
    (tmp_path / folders.MANIFEST).write_text(json.dumps({"files": folders.describe_files(tmp_path, names)}))

    def read(folder: Path) -> Any:
        raise AssertionError("read")

    for name in (".metadata", "common.pt"):
        (tmp_path / name).write_text("as changed")
        for share in range(3):  # whichever rank has this file among those it divides with the others
            assert folders.problem(tmp_path, read, share, 3) == f"{name} is corrupt (checksum)"
        assert folders.problem(tmp_path, read, shares=0) == f"{name} is corrupt (checksum)"
        (tmp_path / name).write_text("as written")
