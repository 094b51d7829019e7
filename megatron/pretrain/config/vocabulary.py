"""The size of the vocabulary that the model has. No torch here."""

from __future__ import annotations

from helixpipe.common.errors import UserError
from megatron.pretrain.config.container import Config


def padded_vocabulary(config: Config, tokenizer: int, guessed: bool = False) -> int:
    """Rows of the model's embedding: as the flags say, else for a tokenizer with so many tokens. guessed: the tokenizer
    has not been read yet. Raises UserError where the flags have fewer rows than there are tokens."""
    data, tp = config.data, config.parallel.tensor_model_parallel_size
    size = data.vocab_size if data.vocab_size is not None else tokenizer
    if data.vocab_size is not None and data.tokenizer_type == "NullTokenizer":
        size = data.vocab_size + 1  # the end of a document comes after the numbers that the flag counts
    if data.padded_vocab_size is not None:
        least = 1 if guessed and data.vocab_size is None else size
        if data.padded_vocab_size < least or data.padded_vocab_size % tp:
            raise UserError(
                f"--padded-vocab-size {data.padded_vocab_size} must be at least {least}, the size of the vocabulary, "
                f"and a multiple of --tensor-model-parallel-size {tp}."
            )
        return data.padded_vocab_size
    multiple = config.model.make_vocab_size_divisible_by
    return padded_vocab_size(size, multiple, tp)


def padded_vocab_size(vocab_size: int, make_vocab_size_divisible_by: int, tensor_model_parallel_size: int) -> int:
    """Rows of the embedding: `vocab_size` rounded up to a multiple of both factors' product (Megatron's rule)."""
    if make_vocab_size_divisible_by < 1:
        raise UserError(f"--make-vocab-size-divisible-by {make_vocab_size_divisible_by} must be at least 1")
    multiple = make_vocab_size_divisible_by * tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple
