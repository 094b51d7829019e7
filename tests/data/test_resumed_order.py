"""The samples of a run that resumes another: none is trained twice within an epoch, and none is left out."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from helixpipe.common.errors import CheckpointError
from megatron.pretrain.checkpoint.resumed import check_identities
from megatron.pretrain.data.datasets import build_datasets, index_counts
from megatron.pretrain.data.options import DataOptions, order_facts
from megatron.pretrain.data.tokenizer import build_tokenizer
from megatron.pretrain.feed.samples import samples_asked_for
from tests.data.conftest import write_lines
from tools.preprocess_data import parse_arguments, preprocess

TOKENIZER = build_tokenizer("NullTokenizer", vocab_size=1000)
FILES = {"a": range(40), "b": range(100, 112), "c": range(200, 263)}
"""Document `number` of a file consists of that number, 5 to 29 times."""


def length_of(number: int) -> int:
    return 5 + number * 7 % 25


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("numbers")
    for name, numbers in FILES.items():
        source = write_lines(folder / f"{name}.jsonl", [" ".join([str(i)] * length_of(i)) for i in numbers])
        words = ["--input", str(source), "--output-prefix", str(folder / name), "--tokenizer-type", "NullTokenizer"]
        preprocess(parse_arguments([*words, "--vocab-size", "1000"]))
    return folder


def paths(folder: Path, *words: str) -> list[str]:
    return [str(folder / f"{word}_text_document") if word in FILES else word for word in words]


def tokens(dataset: Any) -> list[list[int]]:
    return [dataset[i]["tokens"].tolist() for i in range(len(dataset))]


def of_megatron(options: DataOptions, samples: tuple[int, int, int]) -> list[Any]:
    """megatron-core's own datasets, as Megatron-LM asks for them."""
    words = list(options.data_path or ())
    blend = (words, None) if len(words) == 1 else (words[1::2], [float(word) for word in words[::2]])
    config = GPTDatasetConfig(
        random_seed=options.seed, sequence_length=options.seq_length, blend=blend, split=options.split,
        path_to_cache=options.data_cache_path, tokenizer=TOKENIZER, reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
        mid_level_dataset_surplus=options.mid_level_dataset_surplus,
    )  # fmt: skip
    config.path_to_cache = None if len(words) > 1 else config.path_to_cache  # of a blend it asks for the rank
    return list(BlendedMegatronDatasetBuilder(GPTDataset, list(samples), lambda: True, config).build())


DATA = st.sampled_from([("a",), ("b",), ("0.3", "a", "0.7", "c"), ("1", "b", "4", "c", "2", "a")])


@settings(max_examples=25, deadline=None)
@given(
    words=DATA,
    seq_length=st.integers(3, 90),
    seed=st.integers(0, 2**32 - 1),
    split=st.sampled_from(["100,0,0", "60,30,10"]),
    runs=st.lists(st.tuples(st.integers(1, 150), st.integers(0, 20), st.integers(0, 4)), min_size=2, max_size=4),
)
def test_a_longer_run_goes_on_in_the_order_of_the_one_before(
    folder: Path, words: tuple[str, ...], seq_length: int, seed: int, split: str, runs: list[tuple[int, int, int]]
) -> None:
    options = DataOptions(
        seq_length, seed=seed, data_path=paths(folder, *words), split=split, data_cache_path=str(folder / "cache")
    )
    counts: tuple[Any, ...] = ()
    before: list[list[list[int]]] = [[], [], []]
    for number, samples in enumerate(runs):
        datasets = build_datasets(options, TOKENIZER, samples, earlier=counts)
        counts = index_counts(counts, samples, "single")
        now = [[] if each is None else tokens(each) for each in datasets]
        for own, old, wanted, index in zip(now, before, samples, (0, 1, 2), strict=True):
            assert own[: len(old)] == old
            assert len(own) >= wanted or not own  # a small split has no sample
            if number == 0 and own:
                assert own == tokens(of_megatron(options, samples)[index])
        before = now
    if len(words) == 1 and split == "100,0,0":
        check_epochs(before[0], FILES[words[0]], seq_length, len(counts))


