"""Steps of whole documents: what --variable-seq-lengths needs, and what follows from it."""

from __future__ import annotations

from helixpipe.common.errors import UserError
from megatron.pretrain.config import Config


def document_batches(config: Config) -> Config:
    """Check steps of documents, where a microbatch is one row and a step is a number of documents or tokens. Flags for
    batches of equally long samples are refused. The loss is the mean over the step's tokens.
    """
    training, data = config.training, config.data
    if not data.variable_seq_lengths:
        if data.max_tokens is not None:
            raise UserError(
                f"--max-tokens {data.max_tokens} is of steps of documents: it needs --variable-seq-lengths."
            )
        return config if training.calculate_per_token_loss is not None else _per_token(config, False)
    if training.micro_batch_size not in (None, 1):
        raise UserError(
            f"--micro-batch-size {training.micro_batch_size} does not go with --variable-seq-lengths, where a "
            "microbatch is one row of documents: leave it out, or give 1."
        )
    for name in ("rampup_batch_size", "step_batch_size_schedule"):
        if getattr(training, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} does not go with --variable-seq-lengths; leave one of the two out.")
    if training.calculate_per_token_loss is False:
        raise UserError(
            "--no-calculate-per-token-loss does not go with --variable-seq-lengths: microbatches of unlike lengths "
            "have no other mean than that of all tokens; leave it out."
        )
    if (data.max_tokens is None) == (training.global_batch_size is None):
        raise UserError(
            "--variable-seq-lengths needs either --global-batch-size, documents a step, or --max-tokens, tokens a step."
        )
    if data.max_tokens is not None:
        longest = config.model.seq_length or 0  # that it is given is checked next
        if data.max_tokens < longest:
            raise UserError(
                f"--max-tokens {data.max_tokens} must be at least --seq-length {longest}, the longest document."
            )
        if training.train_samples is not None:
            raise UserError(
                "--train-samples does not go with --max-tokens, under which steps have unlike numbers of "
                "documents; use --train-iters."
            )
    return _per_token(config.replace("training", micro_batch_size=1), True)


def documents_a_step(config: Config) -> Config:
    """Check that every data-parallel rank gets a document. Under --max-tokens `global_batch_size` is no number of
    documents but the unit in which the learning rate's schedule counts steps.
    """
    size, dp = config.training.global_batch_size, config.parallel.data_parallel_size
    if size is None:
        return config.replace("training", global_batch_size=dp)
    if size < dp:
        raise UserError(
            f"--global-batch-size {size} gives some of {dp} data-parallel ranks no document; it must be at least {dp}."
        )
    return config


def _per_token(config: Config, value: bool) -> Config:
    return config.replace("training", calculate_per_token_loss=value)
