"""Reads the data flags: documented fields named as Megatron's flags."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from helixpipe.common.errors import UserError
from helixpipe.common.json_values import parse_json
from megatron.pretrain.data.samplers import DATALOADER_TYPES

SPLITS = ("train", "valid", "test")
DEFAULT_SPLIT = "969, 30, 1"

LongDocuments = Literal["truncate", "skip", "refuse"]

PROMPT_FORMATS = ("default", "identity")

Blend = tuple[list[str], list[float] | None]
"""Prefixes of .bin/.idx pairs, and their weights if given."""


@dataclass(frozen=True)
class DataOptions:
    """Options of the data to read. Field names are Megatron's flags."""

    seq_length: int
    """Tokens of a sample."""
    seed: int = 1234
    """Seed of the order of documents and samples."""
    data_path: Sequence[str] | None = None
    """Prefixes of .bin/.idx pairs: one (PREFIX), a weighted blend (0.3 A 0.7 B), or a blend by size (A B)."""
    split: str | None = None
    """Shares of train, validation and test in --data-path, for example 969,30,1 (the default)."""
    train_data_path: Sequence[str] | None = None
    """Like --data-path, for training only; not to be combined with --data-path or --split."""
    valid_data_path: Sequence[str] | None = None
    """Like --data-path, for validation only."""
    test_data_path: Sequence[str] | None = None
    """Like --data-path, for the test only."""
    mock_data: bool = False
    """Generated data: needs no files."""
    data_cache_path: str | None = None
    """Folder of the data indices, which all nodes must see; by default PREFIX/cache."""
    num_workers: int = 2
    """Processes that read samples ahead, for each rank and split; 0 reads in the training process."""
    dataloader_type: str = "single"
    """single: samples in the dataset's order, once. cyclic: epochs without end, each in a new random order."""
    reset_position_ids: bool = False
    """Position ids begin again at 0 after an end-of-document token."""
    reset_attention_mask: bool = False
    """Microbatches say where their documents end, so that none sees another."""
    eod_mask_loss: bool = False
    """Leave the tokens after an end-of-document token out of the loss."""
    sft: bool = False
    """The paths name .jsonl files of conversations; only what the assistant says is in the loss."""
    sft_tokenizer_prompt_format: str = "default"
    """The conversion of messages to text: by the tokenizer's chat template (default), or unchanged (identity)."""
    variable_seq_lengths: bool = False
    """Steps of whole documents (`documents.DocumentStream`) in place of samples of seq_length tokens."""
    max_tokens: int | None = None
    """Most tokens in the documents of a step; None: global_batch_size documents a step."""
    long_documents: LongDocuments = "truncate"
    """The treatment of documents of more than seq_length tokens."""
    mmap_bin_files: bool = True
    """Map .bin files into memory instead of reading them."""
    num_dataset_builder_threads: int = 1
    """Threads that build the indices of a blend."""
    mid_level_dataset_surplus: float = 0.005
    """Spare samples drawn from each dataset of a weighted blend, as a fraction."""

    @classmethod
    def from_flags(cls, flags: Any, *, seq_length: int, seed: int) -> DataOptions:
        """Take the fields that `flags` has under the same names, and read the files of --data-args-path and its kin."""
        names = {field.name for field in fields(cls)} - {"seq_length", "seed"}
        values = {name: getattr(flags, name) for name in names if hasattr(flags, name)}
        words_file, json_file = (getattr(flags, name, None) for name in ("data_args_path", "per_split_data_args_path"))
        if words_file is not None:
            if values.get("data_path"):
                raise UserError("give either --data-path or --data-args-path, not both")
            values["data_path"] = _read("--data-args-path", words_file).split()
        if json_file is not None:
            values.update(_per_split(json_file))
        return cls(seq_length=seq_length, seed=seed, **values)

    def __post_init__(self) -> None:
        per_split = [self.train_data_path, self.valid_data_path, self.test_data_path]
        if self.seq_length < 1:
            raise UserError(f"--seq-length {self.seq_length} must be at least 1")
        if self.num_workers < 0:
            raise UserError(f"--num-workers {self.num_workers} must not be negative")
        if self.num_dataset_builder_threads < 1:
            raise UserError(f"--num-dataset-builder-threads {self.num_dataset_builder_threads} must be at least 1")
        if self.mid_level_dataset_surplus < 0:
            raise UserError(f"--mid-level-dataset-surplus {self.mid_level_dataset_surplus} must not be negative")
        if self.dataloader_type not in DATALOADER_TYPES:
            valid = ", ".join(DATALOADER_TYPES)
            raise UserError(f"--dataloader-type {self.dataloader_type} is unknown; valid are {valid}")
        if self.sft_tokenizer_prompt_format not in PROMPT_FORMATS:
            valid = " and ".join(PROMPT_FORMATS)
            raise UserError(
                f"--sft-tokenizer-prompt-format {self.sft_tokenizer_prompt_format} is of one family of models "
                f"and not known here; valid are {valid}: a chat template that comes with the tokenizer is used"
            )
        if self.sft and self.mock_data:
            raise UserError("--sft reads conversations from .jsonl files, so --mock-data does not go with it")
        if sum([bool(self.data_path), any(per_split), self.mock_data]) != 1:
            raise UserError("give exactly one of --data-path, --train-data-path or --mock-data.")
        if any(per_split) and not self.train_data_path:
            raise UserError("--valid-data-path and --test-data-path need --train-data-path")
        if self.split is not None and not self.data_path:
            raise UserError(f"--split {self.split} divides --data-path, which is not given")


