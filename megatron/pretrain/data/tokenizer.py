"""Tokenizers by Megatron's --tokenizer-type, all of them megatron-core's, and the padded vocabulary.

NullTokenizer (whitespace-separated numbers) and ByteLevelTokenizer (UTF-8 bytes, end of document 0, padding 1, 512
entries by default) need nothing. The others need a package of their own (`transformers` is the extra `hf`) and local
files: nothing is downloaded for GPT2BPETokenizer, for which megatron-core itself would ask the Hugging Face hub even
with both files at hand.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helixpipe.common.errors import UserError
from helixpipe.model.releases import null_tokenizer
from megatron.pretrain.data.tokenizer_folder import check_folder

if TYPE_CHECKING:
    from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText

# Type -> (megatron-core library, the package it needs).
_LIBRARIES: dict[str, tuple[str, str | None]] = {
    "NullTokenizer": ("null", None),
    "ByteLevelTokenizer": ("byte-level", None),
    "GPT2BPETokenizer": ("huggingface", "transformers"),
    "HuggingFaceTokenizer": ("huggingface", "transformers"),
    "SentencePieceTokenizer": ("sentencepiece", "sentencepiece"),
    "GPTSentencePieceTokenizer": ("sentencepiece", "sentencepiece"),
    "Llama2Tokenizer": ("sentencepiece", "sentencepiece"),
    "TikTokenizer": ("tiktoken", "tiktoken"),
}
_HUGGINGFACE = {"use_fast": True, "include_special_tokens": False}
"""Options of every such tokenizer; their defaults are others from release to release."""

TOKENIZER_TYPES = tuple(_LIBRARIES)


def build_tokenizer(
    tokenizer_type: str,
    *,
    tokenizer_model: str | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
    tiktoken_pattern: str = "v2",
    tiktoken_num_special_tokens: int = 1000,
) -> MegatronTokenizerText:
    """Build the tokenizer: `tokenize(text)`, `detokenize(ids)`, `vocab_size`, `eod`, `unique_identifiers`.

    Raises UserError when the type is unknown, its files are not given or not readable, or its package is not installed.
    """
    if tokenizer_type not in _LIBRARIES:
        raise UserError(f"--tokenizer-type {tokenizer_type} is unknown; valid are {', '.join(TOKENIZER_TYPES)}")
    library, package = _LIBRARIES[tokenizer_type]
    if package is not None and importlib.util.find_spec(package) is None:
        raise UserError(
            f"--tokenizer-type {tokenizer_type} needs the package {package}, which is not installed: pip install "
            f"{package}"
        )
    if library == "null":
        if vocab_size is None:
            raise UserError("--tokenizer-type NullTokenizer needs --vocab-size, the number of token ids")
        name, options = null_tokenizer(vocab_size)
        return _load(tokenizer_type, name, None, **options)
    if library == "byte-level":
        if vocab_size is not None and vocab_size < 256:
            raise UserError(f"--vocab-size {vocab_size} is too small for ByteLevelTokenizer, which needs at least 256")
        return _load(tokenizer_type, library, None, **({} if vocab_size is None else {"vocab_size": vocab_size}))
    if tokenizer_type == "GPT2BPETokenizer":
        vocab = _existing("--vocab-file", vocab_file, tokenizer_type)
        return _gpt2(vocab, _existing("--merge-file", merge_file, tokenizer_type))
    if tokenizer_model is None:
        raise UserError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model")
    if tokenizer_type == "HuggingFaceTokenizer":  # a folder, or a name that the Hugging Face hub or its cache knows
        check_folder(tokenizer_model)
        return _load(tokenizer_type, library, tokenizer_model, trust_remote_code=False, **_HUGGINGFACE)
    model = _existing("--tokenizer-model", tokenizer_model, tokenizer_type)
    if tokenizer_type == "TikTokenizer":
        size = {} if vocab_size is None else {"vocab_size": vocab_size}
        special = {"pattern": tiktoken_pattern, "num_special_tokens": tiktoken_num_special_tokens}
        return _load(tokenizer_type, library, model, **special, **size)
    return _load(tokenizer_type, library, model)


def _existing(flag: str, path: str | None, tokenizer_type: str) -> str:
    if path is None:
        raise UserError(f"--tokenizer-type {tokenizer_type} needs {flag}")
    if not Path(path).is_file():
        raise UserError(f"{flag} {path} does not exist")
    return path


def _load(tokenizer_type: str, library: str, path: str | None, **options: Any) -> MegatronTokenizerText:
    from helixpipe.model.device import prepare

    prepare()  # imports megatron-core quickly
    with warnings.catch_warnings():  # megatron-core warns a dozen times that optional GPU packages are absent
        warnings.simplefilter("ignore")
        with nullcontext() if library == "huggingface" else _without_transformers():
            from megatron.core.tokenizers.text.models.gpt_tokenizer import GPTTokenizer
        if library == "huggingface":
            _with_transformers()

        try:
            return GPTTokenizer(path, {"library": library}, **options)
        except (Exception, SystemExit) as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"--tokenizer-type {tokenizer_type} cannot be loaded from {path}: {first_line}") from error


_OF_TRANSFORMERS = tuple(
    f"megatron.core.tokenizers.text.libraries.{name}" for name in ("chat_template", "huggingface_tokenizer")
)
"""Modules of megatron-core that import transformers, if it is there, and say so in `HAVE_TRANSFORMERS`."""


@contextmanager
def _without_transformers() -> Iterator[None]:
    """megatron-core imports transformers, for two seconds, whatever the tokenizer: not within this."""
    if "transformers" in sys.modules:
        yield
        return
    hidden: Any = None
    sys.modules["transformers"] = hidden
    try:
        yield
    finally:
        del sys.modules["transformers"]


def _with_transformers() -> None:
    """Where megatron-core's modules were first imported without it, run them again."""
    for name in _OF_TRANSFORMERS:
        if not getattr(sys.modules.get(name), "HAVE_TRANSFORMERS", True):
            importlib.reload(sys.modules[name])


def _gpt2(vocab_file: str, merge_file: str) -> MegatronTokenizerText:
    with tempfile.TemporaryDirectory() as folder:  # transformers finds both files by name in a folder, without the hub
        shutil.copy(vocab_file, Path(folder, "vocab.json"))
        shutil.copy(merge_file, Path(folder, "merges.txt"))
        end = "<|endoftext|>"
        config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": end, "eos_token": end, "unk_token": end}
        Path(folder, "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = _load("GPT2BPETokenizer", "huggingface", folder, **_HUGGINGFACE)
    tokenizer.path = vocab_file  # part of the data index's cache key, so not the temporary folder's name
    return tokenizer
