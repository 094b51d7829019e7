"""Small text files made into .bin/.idx pairs by the project's own tool."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tools.preprocess_data import parse_arguments, preprocess


def write_lines(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture
def make_pair(tmp_path: Path) -> Callable[..., str]:
    """make_pair(name, texts, *flags) -> prefix of the pair."""

    def make(name: str, texts: Sequence[str], *flags: str, eod: bool = True) -> str:
        source = write_lines(tmp_path / f"{name}.jsonl", texts)
        words = ["--input", str(source), "--output-prefix", str(tmp_path / name), *flags]
        words += ["--append-eod"] if eod else []
        if "--tokenizer-type" not in flags:
            words += ["--tokenizer-type", "ByteLevelTokenizer"]
        return str(preprocess(parse_arguments(words))["text"])

    return make


def story(number: int, length: int) -> str:
    """A text of `length` characters that no other number shares."""
    return (f"{number:05d} " * (length // 6 + 1))[:length]
