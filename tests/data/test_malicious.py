"""Data from somebody else: indices that lie about the .bin file, and tokenizers that come with code."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import struct
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from helixpipe.common.errors import DataError, UserError
from megatron.pretrain.data.indexed_files import MAGIC, read_indexed_file
from megatron.pretrain.data.tokenizer import build_tokenizer
from tests.checkpoint.malicious import Payload

Pairs = tuple[Sequence[int], Sequence[int], Sequence[int]]
BYTES = 24  # of the .bin file
HONEST: Pairs = ((4, 8), (0, 8), (0, 1, 2))
FAR = 2**63 - 1


def index(
    content: Pairs = HONEST, *, sequences: int | None = None, boundaries: int | None = None, code: int = 8
) -> bytes:
    """An .idx file of lengths, offsets and boundaries; sequences, boundaries: what the header says of how many."""
    lengths, offsets, ends = content
    counts = len(lengths) if sequences is None else sequences, len(ends) if boundaries is None else boundaries
    header = struct.pack("<9sQBQQ", MAGIC, 1, code, *counts)
    return header + struct.pack(f"<{len(lengths)}i{len(offsets)}q{len(ends)}q", *lengths, *offsets, *ends)


LIES: dict[str, tuple[bytes, str]] = {
    "offset outside": (index(((4, 8), (0, 4096), (0, 1, 2))), "truncated: 24 bytes of the 4112"),
    "offset at the end of numbers": (index(((4, 8), (0, FAR), (0, 1, 2))), f"truncated: 24 bytes of the {FAR}"),
    "overflow hidden": (index(((4, 8, 8), (0, FAR - 1, 8), (0, 1, 3))), f"truncated: 24 bytes of the {FAR - 1}"),
    "negative offset": (index(((4, 8), (-8, 8), (0, 1, 2))), "negative lengths or wrong"),
    "negative length": (index(((-4, 8), (0, 8), (0, 1, 2))), "negative lengths or wrong"),
    "length outside": (index(((4, 2**31 - 1), (0, 8), (0, 1, 2))), "truncated: 24 bytes of the 4294967302"),
    "sequences upon each other": (index(((12,) * 1000, (0,) * 1000, (0, 1000))), "lie upon each other"),
    "boundary outside": (index(((4, 8), (0, 8), (0, 3))), "wrong document boundaries"),
    "negative boundary": (index(((4, 8), (0, 8), (0, -1, 2))), "wrong document boundaries"),
    "boundaries whose differences wrap": (
        index(((4, 8), (0, 8), (0, FAR, -FAR - 1, -1, 2))),
        "wrong document boundaries",
    ),
    "no boundaries": (index(((4, 8), (0, 8), ())), "wrong document boundaries"),
    "more sequences than bytes": (index(sequences=2**40), "truncated"),
    "the most sequences": (index(sequences=2**64 - 1, boundaries=2**64 - 1), "truncated"),
    "the most boundaries": (index(boundaries=2**63), "truncated"),
    "negative counts": (index(sequences=2**64 - 2, boundaries=2**64 - 3), "truncated"),
    "no sequences": (index(((), (), (0,))), "holds no documents"),
    "floats": (index(code=6), "token type 6; valid are"),
    "no such type": (index(code=255), "token type 255; valid are"),
    "half a header": (index()[:20], "truncated: 20 bytes"),
    "a byte less": (index()[:-1], "truncated"),
    "a pickle": (pickle.dumps(Payload(Path("ran"))), "is not an index"),
}


@pytest.mark.parametrize("name", LIES)
def test_an_index_that_lies_is_refused_before_anything_is_allocated(name: str, tmp_path: Path) -> None:
    content, words = LIES[name]
    (tmp_path / "a.bin").write_bytes(bytes(BYTES))
    (tmp_path / "a.idx").write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(DataError) as caught:
            read_indexed_file(str(tmp_path / "a"))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert most < 1 << 20


def test_the_honest_one_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(BYTES))
    (tmp_path / "a.idx").write_bytes(index())
    assert read_indexed_file(str(tmp_path / "a")).tokens == 12


def test_an_index_of_a_terabyte_of_nothing_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(BYTES))
    with (tmp_path / "a.idx").open("wb") as file:
        file.write(index())
        file.truncate(1 << 40)
    with pytest.raises(DataError, match=r"has 1099511627776 bytes instead of 82"):
        read_indexed_file(str(tmp_path / "a"))


# ---------------------------------------------------------------------------------------------------------- tokenizer


def _named_pipe(folder: Path) -> None:
    os.mkfifo(folder / "tokenizer.json")


def _outside(folder: Path) -> None:
    (folder.parent / "secret.json").write_text("{}")
    (folder / "tokenizer.json").symlink_to(folder.parent / "secret.json")


def _code(file: str, classes: object) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_text(json.dumps({"auto_map": classes}))


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "code of its own": (
        _code("tokenizer_config.json", {"AutoTokenizer": ["mine.Mine", None]}),
        "tokenizer_config.json asks for code of its own (auto_map), which is never run",
    ),
    "code named by the model": (_code("config.json", {"AutoTokenizer": "mine.Mine"}), "config.json asks for code"),
    "code in another form": (_code("tokenizer_config.json", "mine.Mine"), "asks for code of its own"),
    "a pickle": (lambda folder: (folder / "vocab.pkl").write_bytes(pickle.dumps(1)), "vocab.pkl is a pickle"),
    "a link outside": (_outside, "tokenizer.json is a link to"),
    "a link to a device": (lambda folder: (folder / "vocab.json").symlink_to("/dev/zero"), "a link to /dev/zero"),
    "a link to nothing": (lambda folder: (folder / "vocab.json").symlink_to("absent"), "a link to absent"),
    "a named pipe": (_named_pipe, "tokenizer.json is neither a file nor a folder"),
    "deep JSON": (lambda folder: (folder / "config.json").write_text("[" * 100_000), "cannot be read as JSON"),
    "no object": (lambda folder: (folder / "tokenizer_config.json").write_text("[1]"), "is not a JSON object"),
}


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return what transformers, replaced, is asked for."""
    asked: list[dict[str, Any]] = []
    fake = ModuleType("transformers")

    def from_pretrained(**named: Any) -> None:
        asked.append(named)
        raise ValueError("no tokenizer here")

    fake.AutoTokenizer = SimpleNamespace(from_pretrained=from_pretrained)  # type: ignore[attr-defined]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    from megatron.core.tokenizers.text.libraries import huggingface_tokenizer

    monkeypatch.setitem(sys.modules, "transformers", fake)
    known = huggingface_tokenizer.HAVE_TRANSFORMERS
    monkeypatch.setattr(huggingface_tokenizer, "HAVE_TRANSFORMERS", known)  # which is found anew under the fake
    monkeypatch.setattr(huggingface_tokenizer, "AutoTokenizer", fake.AutoTokenizer, raising=False)
    return asked


