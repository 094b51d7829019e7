"""Datasets and microbatches from .bin/.idx files, in one process."""

from __future__ import annotations

import itertools
import multiprocessing
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from helixpipe.common.errors import DataError, UserError
from helixpipe.common.progress import ProgressLine
from helixpipe.model.options import Microbatch
from megatron.pretrain.data import datasets as datasets_module
from megatron.pretrain.data import indexed_files
from megatron.pretrain.data.datasets import Datasets, build_datasets
from megatron.pretrain.data.indexed_files import read_indexed_file
from megatron.pretrain.data.loading import batch_iterator
from megatron.pretrain.data.options import DataOptions, parse_blend, parse_split
from megatron.pretrain.data.samplers import MicrobatchSampler
from megatron.pretrain.data.tokenizer import build_tokenizer
from megatron.pretrain.feed.samples import SampleFeed
from tests.data.conftest import story
from tests.selection import graded

MakePair = Callable[..., str]
SEQ = 32
STORIES = [story(i, 40 + 17 * (i % 7)) for i in range(1, 61)]


def options(**changes: Any) -> DataOptions:
    return DataOptions(**{"seq_length": SEQ, "seed": 5, **changes})


def build(changes: DataOptions, samples: tuple[int, int, int] = (50, 8, 4), vocab_size: int = 256) -> Datasets:
    return build_datasets(changes, build_tokenizer("ByteLevelTokenizer", vocab_size=vocab_size), samples)


def samples_of(dataset: Any, count: int) -> list[list[int]]:
    return [dataset[i]["tokens"].tolist() for i in range(count)]


def test_samples_are_the_text_with_labels_shifted(make_pair: MakePair) -> None:
    prefix = make_pair("a", STORIES)
    datasets = build(options(data_path=[prefix], split="90,10"))
    assert datasets.test is None  # its share is 0
    text = b"".join(story.encode() + b"\0" for story in STORIES)
    for dataset, wanted in ((datasets.train, 50), (datasets.valid, 8)):
        assert dataset is not None and len(dataset) >= wanted
        for i in range(wanted):
            sample: dict[str, torch.Tensor] = dataset[i]
            assert set(sample) == {"tokens", "labels", "loss_mask", "position_ids"}  # no attention mask
            assert {name: tensor.dtype for name, tensor in sample.items()} == {
                "tokens": torch.int64,
                "labels": torch.int64,
                "loss_mask": torch.float32,
                "position_ids": torch.int64,
            }
            assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
            assert sample["position_ids"].tolist() == list(range(SEQ))
            assert sample["loss_mask"].tolist() == [1.0] * SEQ
            documents = bytes(sample["tokens"].tolist()).split(
                b"\0"
            )  # cut where documents meet: each part is in the text
            assert all(part in text for part in documents)


def test_splits_share_no_document(make_pair: MakePair) -> None:
    datasets = build(options(data_path=[make_pair("a", STORIES)], split="60,20,20"), (100, 100, 100))
    seen = []
    for dataset in datasets:
        words = b" ".join(bytes(tokens) for tokens in samples_of(dataset, 100)).replace(b"\0", b" ").split()
        seen.append({word for word in words if len(word) == 5})
    assert [max(int(word) for word in words) for words in seen] == [36, 48, 60]
    assert not seen[0] & seen[1] and not seen[1] & seen[2]


def test_eod_mask(make_pair: MakePair) -> None:
    prefix = make_pair("a", STORIES)
    plain, masked = (build(options(data_path=[prefix], eod_mask_loss=mask)).train for mask in (False, True))
    assert plain is not None and masked is not None
    assert samples_of(plain, 50) == samples_of(masked, 50)
    masks = [(masked[i]["tokens"], masked[i]["loss_mask"]) for i in range(50)]
    assert all(torch.equal(mask, (tokens != 0).float()) for tokens, mask in masks)
    assert any(0.0 in mask for _, mask in masks)


def test_rebuilding_gives_the_same_and_new_data_a_new_index(make_pair: MakePair, tmp_path: Path) -> None:
    prefix = make_pair("a", STORIES)
    cached = options(data_path=[prefix], data_cache_path=str(tmp_path / "cache"))
    first = samples_of(build(cached).train, 50)
    assert samples_of(build(cached).train, 50) == first
    assert len(list((tmp_path / "cache").iterdir())) == 1  # and no temporary folder is left
    make_pair("a", STORIES[::-1] + STORIES)  # preprocessed again under the same name
    again = build(cached).train
    assert samples_of(again, 50) != first
    assert len(list((tmp_path / "cache").iterdir())) == 2
    other_seed = options(data_path=[prefix], data_cache_path=str(tmp_path / "cache"), seed=6)
    assert samples_of(build(other_seed).train, 50) != samples_of(again, 50)


