"""The learning-rate and weight-decay schedule, from flags in iterations or samples to megatron-core's in samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.pretrain.config import Config
from megatron.pretrain.step.microbatches import BatchSchedule, run_length


@dataclass(frozen=True)
class ScheduleLengths:
    """The lengths of the phases in samples, so that a batch-size rampup does not change where a phase ends."""

    warmup: int
    decay: int
    wsd_decay: int | None
    weight_decay: int


def schedule_lengths(config: Config, batches: BatchSchedule) -> ScheduleLengths:
    """Return the lengths of warm-up and decay in samples. Iterations count the samples those iterations really have."""
    training = config.training
    by_iterations = training.train_iters is not None

    def to_samples(count: int) -> int:
        return batches.samples_after(count) if by_iterations else count

    if training.train_iters is not None:
        decay, last = training.lr_decay_iters or training.train_iters, training.lr_wsd_decay_iters
        warmup = training.lr_warmup_iters
        total = to_samples(training.train_iters)
    else:
        total = training.train_samples or run_length(config, batches).samples
        decay, last = training.lr_decay_samples or total, training.lr_wsd_decay_samples
        warmup = training.lr_warmup_samples
    decay_samples = max(1, to_samples(decay))  # 0 with --skip-train
    return ScheduleLengths(
        warmup=int(training.lr_warmup_fraction * decay_samples)
        if training.lr_warmup_fraction is not None
        else to_samples(warmup),
        decay=decay_samples,
        # the last phase ends with the decay, so it is counted from there
        wsd_decay=decay_samples - to_samples(max(decay - last, 0)) if last is not None else None,
        weight_decay=total,
    )


def build_param_scheduler(optimizer: Any, config: Config, batches: BatchSchedule) -> OptimizerParamScheduler:
    """Return megatron-core's scheduler. Call `step(increment=samples of the step)` after each step that was not
    skipped.

    optimizer: megatron-core's, or anything with `param_groups`.
    """
    training = config.training
    lengths = schedule_lengths(config, batches)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=training.lr_warmup_init,
        max_lr=training.lr or 0.0,  # --skip-train needs none
        min_lr=training.min_lr,
        lr_warmup_steps=lengths.warmup,
        lr_decay_steps=lengths.decay,
        lr_decay_style=training.lr_decay_style,
        start_wd=training.start_weight_decay,
        end_wd=training.end_weight_decay,
        wd_incr_steps=lengths.weight_decay,
        wd_incr_style=training.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=training.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=training.override_opt_param_scheduler,
        wsd_decay_steps=lengths.wsd_decay,
        lr_wsd_decay_style=training.lr_wsd_decay_style,
    )
