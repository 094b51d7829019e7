"""Tokenizers by name, and the padded vocabulary. The packages of the extra `hf` are not needed."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixpipe.common.errors import UserError
from helixpipe.model.releases import text_tokenizer
from megatron.pretrain.config.vocabulary import padded_vocab_size
from megatron.pretrain.data.tokenizer import build_tokenizer
from megatron.pretrain.data.tokenizer_flags import TOKENIZER_TYPES


def test_bytes() -> None:
    tokenizer = build_tokenizer("ByteLevelTokenizer")
    assert tokenizer.tokenize("aé") == [97, 195, 169]
    assert tokenizer.detokenize([97, 195, 169]) == "aé"
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (512, 0, 1)
    assert build_tokenizer("ByteLevelTokenizer", vocab_size=256).vocab_size == 256


def test_numbers() -> None:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    assert tokenizer.tokenize("7 99") == [7, 99]
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)


@pytest.mark.parametrize("tokenizer_type", TOKENIZER_TYPES[2:])
def test_an_absent_package_is_named(tokenizer_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"--tokenizer-type {tokenizer_type} needs the package \w+.*not installed"):
        build_tokenizer(tokenizer_type, tokenizer_model="model")


@pytest.mark.parametrize(
    ("tokenizer_type", "options", "words"),
    [
        ("GPT2", {}, "--tokenizer-type GPT2 is unknown; valid are NullTokenizer, Byte"),
        ("NullTokenizer", {}, "needs --vocab-size"),
        ("ByteLevelTokenizer", {"vocab_size": 255}, "--vocab-size 255 is too small"),
        ("GPT2BPETokenizer", {}, "needs --vocab-file"),
        ("GPT2BPETokenizer", {"vocab_file": __file__}, "needs --merge-file"),
        ("Llama2Tokenizer", {}, "needs --tokenizer-model"),
        ("Llama2Tokenizer", {"tokenizer_model": "/none"}, "--tokenizer-model /none does not exist"),
        ("TikTokenizer", {"tokenizer_model": __file__}, "cannot be loaded from"),
    ],
)
def test_mistakes_are_told(
    tokenizer_type: str, options: dict[str, int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())  # as if every package were installed
    with pytest.raises(UserError, match=words) as caught:
        build_tokenizer(tokenizer_type, **options)
    assert "\n" not in str(caught.value)


@given(st.integers(1, 200_000), st.integers(1, 256), st.sampled_from([1, 2, 4, 8]))
def test_padding_is_the_least_multiple(vocab_size: int, divisor: int, tp: int) -> None:
    padded = padded_vocab_size(vocab_size, divisor, tp)
    assert padded % (divisor * tp) == 0
    assert vocab_size <= padded < vocab_size + divisor * tp


def test_a_release_without_a_class_for_gpt_has_one_for_all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer loads although the module that has GPT's class is missing, as in megatron-core 0.20."""
    tokens = build_tokenizer("ByteLevelTokenizer").tokenize("ab")
    monkeypatch.setitem(sys.modules, "megatron.core.tokenizers.text.models", None)
    monkeypatch.setitem(sys.modules, "megatron.core.tokenizers.text.models.gpt_tokenizer", None)
    assert build_tokenizer("ByteLevelTokenizer").tokenize("ab") == tokens
    assert text_tokenizer().__name__ == "MegatronTokenizerText"
