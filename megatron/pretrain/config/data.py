"""Flags for the data and the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from helixpipe.common.flags import option


@dataclass(frozen=True)
class DataConfig:
    """Flags of the data source. Exactly one of mock data, `data_path` and the three per-split paths is used."""

    data_path: tuple[str, ...] | None = option(
        None,
        "Prefixes of .bin/.idx files: one, or several, each with its weight before it (0.3 A 0.7 B) or none with one.",
        nargs="*",
        metavar="[WEIGHT] PREFIX",
    )
    split: str | None = option(
        None, "Shares of training, validation and test of --data-path, such as 969,30,1 (the default)."
    )
    train_data_path: tuple[str, ...] | None = option(
        None, "Training data alone, as in --data-path.", nargs="*", metavar="[WEIGHT] PREFIX"
    )
    valid_data_path: tuple[str, ...] | None = option(
        None, "Validation data alone, as in --data-path.", nargs="*", metavar="[WEIGHT] PREFIX"
    )
    test_data_path: tuple[str, ...] | None = option(
        None, "Test data alone, as in --data-path.", nargs="*", metavar="[WEIGHT] PREFIX"
    )
    data_args_path: str | None = option(None, "A file holding the words to give to --data-path.", metavar="FILE")
    per_split_data_args_path: str | None = option(
        None, "A JSON file with lists under train, valid and test, for the three per-split flags.", metavar="FILE"
    )
    data_cache_path: str | None = option(None, "Folder for the index files built from the data.", metavar="DIR")
    mock_data: bool = option(False, "Train on generated tokens instead of files.")
    mmap_bin_files: bool = option(
        True, "Read .bin files instead of mapping them into memory.", flags=["--no-mmap-bin-files"]
    )
    num_dataset_builder_threads: int = option(1, "Threads that build the indices of a blend.", at_least=1)
    mid_level_dataset_surplus: float = option(
        0.005, "Spare samples drawn from each dataset of a weighted blend, as a fraction.", at_least=0
    )
    num_workers: int = option(2, "Processes that load data, for each rank.", at_least=0)
    dataloader_type: Literal["single", "cyclic"] = option(
        "single", "Pass over the data in order (single) or shuffled anew each epoch (cyclic)."
    )
    reset_position_ids: bool = option(
        False, "Count learned positions anew after each end-of-document token (of RoPE nothing changes)."
    )
    reset_attention_mask: bool = option(
        False, "Tokens attend to their own document only: what lies between end-of-document tokens."
    )
    eod_mask_loss: bool = option(False, "Leave end-of-document tokens out of the loss.")
    sft: bool = option(
        False,
        "Supervised fine-tuning: the data paths name .jsonl files of conversations, and only what the assistant says "
        "is in the loss.",
    )
    sft_tokenizer_prompt_format: str = option(
        "default",
        "--sft: how messages become text. default: by the tokenizer's chat template, else plainly; identity: as they "
        "are, one after the other.",
    )
    variable_seq_lengths: bool = option(
        False,
        "Batches of whole documents, none longer than --seq-length: --global-batch-size of them a step, or as many as "
        "have --max-tokens.",
    )
    max_tokens: int | None = option(None, "--variable-seq-lengths: most tokens of one optimizer step.", at_least=1)
    long_documents: Literal["truncate", "skip", "refuse"] = option(
        "truncate", "--variable-seq-lengths, --sft: what to do with documents of more tokens than --seq-length."
    )
    # tokenizer
    tokenizer_type: str | None = option(
        None,
        "Tokenizer, such as ByteLevelTokenizer, GPT2BPETokenizer (the default), HuggingFaceTokenizer, NullTokenizer.",
    )
    tokenizer_model: str | None = option(None, "The tokenizer's model: a file, or a Hugging Face name or folder.")
    vocab_file: str | None = option(None, "Vocabulary file of a BPE tokenizer.", metavar="FILE")
    merge_file: str | None = option(None, "Merges file of a BPE tokenizer.", metavar="FILE")
    vocab_size: int | None = option(None, "Vocabulary before padding; by default the tokenizer's.", at_least=1)
    padded_vocab_size: int | None = option(
        None,
        "Vocabulary of the model; by default --vocab-size padded as --make-vocab-size-divisible-by says.",
        at_least=1,
    )
    tiktoken_pattern: Literal["v1", "v2"] = option("v2", "Splitting pattern of TikTokenizer.")
    tiktoken_num_special_tokens: int = option(1000, "Number of special tokens of TikTokenizer.", at_least=0)
