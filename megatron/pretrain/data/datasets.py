"""Training, validation and test data: megatron-core's GPTDataset behind Megatron's data flags.

Every pipeline rank that needs tokens reads them itself; nothing is broadcast. The index of a dataset (which documents
make up sample i) is built once, by rank 0, in a temporary folder that is renamed into the cache when complete, and is
then mapped by every rank. The folder's name is a digest of everything the index depends on, the .idx files' content
included: neither a run killed half-way nor data preprocessed again under the same name can leave a wrong index behind,
both of which megatron-core's own cache would use. Whatever fails, on whichever rank, is raised on all of them.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch.utils.data import ConcatDataset, Dataset

from helixpipe.common.errors import DataError
from helixpipe.common.progress import ProgressLine
from megatron.pretrain.data.boundaries import check_boundaries, end_of_document
from megatron.pretrain.data.cache import made_once
from megatron.pretrain.data.document_splits import build_orders, padded
from megatron.pretrain.data.indexed_files import IndexedFile, check_vocabulary, read_indexed_file
from megatron.pretrain.data.options import DEFAULT_SPLIT, Blend, DataOptions, SplitSource, split_sources
from megatron.pretrain.data.together import AllRanks

logger = logging.getLogger(__name__)

Counts = tuple[int, int, int]
"""Samples of train, validation and test."""


class Datasets(NamedTuple):
    """The dataset of each split; None if no samples are needed, the data has none, or this rank reads none."""

    train: Dataset[dict[str, torch.Tensor]] | None
    valid: Dataset[dict[str, torch.Tensor]] | None
    test: Dataset[dict[str, torch.Tensor]] | None


def index_counts(earlier: Sequence[Counts], samples: Counts, dataloader_type: str) -> tuple[Counts, ...]:
    """Return the counts of the runs that made the order, with this run's if it needs more samples.

    megatron-core shuffles all epochs of an index together, so an index for another count has another order. A resumed
    run therefore keeps the counts of the runs before it.

    Args:
        earlier: counts of the runs that this one resumes, oldest first.
        samples: counts that this run needs.
        dataloader_type: with `cyclic` the training samples are read in endless epochs, so the first count stays.

    Returns:
        Counts that never fall from one entry to the next; the last is enough for this run.
    """
    if not earlier:
        return (samples,)
    train, valid, test = (max(before, now) for before, now in zip(earlier[-1], samples, strict=True))
    if dataloader_type == "cyclic":
        train = earlier[-1][0] or train
    grown = (train, valid, test)
    return tuple(earlier) if grown == earlier[-1] else (*earlier, grown)


def build_datasets(
    options: DataOptions,
    tokenizer: Any,
    samples: Counts,
    *,
    earlier: Sequence[Counts] = (),
    needed_here: bool = True,
) -> Datasets:
    """Build the three splits with at least `samples` samples each (validation may have fewer in a blend by size).

    Collective: call it on every rank when torch.distributed is initialised. A sample is a dict of `tokens`, `labels`,
    `position_ids` (int64) and `loss_mask` (float32), each [seq_length]; labels are the tokens that follow. With
    `options.sft` a sample is one conversation, in epochs that are shuffled anew.

    Args:
        tokenizer: as `build_tokenizer` makes it; its `eod`, `pad`, `vocab_size` and `unique_identifiers` are used.
        samples: samples the run reads of train, valid, test; a split with 0 is not built.
        earlier: counts of the runs that this one resumes, oldest first (`index_counts`). The samples of the first come
            in megatron-core's order for it; each later count appends epochs shuffled by themselves.
        needed_here: False on ranks that read no tokens: they take part and get three Nones.

    Raises:
        DataError: on every rank, when files are missing or corrupt, do not fit the tokenizer, hold too little, or the
            index cannot be written.
    """
    *earlier, samples = index_counts(earlier, samples, options.dataloader_type)
    if options.sft:
        orders = build_orders(options, tokenizer)
        eod = end_of_document(tokenizer) if options.eod_mask_loss else None
        return Datasets(
            *(padded(order, count, options.seq_length, eod) for order, count in zip(orders, samples, strict=True))
        )
    ranks = AllRanks.of_job()
    source = ranks.on_first(lambda: _prepare(options, tokenizer, (*earlier, samples)))
    nothing = Datasets(None, None, None)
    return ranks.together(lambda: _load(options, tokenizer, source) if needed_here else nothing)


# ------------------------------------------------------------------------------------------------ what is to be built


@dataclass(frozen=True)
class _Source:
    """Facts about the data that rank 0 determines and all ranks share."""

    blend: Blend | None
    """The data that `matrix` divides, or"""
    blend_per_split: list[Blend | None] | None
    """the data of each split; both None for mock data."""
    matrix: list[tuple[float, float] | None]
    """Begin and end of each split as shares of the documents; None for a split that is not built."""
    counts: tuple[Counts, ...]
    """Samples of each split that the earlier runs asked for, and last those of this one."""
    cache: str | None
    """Complete folder of indices; None when each rank builds its own in memory (mock data without a cache)."""

    @property
    def samples(self) -> Counts:
        return self.counts[-1]

    @property
    def indices(self) -> int:
        """Return the number of indices to build: one for each file and each blend."""
        blends = self.blend_per_split or [self.blend] * len(self.matrix)
        files = [len(blend[0]) if blend else 1 for blend, span in zip(blends, self.matrix, strict=True) if span]
        return sum(number + (number > 1) for number in files)


def _prepare(options: DataOptions, tokenizer: Any, counts: tuple[Counts, ...]) -> _Source:
    """Check the files, decide which splits exist, and make the index folder. Runs on rank 0 only."""
    from megatron.core import __version__ as core_version

    samples = counts[-1]
    sources = split_sources(options)
    blends = [source.blend for source in sources if source.blend]
    files = {prefix: read_indexed_file(prefix) for each in blends for prefix in each[0]}
    for file in files.values():
        check_vocabulary(file, tokenizer.vocab_size)
    check_boundaries(options, tokenizer, files.values())

    matrix: list[tuple[float, float] | None] = []
    for source, count in zip(sources, samples, strict=True):
        wanted = count > 0 and (options.mock_data or source.blend is not None) and source.end > source.begin
        lack = _lack(files, source, options.seq_length) if wanted else None
        if lack is not None and source.name == "train":
            raise DataError(f"no training data: {lack}")
        if lack is not None:
            logger.warning("no %s data: %s", source.name, lack)
        matrix.append((source.begin, source.end) if wanted and lack is None else None)
    if samples[0] > 0 and matrix[0] is None:
        raise DataError(f"--split {options.split} leaves nothing for training")

    blend = blends[0] if options.data_path else None
    per_split = [source.blend for source in sources] if options.train_data_path else None
    indexed = _Source(blend, per_split, matrix, counts, None)
    if options.data_cache_path is None and options.mock_data:
        return indexed
    root = Path(options.data_cache_path) if options.data_cache_path else Path(blends[0][0][0], "cache")
    description = {
        "blend": blend,
        "blend_per_split": per_split,
        "matrix": matrix,
        "samples": counts if len(counts) > 1 else samples,
        "seq_length": options.seq_length,
        "seed": options.seed,
        "surplus": options.mid_level_dataset_surplus,
        "tokenizer": tokenizer.unique_identifiers,
        "megatron-core": core_version,
        "process group": dist.is_initialized(),  # without one the blend's own index is not in the folder
        "files": {prefix: file.digest for prefix, file in files.items()},
    }
    key = hashlib.sha256(json.dumps(description).encode()).hexdigest()[:24]
    final = root / key

    def make(folder: str) -> None:
        with ProgressLine("building data indices").parts(indexed.indices) as built:
            _build(options, tokenizer, indexed, folder, built)

    made_once(final, make)
    return dataclasses.replace(indexed, cache=str(final))


def _lack(files: dict[str, IndexedFile], source: SplitSource, seq_length: int) -> str | None:
    """Return why a split's blend has too few tokens, or None. megatron-core would loop forever on a split without
    tokens.
    """
    prefixes, weights = source.blend or ([], None)
    for prefix in prefixes:
        lengths = files[prefix].sequence_lengths
        begin, end = source.documents(len(lengths))
        tokens = int(lengths[begin:end].sum(dtype="int64"))
        if tokens == 0:
            return f"{prefix} has {len(lengths)} documents, and none of them falls into this part of --split"
        if tokens <= seq_length and weights is None and len(prefixes) > 1:
            return f"{prefix} has {tokens} tokens for it, less than one sample of --seq-length {seq_length}"
    return None


def _load(options: DataOptions, tokenizer: Any, source: _Source) -> Datasets:
    """Map the index that rank 0 made. Runs on every rank that reads tokens."""
    if source.cache is not None and not Path(source.cache).is_dir():
        raise DataError(f"data index {source.cache} is not visible: --data-cache-path must be shared by all nodes")
    try:
        datasets = Datasets(*_build(options, tokenizer, source, source.cache))
    except OSError as error:
        raise DataError(f"data index {source.cache} cannot be read: {error}") from error
    available = len(datasets.train) if datasets.train is not None else 0  # type: ignore[arg-type]
    if available < source.samples[0]:
        raise DataError(
            f"training needs {source.samples[0]} samples and a blend without weights is read once, which gives "
            f"{available}: put a weight before each prefix, or train for fewer iterations"
        )
    return datasets


# ------------------------------------------------------------------------------------------------ megatron-core's side


def _build(
    options: DataOptions,
    tokenizer: Any,
    source: _Source,
    cache: str | None,
    built: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Return the three datasets with their indices in `cache`, building absent ones there (rank 0 only).

    built: called when a dataset is complete.
    """
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset

    config = GPTDatasetConfig(
        random_seed=options.seed,
        sequence_length=options.seq_length,
        blend=source.blend,
        blend_per_split=_only_wanted(source),
        split=(options.split or DEFAULT_SPLIT) if source.blend else None,
        path_to_cache=cache,
        mmap_bin_files=options.mmap_bin_files,
        mid_level_dataset_surplus=options.mid_level_dataset_surplus,
        tokenizer=tokenizer,
        # Positions tell where documents begin (see `loading`), also where the model is to count on.
        reset_position_ids=options.reset_position_ids or options.reset_attention_mask,
        reset_attention_mask=False,  # only changes a mask that is not made
        eod_mask_loss=options.eod_mask_loss,
        create_attention_mask=False,
    )
    if source.blend_per_split is None:
        config.split_matrix = source.matrix
    try:
        with _quiet(), numbers_only():
            kind, builder = MockGPTDataset if config.mock else GPTDataset, _builder(options, source, built)
            *_, datasets = (builder(kind, list(counts), lambda: True, config).build() for counts in source.counts)
            return datasets
    except (OSError, DataError):
        raise  # the caller knows the folder
    except Exception as error:
        raise DataError(f"the data index cannot be built: {type(error).__name__}: {error}") from error