_PATHS = frozenset({"data_path", "train_data_path", "valid_data_path", "test_data_path"})
_OF_READING = frozenset(
    {"data_cache_path", "num_workers", "max_tokens", "mmap_bin_files", "num_dataset_builder_threads"}
)


def order_facts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that decide which samples there are, and in which order.

    That is every field of `DataOptions`, apart from those of how files are read, and from paths, whose content
    `identity.identities` identifies. Fields that are missing, as in a checkpoint of an older release, have their
    defaults.

    Args:
        values: flags by name.
    """
    facts = {}
    for field in fields(DataOptions):
        if field.name not in _PATHS | _OF_READING:
            default = None if field.default is MISSING else field.default
            value = values.get(field.name)
            facts[field.name] = default if value is None else value
    if facts["mock_data"]:
        del facts["split"]
    else:
        facts["split"] = parse_split(str(facts["split"] or DEFAULT_SPLIT))
    if not facts["sft"]:
        del facts["sft_tokenizer_prompt_format"]
        if not facts["variable_seq_lengths"]:
            del facts["long_documents"]
    return facts


class SplitSource(NamedTuple):
    """The source of a split's documents."""

    name: str
    blend: Blend | None
    """The split's files; None if it has none (or the data is mock data)."""
    begin: float
    """The documents of each file that it has, as shares of them."""
    end: float

    def documents(self, count: int) -> tuple[int, int]:
        """First and end of the split's part of `count` documents; as megatron-core rounds."""
        return round(self.begin * float(count)), round(self.end * float(count))


def split_sources(options: DataOptions) -> list[SplitSource]:
    """Return the sources of train, valid and test. Raises UserError for paths or a --split that cannot be read."""
    if options.train_data_path:
        paths = zip(SPLITS, (options.train_data_path, options.valid_data_path, options.test_data_path), strict=True)
        each = [(name, parse_blend(f"--{name}-data-path", path) if path else None) for name, path in paths]
        return [SplitSource(name, blend, 0.0, 1.0) for name, blend in each]
    blend, shares = None, (1 / 3, 1 / 3, 1 / 3)
    if options.data_path:
        blend, shares = parse_blend("--data-path", options.data_path), parse_split(options.split or DEFAULT_SPLIT)
    begins = (0.0, shares[0], shares[0] + shares[1])
    ends = (shares[0], begins[1] + shares[1], 1.0 if shares[2] > 0 else begins[2])
    return [SplitSource(*each) for each in zip(SPLITS, (blend,) * 3, begins, ends, strict=True)]


def parse_blend(flag: str, words: Sequence[str]) -> Blend:
    """Read a data path flag's value. Raises UserError when only some of the prefixes have a weight."""
    words = [word.strip() for word in words]
    weights = [_number(word) for word in words[0::2]]
    if len(words) % 2 == 0 and all(weight is not None for weight in weights):
        positive = [weight for weight in weights if weight is not None and weight > 0]
        if len(positive) < len(weights):
            raise UserError(f"{flag} {' '.join(words)}: every weight must be a positive number")
        return words[1::2], positive
    for word in words:
        if _number(word) is not None and not Path(word + ".idx").exists():
            raise UserError(f"{flag} {' '.join(words)}: give prefixes only, or a weight before each (0.3 A 0.7 B)")
    return words, None


def parse_split(split: str) -> tuple[float, float, float]:
    """Return the shares of train, validation and test, summing to 1. Raises UserError unless they are up to three
    numbers ≥ 0.
    """
    shares = [_number(word) for word in split.split(",")]
    numbers = [share for share in shares if share is not None and share >= 0]
    if len(numbers) != len(shares) or len(numbers) > 3 or sum(numbers) <= 0:
        raise UserError(f"--split {split}: give up to three shares of train, validation and test, for example 969,30,1")
    train, valid, test = (share / sum(numbers) for share in (numbers + [0.0, 0.0])[:3])
    return train, valid, test


def _number(word: str) -> float | None:
    try:
        number = float(word)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _read(flag: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{flag} {path} cannot be read: {error}") from error


def _per_split(path: str) -> dict[str, list[str]]:
    flag = "--per-split-data-args-path"
    try:
        lists = parse_json(_read(flag, path))
        values = {f"{name}_data_path": [str(word) for word in lists[name]] for name in SPLITS if lists.get(name)}
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"{flag} {path} must hold a JSON object of lists under train, valid and test") from error
    return values