def test_blends(make_pair: MakePair) -> None:
    prefixes = [make_pair(name, [letter * 200] * 40) for name, letter in (("a", "A"), ("b", "B"))]
    weighted = build(options(data_path=["0.3", prefixes[0], "0.7", prefixes[1]], split="1"), (100, 0, 0)).train
    origins = [65 in tokens for tokens in samples_of(weighted, 100)]
    assert sum(origins) == 30
    assert sum(origins[:20]) == 6  # mixed throughout, not one after the other
    by_size = build(options(data_path=prefixes, split="1"), (100, 0, 0)).train
    assert sum(65 in tokens for tokens in samples_of(by_size, 100)) == 50
    with pytest.raises(DataError, match=r"training needs 10000 samples .* gives 502: put a weight"):
        build(options(data_path=prefixes, split="1"), (10000, 0, 0))


def test_a_path_for_each_split(make_pair: MakePair) -> None:
    train, valid = make_pair("a", ["A" * 200] * 9), make_pair("b", ["B" * 200] * 9)
    datasets = build(options(train_data_path=[train], valid_data_path=["1", valid]))
    for dataset, letter in ((datasets.train, 65), (datasets.valid, 66)):
        assert {token for tokens in samples_of(dataset, 8) for token in tokens} - {0} == {letter}
    assert datasets.test is None
    assert build(options(train_data_path=[train], valid_data_path=[valid]), (50, 0, 0)).valid is None


@pytest.mark.parametrize("name", ["ByteLevelTokenizer", "NullTokenizer"])
def test_mock_data_needs_no_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = build_tokenizer(name, vocab_size=300)
    datasets = [build_datasets(options(mock_data=True), tokenizer, (20, 10, 5)) for _ in range(2)]
    for one, other in zip(*datasets, strict=True):
        assert samples_of(one, 5) == samples_of(other, 5)
        assert all(0 <= token < tokenizer.vocab_size for tokens in samples_of(one, 5) for token in tokens)
    assert list(tmp_path.iterdir()) == []