def _builder(options: DataOptions, source: _Source, built: Callable[[], None]) -> Any:
    """Return the class that builds the datasets of each of `source.counts` in turn, and returns those of the last."""
    from megatron.core.datasets.blended_dataset import BlendedDataset
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

    asked: dict[Any, list[int | None]] = {}

    class Builder(BlendedMegatronDatasetBuilder):
        """megatron-core's builder without its barriers: `build_datasets` orders the ranks and reports failures."""

        number = 0
        """Place of a file in its blend."""

        def build_generic_dataset(self, cls: Any, is_built_on_rank: Any, synchronize_ranks: bool, *args: Any) -> Any:
            if cls is not BlendedDataset:
                return self._grown(cls, *args)
            if self.sizes != list(source.samples):
                return None
            if not dist.is_initialized():  # its cache asks for the rank; keep it in memory
                *args, config = args  # type: ignore[assignment]
                config = copy.copy(config)
                config.path_to_cache = None
                args = (*args, config)
            dataset = cls(*args)
            built()
            return dataset

        def _grown(self, cls: Any, file: Any, path: Any, documents: Any, count: int | None, *rest: Any) -> Any:
            """Return the samples of a file: those of the first run's index, then those of an index for each run that
            needed more. Return None while the counts of earlier runs are gathered.
            """
            split, config = rest
            counts = asked.setdefault((split, self.number), [])
            counts.append(count)
            if len(counts) < len(source.counts):
                return None
            parts: list[Any] = []
            for wanted in counts:
                missing = wanted if wanted is None else wanted - sum(map(len, parts))
                if (missing is not None and missing <= 0) or (missing is None and parts):
                    continue
                seeded = copy.copy(config)
                seeded.random_seed = (config.random_seed + len(parts)) % 2**32
                parts.append(cls(file, path, documents, missing, split, seeded))
            built()
            if len(counts) == 1:
                return parts[0]
            joined: Any = ConcatDataset(parts)
            joined.index_split, joined.unique_identifiers = split, [part.unique_identifiers for part in parts]
            return joined

        def _build_megatron_datasets_parallel(self, prefixes: Any, split: Any, sizes_per_dataset: Any) -> Any:
            def build(number: int, prefix: Any, sizes: Any) -> Any:
                builder = copy.copy(self)
                builder.number = number
                return builder._build_megatron_dataset_splits(prefix, split, sizes, False)

            with ThreadPoolExecutor(options.num_dataset_builder_threads) as pool:
                rows = list(pool.map(build, range(len(prefixes)), prefixes, sizes_per_dataset))
            return [list(column) for column in zip(*rows, strict=True)]

    return Builder


def _only_wanted(source: _Source) -> list[Blend | None] | None:
    if source.blend_per_split is None:
        return None
    return [blend if span else None for blend, span in zip(source.blend_per_split, source.matrix, strict=True)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress megatron-core's messages on indices kept in memory and on tokenizers with another padding token."""
    core = logging.getLogger("megatron.core.datasets")
    level = core.level
    core.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        core.setLevel(level)


@contextmanager
def numbers_only() -> Iterator[None]:
    """Keep numpy from loading pickled objects in the context. megatron-core asks for them, and they could run code of
    anyone who can write into the folder of indices. Raises DataError, which names the file.
    """
    load = numpy.load

    @functools.wraps(load)
    def loaded(file: Any, *args: Any, **named: Any) -> Any:
        try:
            return load(file, *args, **{**named, "allow_pickle": False})
        except ValueError:
            raise DataError(
                f"the data index {file} is not a file of numbers: somebody else wrote it, or it is damaged; remove its "
                "folder, and it is made anew."
            ) from None

    numpy.load = loaded
    try:
        yield
    finally:
        numpy.load = load
