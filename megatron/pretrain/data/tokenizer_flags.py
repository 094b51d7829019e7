"""The tokenizer that the flags name, and its number of tokens, known before it is built.

A step is planned before anything starts, and the sizes of embedding and output layer are part of the plan. For
tokenizers in files the size is read as megatron-core's classes find it.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from helixpipe.common.errors import UserError
from helixpipe.common.json_values import parse_json

LIBRARIES: Mapping[str, tuple[str, str | None]] = MappingProxyType(
    {
        "NullTokenizer": ("null", None),
        "ByteLevelTokenizer": ("byte-level", None),
        "GPT2BPETokenizer": ("huggingface", "transformers"),
        "HuggingFaceTokenizer": ("huggingface", "transformers"),
        "SentencePieceTokenizer": ("sentencepiece", "sentencepiece"),
        "GPTSentencePieceTokenizer": ("sentencepiece", "sentencepiece"),
        "Llama2Tokenizer": ("sentencepiece", "sentencepiece"),
        "TikTokenizer": ("tiktoken", "tiktoken"),
    }
)
"""Type -> megatron-core's library, and the package that needs."""

TOKENIZER_TYPES = tuple(LIBRARIES)

GPT2_END = "<|endoftext|>"
"""The end of a document of GPT2BPETokenizer, a token of its own where the vocabulary file has none."""

_BYTES, _TIKTOKEN = 512, 1 << 17
"""Tokens of ByteLevelTokenizer and TikTokenizer, if --vocab-size does not say."""


@dataclass(frozen=True)
class TokenizerFlags:
    """The flags of the tokenizer; each field is named after its flag."""

    tokenizer_type: str
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    tiktoken_pattern: str = "v2"
    tiktoken_num_special_tokens: int = 1000

    @classmethod
    def of(cls, flags: Any) -> TokenizerFlags:
        """Return the tokenizer's flags from a group of flags that contains them."""
        return cls(**{field.name: getattr(flags, field.name) for field in dataclasses.fields(cls)})

    @property
    def library(self) -> str:
        """megatron-core's."""
        return LIBRARIES[self.tokenizer_type][0]

    @property
    def path(self) -> str | None:
        """The file or folder from which the tokenizer is loaded."""
        return self.vocab_file if self.tokenizer_type == "GPT2BPETokenizer" else self.tokenizer_model

    def check(self) -> None:
        """Raise UserError for a type that is unknown, files that are not given or not there, a folder with more than
        data in it, and a package that is not installed."""
        if self.tokenizer_type not in LIBRARIES:
            raise UserError(
                f"--tokenizer-type {self.tokenizer_type} is unknown; valid are {', '.join(TOKENIZER_TYPES)}."
            )
        library, package = LIBRARIES[self.tokenizer_type]
        if package is not None and importlib.util.find_spec(package) is None:
            raise UserError(
                f"--tokenizer-type {self.tokenizer_type} needs the package {package}, which is not installed: pip "
                f"install {package}."
            )
        if library == "null":
            if self.vocab_size is None:
                raise UserError("--tokenizer-type NullTokenizer needs --vocab-size, the number of token ids.")
        elif library == "byte-level":
            if self.vocab_size is not None and self.vocab_size < 256:
                raise UserError(
                    f"--vocab-size {self.vocab_size} is too small for ByteLevelTokenizer, which needs at least 256."
                )
        elif self.tokenizer_type == "GPT2BPETokenizer":
            self._existing("--vocab-file", self.vocab_file)
            self._existing("--merge-file", self.merge_file)
        elif self.tokenizer_type == "HuggingFaceTokenizer" and self.tokenizer_model is not None:
            check_folder(self.tokenizer_model)  # or a name that the Hugging Face hub or its cache knows
        else:
            self._existing("--tokenizer-model", self.tokenizer_model)

    def size(self) -> int:
        """Return the number of tokens. Raises UserError as `check` does, and for files that cannot be read."""
        self.check()
        with self.loading():
            if self.library == "null":
                return (self.vocab_size or 0) + 1  # the end of a document comes after the numbers
            if self.library == "byte-level":
                return self.vocab_size or _BYTES
            if self.library == "tiktoken":
                return self.vocab_size or _TIKTOKEN
            if self.library == "sentencepiece":
                return _sentencepiece_size(str(self.path))
            if self.tokenizer_type == "GPT2BPETokenizer":
                return _gpt2_size(str(self.path))
            return _huggingface_size(str(self.path))

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Raise whatever reading the tokenizer's files raises as one UserError."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            raise UserError(
                f"--tokenizer-type {self.tokenizer_type} cannot be loaded from {self.path}: {first_line}."
            ) from error

    def _existing(self, flag: str, path: str | None) -> None:
        if path is None:
            raise UserError(f"--tokenizer-type {self.tokenizer_type} needs {flag}.")
        if not Path(path).is_file():
            raise UserError(f"{flag} {path} does not exist.")


