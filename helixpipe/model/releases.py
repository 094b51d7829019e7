"""Covers the differences between the supported releases of megatron-core, 0.16.1 to 0.20.

Where a release merely lost a name, the code that used it does without, as `megatron.pretrain.checkpoint.checkpointing`
does.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

NEWEST = (0, 20)
"""The newest release of megatron-core that was run with this project."""


def untested(version: str) -> list[str]:
    """Return a sentence if a release of megatron-core is newer than all that were run with this project; else none."""
    numbers = [int(part) for part in version.split(".")[:2] if part.isdecimal()]
    if len(numbers) < 2 or tuple(numbers) <= NEWEST:
        return []
    return [f"megatron-core {version} is newer than {'.'.join(map(str, NEWEST))}, the newest that was tested."]


def null_tokenizer(vocab_size: int) -> tuple[str, dict[str, Any]]:
    """Name and options of megatron-core's tokenizer of numbers below `vocab_size`, with end of document after them."""
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    if "eod_id" in inspect.signature(NullTokenizer).parameters:  # in 0.19: the end of document is one of the numbers
        return "null-text", {"vocab_size": vocab_size + 1}
    return "null", {"vocab_size": vocab_size}


def text_tokenizer() -> Any:
    """Return megatron-core's class of a GPT's tokenizer: since 0.20 one class serves all models."""
    try:
        from megatron.core.tokenizers.text.models.gpt_tokenizer import GPTTokenizer
    except ModuleNotFoundError:
        from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText as GPTTokenizer
    return GPTTokenizer


def with_router_products() -> None:
    """Let megatron-core's router multiply without Transformer Engine: 0.16.1 asks for a name that is then missing."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def without_advice() -> None:
    """Leave out the advice of megatron-core 0.19, on every rank, that callers plan the buffers of DDP."""
    logging.getLogger("megatron.core.distributed.distributed_data_parallel").addFilter(_is_no_advice)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return "full_param_layout not provided" not in record.getMessage()
