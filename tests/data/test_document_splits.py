"""Whole documents of .bin/.idx pairs: splits, blends, and files that have none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from helixpipe.common.errors import DataError
from megatron.pretrain.data.datasets import build_datasets
from megatron.pretrain.data.document_files import IndexedDocuments
from megatron.pretrain.data.document_splits import Orders, build_orders, build_stream
from megatron.pretrain.data.documents import DocumentStream
from megatron.pretrain.data.indexed_files import read_indexed_file
from megatron.pretrain.data.options import DataOptions
from megatron.pretrain.data.tokenizer import build_tokenizer
from tests.data.conftest import story

MakePair = Callable[..., str]
TOKENIZER = build_tokenizer("ByteLevelTokenizer")
STORIES = [story(i, 10 + 17 * (i % 7)) for i in range(1, 61)]


def orders(**changes: Any) -> Orders:
    return build_orders(DataOptions(**{"seq_length": 200, "seed": 5, **changes}), TOKENIZER)


def texts(stream: DocumentStream, steps: int) -> list[str]:
    """Of each document its tokens, with the last label."""
    found = []
    for step in range(steps):
        documents = stream.step(step)
        for number in range(len(documents.places)):
            read = stream.read(documents, number)
            found.append(bytes([*read.tokens.tolist(), int(read.labels[-1])]).decode())
    return found


@pytest.mark.parametrize("mapped", [True, False])
def test_documents_are_read_whole_in_the_splits_of_samples(
    make_pair: MakePair, capsys: pytest.CaptureFixture[str], mapped: bool
) -> None:
    prefix = make_pair("a", STORIES)
    options = DataOptions(200, 5, data_path=[prefix], split="60,20,20", mmap_bin_files=mapped)
    found = build_orders(options, TOKENIZER)
    assert capsys.readouterr().out == " > train: 36 documents\n > valid: 12 documents\n > test: 12 documents\n"
    for order, begin, end in zip(found, (0, 36, 48), (36, 48, 60), strict=True):
        assert order is not None and order.round_size == end - begin
        stream = build_stream(order, options, TOKENIZER, end - begin)
        assert sorted(texts(stream, 1)) == sorted(text + "\0" for text in STORIES[begin:end])
    samples = build_datasets(options, TOKENIZER, (9, 9, 9))
    for order, dataset in zip(found, samples, strict=True):
        own = {place.document for place, _ in order.places(0, order.round_size)}
        assert own == set(dataset.indices.tolist())  # the same documents


def test_a_path_for_each_split_and_blends(make_pair: MakePair) -> None:
    one, two = make_pair("a", ["A" * 30] * 9), make_pair("b", ["B" * 30] * 5)
    options = DataOptions(
        20, train_data_path=["1", one, "3", two], valid_data_path=[two, one], long_documents="truncate"
    )
    found = build_orders(options, TOKENIZER)
    assert found.test is None and found.train is not None and found.valid is not None
    trained = texts(build_stream(found.train, options, TOKENIZER, 14), 10)
    assert set(trained) == {"A" * 21, "B" * 21}  # truncated, the last label is the text's
    assert sum(text[0] == "B" for text in trained) / len(trained) == pytest.approx(0.75, abs=0.05)
    assert sorted(texts(build_stream(found.valid, options, TOKENIZER, 14), 1)) == ["A" * 21] * 9 + ["B" * 21] * 5


def test_the_flags_say_how_large_a_step_is_and_what_is_masked(make_pair: MakePair) -> None:
    options = DataOptions(200, data_path=[make_pair("a", ["a\0b"] * 9)], split="1", max_tokens=11, eod_mask_loss=True)
    order = build_orders(options, TOKENIZER).train
    assert order is not None
    stream = build_stream(order, options, TOKENIZER, 4, first_step=5, consumed=2)
    assert stream.lengths(5) == (3, 3, 3) and stream.consumed(6) == 5
    assert stream.read(stream.step(5), 0).loss_mask.tolist() == [1, 0, 1]


def test_several_sequences_can_be_one_document(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=numpy.uint16)
    builder.add_document([1, 2, 3, 4, 5], [2, 3])
    builder.add_document([6, 7], [2])
    builder.finalize(str(tmp_path / "a.idx"))
    documents = IndexedDocuments(read_indexed_file(str(tmp_path / "a")))
    assert documents.lengths.tolist() == [5, 2]
    assert [documents.read(number, 4).tokens.tolist() for number in (0, 1)] == [[1, 2, 3, 4], [6, 7]]
    known = replace(documents, vocab_size=7)
    assert known.read(0, 4).tokens.tolist() == [1, 2, 3, 4]
    with pytest.raises(DataError, match=r"a\.bin holds token 7, but the tokenizer has tokens 0 to 6"):
        known.read(1, 4)


def test_mock_documents(capsys: pytest.CaptureFixture[str]) -> None:
    options = DataOptions(100, mock_data=True, variable_seq_lengths=True)
    found = [build_orders(options, TOKENIZER) for _ in range(2)]
    assert "truncated" in capsys.readouterr().out
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None
        streams = [build_stream(order, options, TOKENIZER, 9) for order in (one, other)]
        assert streams[0].step(3) == streams[1].step(3)
        assert streams[0].read(streams[0].step(3), 4).labels.max() < TOKENIZER.vocab_size


def test_data_without_documents_is_told(make_pair: MakePair, caplog: pytest.LogCaptureFixture) -> None:
    joined = make_pair("joined", ["a" * 500])
    with pytest.raises(
        DataError, match="joined_text_document is one document of 501 tokens, more than --seq-length 200: an"
    ):
        orders(data_path=[joined], split="1")
    few = make_pair("few", ["aaa", "b"], eod=False)
    with pytest.raises(DataError, match=r"no training data: .*few_text_document has no document for it .0 documents"):
        orders(data_path=[few], split="1,99")
    found = orders(data_path=[few], split="50,50")  # the second document has a single token
    assert found.train is not None and found.valid is None
    assert "no valid data: " in caplog.text and "1 without two tokens left out" in caplog.text
    with pytest.raises(DataError, match="--split 0,1 leaves nothing for training"):
        orders(data_path=[few], split="0,1")
    with pytest.raises(DataError, match="has 1 documents of more than --seq-length 20 tokens"):
        orders(data_path=[make_pair("long", ["a" * 20, "a" * 21])], split="1", seq_length=20, long_documents="refuse")
