"""Checks of snapshots in memory: what they do not hold, and what has to be said for other numbers of ranks."""

from __future__ import annotations

from pathlib import Path

from helixpipe.common.errors import UserError
from helixpipe.common.host_memory import ROOT
from megatron.pretrain.checkpoint.options import CheckpointOptions
from megatron.pretrain.config import Config

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
