"""Tokenizers by Megatron's --tokenizer-type, all of them megatron-core's.

NullTokenizer (whitespace-separated numbers) and ByteLevelTokenizer (UTF-8 bytes, end of document 0, padding 1, 512
entries by default) need nothing. The others need a package of their own (`transformers` is the extra `hf`) and local
files: nothing is downloaded for GPT2BPETokenizer, for which megatron-core itself would ask the Hugging Face hub even
with both files at hand.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helixpipe.common.errors import UserError
from helixpipe.model.releases import null_tokenizer, text_tokenizer
from megatron.pretrain.data.tokenizer_flags import GPT2_END, TokenizerFlags

if TYPE_CHECKING:
    from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText


_HUGGINGFACE = {"use_fast": True, "include_special_tokens": False}
"""Options of every such tokenizer; their defaults are others from release to release."""


def build_tokenizer(tokenizer_type: str, **flags: Any) -> MegatronTokenizerText:
    """Build the tokenizer: `tokenize(text)`, `detokenize(ids)`, `vocab_size`, `eod`, `unique_identifiers`.

    flags: the other fields of `TokenizerFlags`.

    Raises UserError when the type is unknown, its files are not given or not readable, or its package is not installed.
    """
    chosen = TokenizerFlags(tokenizer_type, **flags)
    chosen.check()
    size = {} if chosen.vocab_size is None else {"vocab_size": chosen.vocab_size}
    with chosen.loading():
        if chosen.library == "null":
            with _quickly_imported():
                name, options = null_tokenizer(chosen.vocab_size or 0)
            return _load(name, None, **options)
        if chosen.library == "byte-level":
            return _load(chosen.library, None, **size)
        if tokenizer_type == "GPT2BPETokenizer":
            return _gpt2(str(chosen.vocab_file), str(chosen.merge_file))
        if tokenizer_type == "HuggingFaceTokenizer":
            return _load(chosen.library, chosen.path, trust_remote_code=False, **_HUGGINGFACE)
        if tokenizer_type == "TikTokenizer":
            special = {
                "pattern": chosen.tiktoken_pattern,
                "num_special_tokens": chosen.tiktoken_num_special_tokens,
            }
            return _load(chosen.library, chosen.path, **special, **size)
        return _load(chosen.library, chosen.path)


def tokenizer_of(data: Any) -> MegatronTokenizerText:
    """Return the tokenizer of the flags `data`, which determine the model's vocabulary. Raises UserError as
    `build_tokenizer` does, and for one with more tokens than the model has.
    """
    tokenizer = build_tokenizer(**vars(TokenizerFlags.of(data)))
    if tokenizer.vocab_size > data.padded_vocab_size:
        raise UserError(
            f"--tokenizer-type {data.tokenizer_type} has {tokenizer.vocab_size} tokens, more than the model's "
            f"{data.padded_vocab_size}: leave --vocab-size and --padded-vocab-size out, or give at least as many."
        )
    return tokenizer


def _load(library: str, path: str | None, **options: Any) -> MegatronTokenizerText:
    with _quickly_imported(transformers=library == "huggingface"):
        tokenizer = text_tokenizer()
    if library == "huggingface":
        _with_transformers()
    return tokenizer(path, {"library": library}, **options)


_OF_TRANSFORMERS = tuple(
    f"megatron.core.tokenizers.text.libraries.{name}" for name in ("chat_template", "huggingface_tokenizer")
)
"""Modules of megatron-core that import transformers, if it is there, and say so in `HAVE_TRANSFORMERS`."""


@contextmanager
def _quickly_imported(transformers: bool = False) -> Iterator[None]:
    """Import megatron-core, and keep it from importing transformers in the context, which takes two seconds."""
    from helixpipe.model.device import prepare

    prepare()
    if transformers or "transformers" in sys.modules:
        yield
        return
    hidden: Any = None
    sys.modules["transformers"] = hidden
    try:
        yield
    finally:
        del sys.modules["transformers"]


def _with_transformers() -> None:
    """Reload megatron-core's modules if they were first imported when transformers was not installed."""
    for name in _OF_TRANSFORMERS:
        if not getattr(sys.modules.get(name), "HAVE_TRANSFORMERS", True):
            importlib.reload(sys.modules[name])


def _gpt2(vocab_file: str, merge_file: str) -> MegatronTokenizerText:
    with tempfile.TemporaryDirectory() as folder:  # transformers finds both files by name in a folder, without the hub
        shutil.copy(vocab_file, Path(folder, "vocab.json"))
        shutil.copy(merge_file, Path(folder, "merges.txt"))
        config = {
            "tokenizer_class": "GPT2Tokenizer",
            **dict.fromkeys(("bos_token", "eos_token", "unk_token"), GPT2_END),
        }
        Path(folder, "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = _load("huggingface", folder, **_HUGGINGFACE)
    tokenizer.path = vocab_file  # part of the data index's cache key, so not the temporary folder's name
    return tokenizer
