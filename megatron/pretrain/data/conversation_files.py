"""Files of conversations (--sft), tokenized once: a .bin/.idx pair and a byte a token that says whether it is trained.

The pair lies in a folder beside the file, or in --data-cache-path, whose name is a digest of all that it depends on:
the file's content, the tokenizer, its chat template and how it is used. It is built by rank 0 under another name and
renamed when complete.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy

from helixpipe.common.errors import DataError
from megatron.pretrain.data.cache import file_digest, made_once
from megatron.pretrain.data.conversations import Renderer
from megatron.pretrain.data.document_files import IndexedDocuments
from megatron.pretrain.data.indexed_files import read_indexed_file

CONVERSATIONS = (".jsonl", ".json")
"""Ends of the names of such files."""

_FORMAT = 2  # of what is written; counts up whenever the same file gives other tokens or masks
_PAIR, _MASKS, _FIRSTS = "conversations", "trained.bin", "first_trained.bin"


def tokenize_once(path: str, tokenizer: Any, prompt_format: str, cache: str | None) -> str:
    """Return the folder with the tokens of a .jsonl file, created if it does not exist. For rank 0.

    Raises DataError, naming file and line, for an invalid conversation, and if nothing can be read or written.
    """
    renderer = Renderer(tokenizer, prompt_format)
    description = [_FORMAT, _digest(path), tokenizer.unique_identifiers, renderer.template, prompt_format]
    key = hashlib.sha256(json.dumps(description).encode()).hexdigest()[:24]
    final = Path(cache or f"{path}.cache") / key
    made_once(final, lambda folder: _write(path, renderer, Path(folder)))
    return str(final)


def open_conversations(folder: str, path: str, *, mapped: bool = True) -> IndexedDocuments:
    """Open the result of `tokenize_once` for the file at `path`. Raises DataError if this rank does not see it."""
    if not Path(folder).is_dir():
        raise DataError(f"tokens of {path} in {folder} are not visible: --data-cache-path must be shared by all nodes")
    file = read_indexed_file(os.path.join(folder, _PAIR))
    masks, firsts = os.path.join(folder, _MASKS), os.path.join(folder, _FIRSTS)
    for path_of_part, size, what in (
        (masks, file.tokens, f"a byte for each of {file.tokens} tokens"),
        (firsts, 8 * (len(file.document_ends) - 1), "a number for each conversation"),
    ):
        if not os.path.isfile(path_of_part) or os.path.getsize(path_of_part) != size:
            raise DataError(f"{path_of_part} does not have {what}; remove {folder}")
    return IndexedDocuments(file, masks, firsts, mapped, path)


def _write(path: str, renderer: Renderer, folder: Path) -> None:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    dtype = DType.optimal_dtype(renderer.tokenizer.vocab_size)
    builder = IndexedDatasetBuilder(str(folder / f"{_PAIR}.bin"), dtype=dtype)
    firsts = []
    with closing(builder.data_file), open(folder / _MASKS, "wb") as masks, open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                encoded = renderer.encode(line)
            except DataError as error:
                raise DataError(f"{path}, line {number}: {error}") from error
            builder.add_document(encoded.tokens, [len(encoded.tokens)])
            masks.write(numpy.array(encoded.trained, numpy.uint8).tobytes())
            trained = numpy.flatnonzero(encoded.trained[1:])  # nothing predicts the first token
            firsts.append(1 + int(trained[0]) if len(trained) else len(encoded.tokens))
        if not builder.sequence_lengths:
            raise DataError(f"{path} holds no conversations")
        builder.finalize(str(folder / f"{_PAIR}.idx"))
    numpy.array(firsts, numpy.int64).tofile(folder / _FIRSTS)


def _digest(path: str) -> str:
    if not path.endswith(CONVERSATIONS):
        raise DataError(f"{path} is not a .jsonl file: --sft reads conversations from JSON lines")
    try:
        return file_digest(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