def test_small_data_is_repeated_and_empty_splits_are_left_out(
    make_pair: MakePair, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = make_pair("a", [story(1, 100), story(2, 150)])
    datasets = build(options(data_path=[prefix]), (500, 10, 10))  # 969,30,1 of two documents
    assert datasets.train is not None and len(datasets.train) >= 500
    assert datasets.valid is None and datasets.test is None
    assert "no valid data: " in caplog.text and "has 2 documents" in caplog.text
    with pytest.raises(DataError, match=r"no training data: .* has 2 documents, and none"):
        build(options(data_path=[prefix], split="1,99"))


# ------------------------------------------------------------------------------------------------------- microbatches


@pytest.mark.parametrize("num_workers", [0, 2])
def test_microbatches_and_resume(make_pair: MakePair, num_workers: int) -> None:
    dataset = build(options(data_path=[make_pair("a", STORIES)])).train
    assert dataset is not None

    def take(consumed: int, dp_rank: int, dp_size: int, micro: int, count: int) -> list[Microbatch]:
        sampler = MicrobatchSampler(len(dataset), consumed, micro, dp_rank, dp_size)
        return list(itertools.islice(batch_iterator(dataset, sampler, Microbatch, num_workers=num_workers), count))

    def rows(batches: Iterable[Microbatch]) -> list[list[int]]:
        return [row for batch in batches for row in batch.tokens.tolist()]

    whole = take(0, 0, 1, 4, 4)
    assert [tuple(batch.tokens.shape) for batch in whole] == [(4, SEQ)] * 4
    assert all(batch.position_ids is not None and batch.loss_mask.dtype == torch.float32 for batch in whole)
    assert rows(take(8, 0, 1, 4, 2)) == rows(whole[2:])
    spread = [rows(take(0, rank, 2, 2, 4)) for rank in range(2)]
    assert sorted(spread[0] + spread[1]) == sorted(rows(whole))


def test_closing_ends_the_processes_that_load(make_pair: MakePair) -> None:
    """Also where somebody still has the iterator."""
    dataset = build(options(data_path=[make_pair("a", STORIES)])).train
    before = set(multiprocessing.active_children())
    train: Any = batch_iterator(dataset, MicrobatchSampler(50, 0, 2), Microbatch, num_workers=1)
    next(train)
    (loading,) = set(multiprocessing.active_children()) - before
    try:
        unused: Any = None
        SampleFeed(unused, unused, train).close()
        assert not loading.is_alive()
    finally:
        train.close()  # or this process would not end


def test_running_out_of_data_is_told(make_pair: MakePair) -> None:
    dataset = build(options(data_path=[make_pair("a", STORIES)])).train
    batches = batch_iterator(dataset, MicrobatchSampler(5, 0, 2), dict)
    assert len(list(itertools.islice(batches, 2))) == 2
    with pytest.raises(DataError, match="the data is used up"):
        next(batches)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_token_behind_those_that_are_looked_at_is_refused_when_it_comes(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    """A tensor-parallel embedding would take it for another rank's, and train."""
    prefix = make_pair("a", STORIES)
    monkeypatch.setattr(indexed_files, "_TOKENS_LOOKED_AT", 1)
    dataset = build(options(data_path=[prefix])).train
    assert dataset is not None
    worst = max(int(each["labels"].max()) for each in map(dataset.__getitem__, range(len(dataset))))
    for known in (worst + 1, worst):
        sampler = MicrobatchSampler(len(dataset), 0, 1)
        found = batch_iterator(dataset, sampler, Microbatch, num_workers=num_workers, vocab_size=known)
        refusal = f"holds token {worst}, but the tokenizer has tokens 0 to {worst - 1}"
        sentence = "is used up" if known > worst else refusal
        with pytest.raises(DataError, match=sentence):
            list(found)


# ------------------------------------------------------------------------------------------------------ broken files


def _patch(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as stream:
        stream.seek(offset)
        stream.write(data)


BREAKS: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "no idx": (lambda bin_, idx: idx.unlink(), r"a_text_document\.idx does not exist: a data path is the prefix"),
    "no bin": (lambda bin_, idx: bin_.unlink(), r"a_text_document\.bin does not exist"),
    "magic": (lambda bin_, idx: _patch(idx, 0, b"PK"), r"\.idx is not an index of Megatron's"),
    "empty idx": (lambda bin_, idx: idx.write_bytes(b""), r"\.idx is not an index"),
    "header": (lambda bin_, idx: idx.write_bytes(idx.read_bytes()[:20]), r"\.idx is truncated: 20 bytes"),
    "version": (lambda bin_, idx: _patch(idx, 9, b"\x02"), r"\.idx has version 2; only version 1"),
    "type": (lambda bin_, idx: _patch(idx, 17, b"\x63"), r"\.idx has token type 99"),
    "short idx": (lambda bin_, idx: idx.write_bytes(idx.read_bytes()[:-9]), r"\.idx is truncated: \d+ bytes of \d+"),
    "long idx": (lambda bin_, idx: idx.write_bytes(idx.read_bytes() + b"0"), r"\.idx has \d+ bytes instead of"),
    "count": (lambda bin_, idx: _patch(idx, 18, struct.pack("<Q", 1 << 40)), r"\.idx is truncated"),
    "length": (lambda bin_, idx: _patch(idx, 34, struct.pack("<i", -1)), r"\.idx is corrupt"),
    "short bin": (lambda bin_, idx: bin_.write_bytes(bin_.read_bytes()[:-2]), r"\.bin is truncated: \d+ bytes of the"),
    "empty bin": (lambda bin_, idx: bin_.write_bytes(b""), r"\.bin is truncated: 0 bytes"),
    "long bin": (lambda bin_, idx: bin_.write_bytes(bin_.read_bytes() + b"00"), r"they are of two runs"),
    "vocabulary": (
        lambda bin_, idx: _patch(bin_, 10, b"\xff\xff"),
        r"holds token 65535, but the tokenizer has tokens 0 to 255",
    ),
}


@pytest.mark.parametrize("name", graded(list(BREAKS), ("magic", "header", "length", "short bin", "vocabulary")))
def test_broken_files_are_told_in_one_sentence(name: str, make_pair: MakePair) -> None:
    prefix = make_pair("a", STORIES)
    breaking, words = BREAKS[name]
    breaking(Path(prefix + ".bin"), Path(prefix + ".idx"))
    with pytest.raises(DataError, match=words) as caught:
        build(options(data_path=[prefix]))
    assert "\n" not in str(caught.value)


def test_a_file_name_instead_of_a_prefix(make_pair: MakePair) -> None:
    with pytest.raises(DataError, match=r"give the prefix '.*a_text_document', without \.bin"):
        read_indexed_file(make_pair("a", STORIES) + ".bin")


def test_the_index_folder_must_be_writable(make_pair: MakePair, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="set --data-cache-path"):
        build(options(data_path=[make_pair("a", STORIES)], data_cache_path=str(tmp_path / "file")))


def test_building_indices_tells_how_far_it_is(
    make_pair: MakePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each file and split and of their blends; indices that are there already are not told of."""
    told: list[tuple[str, int, int]] = []

    class Told(ProgressLine):
        @contextmanager
        def parts(self, of: int) -> Iterator[Callable[[], None]]:
            built: list[None] = []
            yield lambda: built.append(None)
            told.append((self._what, len(built), of))

    monkeypatch.setattr(datasets_module, "ProgressLine", Told)
    pairs = ["1", make_pair("a", STORIES), "2", make_pair("b", STORIES)]
    for given, parts in ((pairs, 3), (pairs[1:2], 1)):
        cached = options(data_path=given, split="1,0,0", data_cache_path=str(tmp_path / "cache"))
        build(cached)
        build(cached)
        assert told.pop() == ("building data indices", parts, parts) and not told


def test_an_index_killed_half_way_is_not_used(make_pair: MakePair, tmp_path: Path) -> None:
    """Whatever a killed run leaves in its temporary folder, the next run builds its own."""
    cached = options(data_path=[make_pair("a", STORIES)], data_cache_path=str(tmp_path / "cache"))
    first = samples_of(build(cached).train, 50)
    (made,) = (tmp_path / "cache").iterdir()
    shutil.move(made, made.with_name(".half"))
    for path in made.with_name(".half").glob("*.npy"):
        path.write_bytes(path.read_bytes()[:100])
    assert samples_of(build(cached).train, 50) == first


# ------------------------------------------------------------------------------------------------------------- flags


def test_blend_and_split_values(tmp_path: Path) -> None:
    assert parse_blend("--data-path", ["A"]) == (["A"], None)
    assert parse_blend("--data-path", ["A", "B"]) == (["A", "B"], None)
    assert parse_blend("--data-path", ["30", "A", "70", "B"]) == (["A", "B"], [30.0, 70.0])
    (tmp_path / "2024.idx").touch()
    assert parse_blend("--data-path", [f"{tmp_path}/2024", "B"]) == ([f"{tmp_path}/2024", "B"], None)
    numpy.testing.assert_allclose(parse_split("969, 30, 1"), [0.969, 0.03, 0.001])
    assert parse_split("1") == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("words", [["0.3", "A", "B"], ["0.3", "A", "B", "C"], ["0", "A", "1", "B"], ["-1", "A"]])
def test_wrong_blends_are_told(words: list[str]) -> None:
    with pytest.raises(UserError, match=r"--data-path .*: (give prefixes only|every weight must be)"):
        parse_blend("--data-path", words)


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan,1"])
def test_wrong_splits_are_told(split: str) -> None:
    with pytest.raises(UserError, match="give up to three shares"):
        parse_split(split)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "exactly one of --data-path"),
        ({"data_path": ["A"], "mock_data": True}, "exactly one of --data-path"),
        ({"valid_data_path": ["A"]}, "need --train-data-path"),
        ({"mock_data": True, "split": "1,1,1"}, "--split 1,1,1 divides --data-path, which is not given"),
        ({"mock_data": True, "num_workers": -1}, "--num-workers -1"),
        ({"mock_data": True, "seq_length": 0}, "--seq-length 0"),
        ({"mock_data": True, "dataloader_type": "external"}, "valid are single, cyclic"),
    ],
)
def test_contradicting_flags_are_told(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        options(**changes)


def test_options_from_flags_and_argument_files(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("0.3 A\n0.7 B\n")
    (tmp_path / "splits.json").write_text('{"train": ["0.5", "A", 0.5, "B"], "valid": ["C"], "test": null}')
    flags = SimpleNamespace(data_path=None, data_args_path=str(tmp_path / "words"), num_workers=7, unrelated=1)
    read = DataOptions.from_flags(flags, seq_length=8, seed=1)
    assert (read.data_path, read.num_workers) == (["0.3", "A", "0.7", "B"], 7)
    flags = SimpleNamespace(per_split_data_args_path=str(tmp_path / "splits.json"))
    read = DataOptions.from_flags(flags, seq_length=8, seed=1)
    assert (read.train_data_path, read.valid_data_path, read.test_data_path) == (["0.5", "A", "0.5", "B"], ["C"], None)
    flags.per_split_data_args_path = str(tmp_path / "words")
    with pytest.raises(UserError, match="must hold a JSON object"):
        DataOptions.from_flags(flags, seq_length=8, seed=1)
