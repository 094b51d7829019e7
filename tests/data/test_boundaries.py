"""Where documents end in samples of equal length: as megatron-core has it, on every rank that asks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

from helixpipe.common.errors import DataError
from helixpipe.model import Microbatch
from megatron.pretrain.data.datasets import build_datasets
from megatron.pretrain.data.loading import Isolation, batch_iterator, document_lengths
from megatron.pretrain.data.options import DataOptions
from megatron.pretrain.data.samplers import MicrobatchSampler
from megatron.pretrain.data.tokenizer import build_tokenizer
from tests.data.conftest import story

MakePair = Callable[..., str]
EOD = 0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=24))
def test_lengths_say_what_megatron_cores_masks_say(tokens: list[int]) -> None:
    """Also with documents of an end-of-document token alone, and with one at the very end."""
    mask, _, positions = _get_ltor_masks_and_position_ids(torch.tensor(tokens), EOD, True, True, False, True)
    lengths = document_lengths(positions.numpy())
    assert sum(lengths) == len(tokens)
    assert positions.tolist() == [position for length in lengths for position in range(length)]
    blocks = torch.block_diag(*(torch.ones(length, length).tril() for length in lengths))
    torch.testing.assert_close(mask[0], blocks < 0.5)
    ends = list(itertools.accumulate(lengths))[:-1]
    assert all(tokens[end - 1] == EOD for end in ends)  # it belongs to the document that it ends


def batches(prefix: str, isolation: Isolation, num_workers: int = 0, consumed: int = 0, **how: Any) -> list[Microbatch]:
    flags = {"reset_attention_mask": isolation.attention, "reset_position_ids": isolation.positions}
    options = DataOptions(32, 5, data_path=[prefix], split="1", **flags)
    dataset = build_datasets(options, build_tokenizer("ByteLevelTokenizer"), (24, 0, 0)).train
    assert dataset is not None
    sampler = MicrobatchSampler(24, consumed, 3)
    found = batch_iterator(dataset, sampler, Microbatch, num_workers=num_workers, isolation=isolation, **how)
    return list(itertools.islice(found, 4))


def bounds(found: list[Microbatch]) -> list[tuple[tuple[int, ...], ...]]:
    return [batch.documents.lengths for batch in found if batch.documents is not None]


@pytest.fixture
def prefix(make_pair: MakePair) -> str:
    # A byte 1, which is the padding token, becomes a 0 in what megatron-core hands out: no end of a document.
    return make_pair("a", [story(i, 5 + 7 * (i % 9)).replace("0", "\x01", 1) for i in range(60)])


def test_each_sample_of_a_microbatch_has_its_own(prefix: str) -> None:
    apart = batches(prefix, Isolation(attention=True, positions=True))
    known = {story(i, 5 + 7 * (i % 9)).replace("0", "\x00", 1).encode() + b"\0" for i in range(60)}
    for batch in apart:
        assert batch.documents is not None and len(batch.documents.lengths) == 3
        for tokens, positions, lengths in zip(batch.tokens, batch.position_ids, batch.documents.lengths, strict=True):
            assert positions.tolist() == [position for length in lengths for position in range(length)]
            ends = list(itertools.accumulate(lengths))
            assert ends[-1] == 32
            for begin, end in itertools.pairwise(ends):
                assert end == 32 or bytes(tokens[begin:end].tolist()) in known
    assert len({lengths for batch in apart for lengths in batch.documents.lengths}) > 4


def test_each_flag_alone_and_in_loader_processes(prefix: str) -> None:
    both = batches(prefix, Isolation(attention=True, positions=True))
    attention, positions = (batches(prefix, Isolation(*which)) for which in ((True, False), (False, True)))
    for one, two, three in zip(both, attention, positions, strict=True):
        assert one.documents.lengths == two.documents.lengths and three.documents is None
        assert two.position_ids.tolist() == [list(range(32))] * 3
        assert torch.equal(three.position_ids, one.position_ids)
        assert torch.equal(one.tokens, two.tokens)
    resumed = batches(prefix, Isolation(attention=True), num_workers=1, consumed=6)
    assert bounds(resumed[:2]) == bounds(both[2:])
    assert batches(prefix, Isolation())[0].documents is None


def test_ranks_without_tokens_get_boundaries_alone(prefix: str) -> None:
    whole = batches(prefix, Isolation(attention=True))
    middle = batches(prefix, Isolation(attention=True), whole=False)
    assert bounds(middle) == bounds(whole)
    assert all(each.numel() == 0 for batch in middle for each in (batch.tokens, batch.labels, batch.loss_mask))


def test_data_and_tokenizers_without_ends_are_told(
    make_pair: MakePair, prefix: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches(prefix, Isolation(attention=True))
    assert "no end-of-document token" not in caplog.text
    joined = make_pair("b", [story(i, 90) for i in range(9)], eod=False)
    batches(joined, Isolation())
    assert "no end-of-document token" not in caplog.text
    batches(joined, Isolation(attention=True))
    assert "b_text_document.bin has no end-of-document token (0) among its first 810" in caplog.text
    assert "--reset-attention-mask finds no documents in it: preprocess it with --append-eod" in caplog.text

    tokenizer = build_tokenizer("ByteLevelTokenizer")
    monkeypatch.setattr(type(tokenizer), "eod", property(lambda self: None))
    options = DataOptions(32, data_path=[prefix], eod_mask_loss=True)
    with pytest.raises(DataError, match="--eod-mask-loss needs a tokenizer with an end-of-document token"):
        build_datasets(options, tokenizer, (9, 0, 0))


def test_lengths_are_numbers_of_the_host() -> None:
    assert all(type(length) is int for length in document_lengths(numpy.array([0, 1, 0, 0, 1, 2])))
