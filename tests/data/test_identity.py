"""What tells data and tokenizers apart, and indices that are more than numbers."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from helixpipe.common.errors import DataError
from megatron.pretrain.data.datasets import numbers_only
from megatron.pretrain.data.identity import identities
from megatron.pretrain.data.options import DataOptions
from megatron.pretrain.data.tokenizer import build_tokenizer


def data(*words: str, **more: Any) -> str:
    options = DataOptions(seq_length=8, seed=1, data_path=words or None, mock_data=not words, **more)
    return identities(options, build_tokenizer("NullTokenizer", vocab_size=10))["data_identity"]


def pair(prefix: Path, content: bytes = b"index") -> str:
    prefix.parent.mkdir(exist_ok=True)
    prefix.with_suffix(".idx").write_bytes(content)
    prefix.with_suffix(".bin").write_bytes(b"tokens")
    return str(prefix)


def test_data_are_told_by_content(tmp_path: Path) -> None:
    one = pair(tmp_path / "a")
    assert data(one) == data(pair(tmp_path / "elsewhere" / "b")) == data(one, split="969,30,1")
    others = [data(), data(one, split="1,1,1"), data("0.5", one), data(pair(tmp_path / "c", b"other"))]
    others.append(data(pair(tmp_path / "d", b"i" * (1 << 18) + b"1")))
    others.append(data(pair(tmp_path / "e", b"i" * (1 << 18) + b"2")))
    assert len({data(one), *others}) == 7
    assert data(str(tmp_path / "missing")) != data(one), "that it is missing is told when it is opened"


def test_conversations_are_told_by_content(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    for file, content in zip(files, ("one", "one", "two"), strict=True):
        file.write_text(content)
    one, same, other = (data(str(file), sft=True) for file in files)
    assert one == same != other


def test_tokenizers_are_told_by_what_they_do() -> None:
    options = DataOptions(seq_length=8, seed=1, mock_data=True)
    kinds: list[tuple[str, int | None]] = [
        ("NullTokenizer", 10), ("NullTokenizer", 11), ("ByteLevelTokenizer", None), ("ByteLevelTokenizer", 600)
    ]  # fmt: skip
    found = [identities(options, build_tokenizer(kind, vocab_size=size))["tokenizer_identity"] for kind, size in kinds]
    assert len(set(found)) == 4
    assert found[0] == identities(options, build_tokenizer("NullTokenizer", vocab_size=10))["tokenizer_identity"]


class Payload:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("kind", ["a pickle", "an array of objects"])
def test_an_index_runs_no_code(tmp_path: Path, kind: str) -> None:
    path, mark = tmp_path / "index.npy", tmp_path / "ran"
    if kind == "a pickle":
        path.write_bytes(pickle.dumps(Payload(mark)))
    else:
        numpy.save(path, numpy.array([Payload(mark)], dtype=object), allow_pickle=True)
    for mode in ("r", None):
        with numbers_only(), pytest.raises(DataError, match=f"the data index {path} is not a file of numbers"):
            numpy.load(path, allow_pickle=True, mmap_mode=mode)  # as megatron-core does
    assert not mark.exists()
    numpy.save(path, numpy.arange(3))
    with numbers_only():
        assert numpy.load(path, allow_pickle=True, mmap_mode="r").tolist() == [0, 1, 2]
    assert numpy.load.__module__ == "numpy"
