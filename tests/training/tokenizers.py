"""A tiny tokenizer of each type, in files; packages that are not installed are stood in for."""

from __future__ import annotations

import base64
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron.pretrain.data.tokenizer_flags import LIBRARIES

_WORDS = {word: number for number, word in enumerate(["<unk>", "</s>", "a", "b", "c", " "])}


def huggingface_folder(path: Path, words: int = len(_WORDS), **config: Any) -> Path:
    """A folder with a tokenizer of so many words, whose configuration adds what it says."""
    path.mkdir(parents=True, exist_ok=True)
    vocabulary = {**_WORDS, **{f"w{number}": number for number in range(len(_WORDS), words)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>", **config}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def _null(folder: Path) -> str:
    return "--vocab-size 300"


def _bytes(folder: Path) -> str:
    return ""


def _gpt2(folder: Path) -> str:
    (folder / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    return f"--vocab-file {folder}/vocab.json --merge-file {folder}/merges.txt"


def _huggingface(folder: Path) -> str:
    """With a token that the configuration adds."""
    huggingface_folder(folder / "hf", words=300, pad_token="<pad>")
    return f"--tokenizer-model {folder / 'hf'}"


def _sentencepiece(folder: Path) -> str:
    (folder / "tokens.model").write_text("of so many pieces: 700")
    return f"--tokenizer-model {folder}/tokens.model"


def _tiktoken(folder: Path) -> str:
    tokens = [bytes([number]) for number in range(256)] + [b"%d" % number for number in range(256, 700)]
    ranks = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": ""}
        for rank, token in enumerate(tokens)
    ]
    (folder / "tokens.json").write_text(json.dumps(ranks))
    return f"--tokenizer-model {folder}/tokens.json --vocab-size 600 --tiktoken-num-special-tokens 20"


FLAGS: dict[str, Callable[[Path], str]] = {
    "NullTokenizer": _null,
    "ByteLevelTokenizer": _bytes,
    "GPT2BPETokenizer": _gpt2,
    "HuggingFaceTokenizer": _huggingface,
    "SentencePieceTokenizer": _sentencepiece,
    "GPTSentencePieceTokenizer": _sentencepiece,
    "Llama2Tokenizer": _sentencepiece,
    "TikTokenizer": _tiktoken,
}
"""Makes the files of a type, and says which flags name them."""

assert FLAGS.keys() == LIBRARIES.keys()


class _SentencePieceProcessor:
    def Load(self, path: str) -> None:
        self._size = int(Path(path).read_text().split()[-1])

    def get_piece_size(self) -> int:
        return self._size

    def piece_to_id(self, piece: str) -> int:
        return 0

    def encode_as_pieces(self, text: str) -> list[str]:
        return list(text)


class _Encoding:
    def __init__(self, **settings: Any) -> None:
        self.settings = settings


@pytest.fixture
def every_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """sentencepiece and tiktoken, as far as megatron-core asks them here."""
    from megatron.core.tokenizers.text.libraries import sentencepiece_tokenizer, tiktoken_tokenizer

    find_spec = importlib.util.find_spec
    for name, cls, user in (
        ("sentencepiece", _SentencePieceProcessor, sentencepiece_tokenizer),
        ("tiktoken", _Encoding, tiktoken_tokenizer),
    ):
        module = ModuleType(name)
        setattr(module, cls.__name__.removeprefix("_"), cls)
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(user, name, module, raising=False)
    monkeypatch.setattr(sentencepiece_tokenizer, "HAVE_SP", True)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: sys.modules.get(name) or find_spec(name, *rest)
    )
