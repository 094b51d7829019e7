"""Checks of the flags of this project's own extensions."""

from __future__ import annotations

from pathlib import Path

from helixpipe.common.errors import UserError
from helixpipe.common.host_memory import ROOT
from megatron.pretrain.checkpoint.options import CheckpointOptions
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


_FLAG = "--in-memory-checkpoint-interval"


def snapshots(config: Config) -> Config:
    """Before defaults are filled in: the batch must not follow from the number of ranks."""
    interval, training, parallel = config.checkpoint.in_memory_checkpoint_interval, config.training, config.parallel
    if interval is None:
        return config
    given = f"{_FLAG} {interval}"
    sharding = parallel.data_parallel_sharding_strategy
    for asked, other in (
        (config.data.variable_seq_lengths, "--variable-seq-lengths"),
        (training.enable_optimizer_post_validation, "--enable-optimizer-post-validation"),
        (training.optimizer_cpu_offload, "--optimizer-cpu-offload"),
        (training.use_precision_aware_optimizer, "--use-precision-aware-optimizer"),
        (training.optimizer != "adam", f"--optimizer {training.optimizer}"),
        (parallel.shards_weights, f"--data-parallel-sharding-strategy {sharding}"),
        (parallel.use_torch_fsdp2, "--use-torch-fsdp2"),
        (parallel.expert_model_parallel_size > 1, "--expert-model-parallel-size above 1"),
    ):
        if asked:
            raise UserError(f"{given} cannot be combined with {other}; save checkpoints with --save-interval instead.")
    if training.global_batch_size is None:
        raise UserError(f"{given} needs --global-batch-size, which stays the same when ranks are lost.")
    if config.checkpoint.save is not None and not CheckpointOptions.from_config(config).continues:
        raise UserError(
            f"{given} with --save {config.checkpoint.save} needs --load of the same folder, for when memory is lost."
        )
    often = config.checkpoint.save_interval
    if config.checkpoint.save is not None and often is not None and interval > often:
        raise UserError(
            f"{given} must be at most --save-interval {often}: what is in memory would be older than what is saved."
        )
    if not Path(ROOT).is_dir():
        raise UserError(f"{given} needs {ROOT}, Linux's file system in memory, which this host does not have.")
    return config
