"""Identifies data and tokenizers by digests of their content, whatever their names and folders."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from megatron.pretrain.data.cache import file_digest
from megatron.pretrain.data.conversation_files import CONVERSATIONS
from megatron.pretrain.data.options import DEFAULT_SPLIT, DataOptions, parse_split

_TEXT = "0 1 17 The quick brown fox naïve 北京 Привет مرحبا 🙂 def f(x):\n\treturn x**2 # 3.1 <|endoftext|>"
_ENDS = 1 << 16  # bytes of either end of an index file


def identities(options: DataOptions, tokenizer: Any) -> dict[str, str]:
    """Return `tokenizer_identity`, a digest of the tokenizer's size and of how it tokenizes a text, and
    `data_identity`, a digest of the files' contents, their weights and the split. Checkpoints keep both among the
    arguments.
    """
    paths = (options.data_path, options.train_data_path, options.valid_data_path, options.test_data_path)
    split = parse_split(options.split or DEFAULT_SPLIT) if options.data_path else None
    return {
        "tokenizer_identity": _digest([tokenizer.vocab_size, getattr(tokenizer, "eod", None), _tokens(tokenizer)]),
        "data_identity": _digest([options.mock_data, split, [[_file(word) for word in path or ()] for path in paths]]),
    }


def _tokens(tokenizer: Any) -> list[int]:
    try:
        return list(map(int, tokenizer.tokenize(_TEXT)))
    except ValueError:  # of numbers alone
        return list(map(int, tokenizer.tokenize("0 1 17")))


def _file(word: str) -> Any:
    """Return a weight unchanged; for a prefix, the size of its files and both ends of its index; for a file of
    conversations, which has none, its content's digest."""
    index = Path(f"{word}.idx")
    try:
        if not index.exists() and word.endswith(CONVERSATIONS):
            return file_digest(word)
        with index.open("rb") as stream:
            first = stream.read(_ENDS)
            stream.seek(max(0, index.stat().st_size - _ENDS))
            ends = hashlib.sha256(first + stream.read(_ENDS)).hexdigest()
        return [ends, index.stat().st_size, Path(f"{word}.bin").stat().st_size]
    except OSError:  # a weight; files that are missing are told of when they are opened
        return word


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