def _sentencepiece_size(path: str) -> int:
    processor = importlib.import_module("sentencepiece").SentencePieceProcessor()
    processor.Load(path)
    return int(processor.get_piece_size())


def _gpt2_size(path: str) -> int:
    vocabulary = parse_json(Path(path).read_text(encoding="utf-8"))
    if not isinstance(vocabulary, dict):
        raise ValueError("it is not a JSON object")
    return len(vocabulary.keys() | {GPT2_END})


def _huggingface_size(name: str) -> int:
    from transformers import AutoTokenizer

    return len(AutoTokenizer.from_pretrained(name, use_fast=True, trust_remote_code=False))


_PICKLES = (".pkl", ".pickle")
_WITH_CLASSES = ("tokenizer_config.json", "config.json")
"""Files that may name classes of code in the folder, under `auto_map`."""


def check_folder(name: str) -> None:
    """Raise UserError, one sentence that names the file, for a folder that is not data alone.

    name: of --tokenizer-model; what is no folder here is a name of the Hugging Face hub, whose code is not run either.
    """
    folder = Path(name)
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.suffix in _PICKLES:
            raise UserError(
                f"--tokenizer-model {name}: {path.name} is a pickle, which can run code: remove it, or convert it to "
                "tokenizer.json."
            )
        if path.is_symlink() and not _leads_inside(path, folder):
            raise UserError(
                f"--tokenizer-model {name}: {path.name} is a link to {path.readlink()}, which is no file of the "
                "folder: copy there what is meant."
            )
        if not (path.is_file() or path.is_dir()):
            raise UserError(f"--tokenizer-model {name}: {path.name} is neither a file nor a folder; remove it.")
    for file in _WITH_CLASSES:
        if (folder / file).exists():
            _refuse_code(name, folder / file)


def _leads_inside(link: Path, folder: Path) -> bool:
    """Whether a link points into the folder or, for a snapshot in the hub's cache, to its folder of blobs."""
    home = folder.resolve()
    if home.parent.name == "snapshots":
        home = home.parents[1]
    target = link.resolve()
    return target.is_relative_to(home) and (target.is_file() or target.is_dir())


def _refuse_code(name: str, path: Path) -> None:
    try:
        content = parse_json(path.read_bytes())
    except (ValueError, OSError) as error:
        raise UserError(f"--tokenizer-model {name}: {path.name} cannot be read as JSON ({error}).") from None
    if not isinstance(content, dict):
        raise UserError(f"--tokenizer-model {name}: {path.name} is not a JSON object.")
    classes = content.get("auto_map")
    if classes is not None and (not isinstance(classes, dict) or "AutoTokenizer" in classes):
        raise UserError(
            f"--tokenizer-model {name}: {path.name} asks for code of its own (auto_map), which is never run: take a "
            "tokenizer.json, or remove auto_map if a class of transformers reads the folder."
        )