def check_epochs(samples: list[list[int]], numbers: range, seq_length: int, indices: int) -> None:
    """Every token comes once an epoch, but for those at the end of an index that fill no sample."""
    counted = Counter(token for sample in samples for token in sample)
    size = sum(map(length_of, numbers))
    epochs = -(-sum(counted.values()) // size)
    missing = {i: epochs * length_of(i) - counted[i] for i in numbers}
    assert min(missing.values()) >= 0
    assert sum(missing.values()) <= indices * seq_length


def test_epochs_that_never_end_keep_the_first_count(folder: Path) -> None:
    options = DataOptions(8, data_path=paths(folder, "0.3", "a", "0.7", "c"), dataloader_type="cyclic")
    first, second = (
        build_datasets(options, TOKENIZER, samples, earlier=earlier).train
        for samples, earlier in (((30, 0, 0), ()), ((90, 0, 0), [(30, 0, 0)]))
    )
    assert tokens(first) == tokens(second)


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 5), st.integers(0, 7))
def test_what_an_older_checkpoint_had_asked_for_is_worked_out(batch: int, steps: int, every: int, evals: int) -> None:
    saved = {"global_batch_size": batch, "train_iters": steps, "eval_interval": every, "eval_iters": evals}
    expected = (batch * steps, (steps // every + 1) * evals * batch, evals * batch)
    assert samples_asked_for(saved) == (expected,)
    assert samples_asked_for({**saved, "train_samples": batch * steps + batch - 1}) == (expected,)
    assert samples_asked_for({**saved, "global_batch_size": None}) == samples_asked_for({}) == ()


# ------------------------------------------------------------------------------------------------------ other flags

OTHERS: dict[str, Any] = {
    "seq_length": 16, "seed": 7, "split": "50,50,0", "dataloader_type": "cyclic", "reset_position_ids": True,
    "reset_attention_mask": True, "eod_mask_loss": True, "sft": True, "variable_seq_lengths": True,
    "mid_level_dataset_surplus": 0.1, "mock_data": True,
}  # fmt: skip
WITH_SFT: dict[str, Any] = {"sft_tokenizer_prompt_format": "identity", "long_documents": "skip"}
NEVER: dict[str, Any] = {
    "data_cache_path": "elsewhere", "num_workers": 0, "mmap_bin_files": False, "num_dataset_builder_threads": 3,
    "max_tokens": 9,
}  # fmt: skip
BEFORE: dict[str, Any] = {"seq_length": 32, "seed": 1234, "data_path": ["a"], "split": None}


def test_each_option_of_the_data_is_compared_or_known_not_to_matter() -> None:
    paths_of_data = {"data_path", "train_data_path", "valid_data_path", "test_data_path"}  # by their content
    known = {*OTHERS, *WITH_SFT, *NEVER, *paths_of_data}
    assert known == {field.name for field in dataclasses.fields(DataOptions)}
    assert set(order_facts({**BEFORE, "sft": True})) == {*OTHERS, *WITH_SFT}


@given(st.dictionaries(st.sampled_from([*OTHERS, *WITH_SFT, *NEVER]), st.just(None)), st.booleans())
def test_what_changes_the_order_is_refused_by_its_flag(names: dict[str, None], sft: bool) -> None:
    before = {**BEFORE, "sft": sft}
    changed = {name: {**OTHERS, **WITH_SFT, **NEVER}[name] for name in names}
    now = {**before, **changed}
    matters = {name for name in names if name in OTHERS and now[name] != before.get(name)}
    matters |= {name for name in names if name in WITH_SFT and sft}
    if not matters - ({"split"} if now.get("mock_data") else set()):
        return check_identities(before, now, (), "saved")
    with pytest.raises(CheckpointError) as caught:
        check_identities(before, now, (), "saved")
    assert all(f"--{name.replace('_', '-')}" in str(caught.value) for name in matters)
    assert not any(f"--{name.replace('_', '-')} " in str(caught.value) for name in NEVER)
    assert str(caught.value).endswith("--resume-with-other data.")
    check_identities(before, now, ("data",), "saved")
    check_identities(before, {**now, "skip_train": True}, (), "saved")  # which trains nothing
    return None


def test_a_checkpoint_of_megatron_lm_has_the_same_facts() -> None:
    theirs = {"seq_length": 32, "seed": 1234, "split": "969, 30, 1", "sft": False, "dataloader_type": "single"}
    own = {**BEFORE, "split": "969,30,1", "long_documents": "truncate"}
    check_identities({**theirs, "sft_tokenizer_prompt_format": "nemotron-h-aligned"}, own, (), "saved")
    check_identities({"num_layers": 2}, own, (), "saved")  # which says nothing of its data
