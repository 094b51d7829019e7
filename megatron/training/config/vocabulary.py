"""The size of the vocabulary that the model has. No torch here."""

from __future__ import annotations

from helixpipe.common.errors import UserError


def padded_vocab_size(vocab_size: int, make_vocab_size_divisible_by: int, tensor_model_parallel_size: int) -> int:
    """Rows of the embedding: `vocab_size` rounded up to a multiple of both factors' product (Megatron's rule)."""
    if make_vocab_size_divisible_by < 1:
        raise UserError(f"--make-vocab-size-divisible-by {make_vocab_size_divisible_by} must be at least 1")
    multiple = make_vocab_size_divisible_by * tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple
