"""The size of the vocabulary that the model has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from helixpipe.common.errors import UserError
from megatron.pretrain.config.container import Config


def padded_vocabulary(config: Config, tokens: Callable[[], int], saved: Callable[[], Any] = lambda: None) -> int:
    """Return the rows of the model's embedding: those of --padded-vocab-size; of the checkpoint that is loaded; or as
    many as there are tokens, of --vocab-size or the tokenizer, padded as --make-vocab-size-divisible-by says.

    tokens: asks the tokenizer how many it has. saved: asks for the rows of the checkpoint, None where it does not say.
    The padding depends on the tensor-parallel size, and the padded rows take part in the loss: a run that resumes under
    another size keeps the rows it was saved with where these can be divided, and so its losses. Raises UserError where
    --padded-vocab-size has fewer rows than there are tokens, or cannot be divided.
    """
    data, tp = config.data, config.parallel.tensor_model_parallel_size
    size = data.vocab_size
    if size is not None and data.tokenizer_type == "NullTokenizer":
        size += 1  # the end of a document comes after the numbers that the flag counts
    if data.padded_vocab_size is not None:
        least = size or 1
        if data.padded_vocab_size < least or data.padded_vocab_size % tp:
            raise UserError(
                f"--padded-vocab-size {data.padded_vocab_size} must be at least {least}, the size of the vocabulary, "
                f"and a multiple of --tensor-model-parallel-size {tp}."
            )
        return data.padded_vocab_size
    if size is None:
        size = tokens()
    rows = saved()
    if isinstance(rows, int) and rows >= size and rows % tp == 0:
        return rows
    return padded_vocab_size(size, config.model.make_vocab_size_divisible_by, tp)


def padded_vocab_size(vocab_size: int, make_vocab_size_divisible_by: int, tensor_model_parallel_size: int) -> int:
    """Return the rows of the embedding: `vocab_size` rounded up to a multiple of both factors' product (Megatron's
    rule).
    """
    if make_vocab_size_divisible_by < 1:
        raise UserError(f"--make-vocab-size-divisible-by {make_vocab_size_divisible_by} must be at least 1")
    multiple = make_vocab_size_divisible_by * tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple
