"""Checks of the flags, and the values that follow from them: small functions from configuration to configuration.

`STEPS` are run in order. Each is about one thing and raises UserError with one sentence that names the flag, the value
and what would be valid. Nothing here imports torch; `check_device` is told what the machine has.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron.pretrain.config import Config
from megatron.pretrain.validation import (
    documents,
    experts,
    inputs,
    model,
    parallel,
    resilience,
    training,
    values,
)
from megatron.pretrain.validation.parallel import check_device

__all__ = ["STEPS", "check_device", "validate"]


def validate(config: Config) -> Config:
    """Return the configuration with every derived value filled in. Raises UserError at the first error."""
    for step in STEPS:
        config = step(config)
    return config


STEPS: tuple[Callable[[Config], Config], ...] = (
    resilience.snapshots,
    documents.document_batches,
    values.required_flags,
    values.ranges,
    model.position_embeddings,
    model.attention_heads,
    model.rotary_embeddings,
    model.layer_patterns,
    model.query_groups,
    model.ffn_hidden_size,
    parallel.world_size,
    parallel.virtual_stages,
    parallel.stage_layers,
    parallel.pipeline_schedule,
    parallel.sequence_parallel,
    parallel.context_parallel,
    parallel.communicators,
    model.latent_attention,
    training.batch_size,
    training.rampup,
    training.train_length,
    training.learning_rate,
    training.warmup_and_decay,
    training.weight_decay,
    training.precision,
    parallel.sharding,
    experts.experts,
    model.further_tokens,
    resilience.corruption,
    training.optimizer_on_host,
    training.recomputation,
    inputs.data_source,
    inputs.tokenizer,
    inputs.checkpoints,
    inputs.profiling,
)
