"""Checks of what a run watches beside its training."""

from __future__ import annotations

from helixpipe.common.errors import UserError
from megatron.pretrain.config import Config


def corruption(config: Config) -> Config:
    """Check that replicas have the same work to compare, and can compute it alike."""
    every, parallel = config.adapt.check_every, config.parallel
    if not every:
        return config
    for other, given in (
        (f"--num-experts {config.model.num_experts}: replicas share the experts out", config.model.num_experts),
        (
            f"--data-parallel-sharding-strategy {parallel.data_parallel_sharding_strategy}: no replica has whole "
            "weights; use optim, or no sharding",
            parallel.shards_weights,
        ),
        ("--variable-seq-lengths: replicas have other documents", config.data.variable_seq_lengths),
        ("--reset-attention-mask: replicas have other documents", config.data.reset_attention_mask),
    ):
        if given:
            raise UserError(f"--check-every {every} cannot be combined with {other}; or give --check-every 0.")
    return config
