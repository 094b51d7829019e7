"""Checks that the data marks the ends of documents, for the flags that need them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from helixpipe.common.errors import DataError
from megatron.pretrain.data.indexed_files import IndexedFile, first_tokens
from megatron.pretrain.data.options import DataOptions

logger = logging.getLogger(__name__)


def end_of_document(tokenizer: Any) -> int | None:
    """Return the tokenizer's end-of-document token, None if it has none."""
    try:
        eod = tokenizer.eod
    except (AttributeError, NotImplementedError):
        return None
    return eod if isinstance(eod, int) and eod >= 0 else None


def check_boundaries(options: DataOptions, tokenizer: Any, files: Iterable[IndexedFile]) -> None:
    """Raise DataError when a flag looks for end-of-document tokens and the tokenizer has none; warn of files in which
    there seem to be none."""
    fields = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    flags = [f"--{name.replace('_', '-')}" for name in fields if getattr(options, name)]
    if not flags:
        return
    eod = end_of_document(tokenizer)
    if eod is None:
        raise DataError(f"{flags[0]} needs a tokenizer with an end-of-document token, and this one has none")
    for file in files:
        tokens = first_tokens(file)
        if len(tokens) > options.seq_length and not (tokens == eod).any():
            logger.warning(
                "%s.bin has no end-of-document token (%d) among its first %d, so %s finds no documents in it: "
                "preprocess it with --append-eod",
                file.prefix,
                eod,
                len(tokens),
                " ".join(flags),
            )