@pytest.mark.parametrize("name", FOLDERS)
def test_a_tokenizer_that_comes_with_more_than_data_is_refused(
    name: str, tmp_path: Path, loaded: list[dict[str, Any]]
) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    make, words = FOLDERS[name]
    make(folder)
    with pytest.raises(UserError) as caught:
        build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folder))
    said = str(caught.value)
    assert said.startswith(f"--tokenizer-model {folder}: ") and words in said and said.endswith(".")
    assert "\n" not in said and not loaded


@pytest.mark.parametrize("model", ["folder", "somebody/model"])
def test_code_of_others_is_never_trusted(model: str, tmp_path: Path, loaded: list[dict[str, Any]]) -> None:
    """Neither for a folder, also one of the hub's cache, whose files are links, nor for a name."""
    folder = tmp_path / "models--a" / "snapshots" / "1"
    folder.mkdir(parents=True)
    (folder.parents[1] / "blobs").mkdir()
    (folder.parents[1] / "blobs" / "0").write_text("{}")
    (folder / "tokenizer.json").symlink_to("../../blobs/0")
    (folder / "config.json").write_text(json.dumps({"auto_map": {"AutoModelForCausalLM": "mine.Model"}}))
    with pytest.raises(UserError, match="cannot be loaded from"):
        build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folder) if model == "folder" else model)
    (asked,) = loaded
    assert asked["trust_remote_code"] is False
