"""Batch, length of training, learning rate, precision."""

from __future__ import annotations

from helixpipe.common.errors import UserError
from helixpipe.common.ranges import MOST_MICROBATCHES
from megatron.pretrain.config import Config
from megatron.pretrain.step.microbatches import growth_of
from megatron.pretrain.validation.documents import documents_a_step
from megatron.pretrain.validation.wording import checked, listing, nearest


def batch_size(config: Config) -> Config:
    """Set the global batch to one microbatch a data-parallel rank by default, and check that it holds whole ones."""
    if config.data.variable_seq_lengths:
        return documents_a_step(config)
    config = last_of_schedule(config)
    training, dp = config.training, config.parallel.data_parallel_size
    unit = checked(training.micro_batch_size) * dp
    size = training.global_batch_size if training.global_batch_size is not None else unit
    if training.decrease_batch_size_if_needed:
        if size < unit:
            raise UserError(
                f"--global-batch-size {size} is less than --micro-batch-size x data-parallel size = {unit}."
            )
    elif size % unit:
        raise UserError(
            f"--global-batch-size {size} must be a multiple of --micro-batch-size {training.micro_batch_size} x "
            f"data-parallel size {dp} = {unit}; the nearest valid values are {nearest(size, unit)}."
        )
    if size // unit > MOST_MICROBATCHES:
        raise UserError(
            f"--global-batch-size {size} means {size // unit} microbatches a step, of which there may be "
            f"{MOST_MICROBATCHES}; make it smaller or --micro-batch-size larger."
        )
    return config.replace("training", global_batch_size=size)


def last_of_schedule(config: Config) -> Config:
    """Take the global batch from --step-batch-size-schedule; each of its steps must hold whole microbatches."""
    training = config.training
    if training.step_batch_size_schedule is None:
        return config
    shown = f"--step-batch-size-schedule {training.step_batch_size_schedule!r}"
    for name in ("global_batch_size", "rampup_batch_size"):
        if getattr(training, name) is not None:
            raise UserError(f"{shown} stands in place of --{name.replace('_', '-')}; leave one of the two out.")
    unit = checked(training.micro_batch_size) * config.parallel.data_parallel_size
    growth = growth_of(0, None, training.step_batch_size_schedule, config.model.seq_length)
    begins = [begin for begin, _ in growth]
    if not begins or begins[0] != 0 or len({*begins}) < len(begins):
        raise UserError(f"{shown} must begin at 0 tokens, with entries that are a sample apart or more.")
    if any(size < 1 or size % unit for _, size in growth):
        raise UserError(f"{shown} must have multiples of --micro-batch-size x data-parallel size = {unit} samples.")
    return config.replace("training", global_batch_size=growth[-1][1])


def rampup(config: Config) -> Config:
    """Check START INCREMENT SAMPLES: START plus whole increments is the global batch; each step holds whole
    microbatches.
    """
    training = config.training
    if training.rampup_batch_size is None:
        return config
    start, increment, samples = training.rampup_batch_size
    shown, size = f"--rampup-batch-size {start} {increment} {samples}", checked(training.global_batch_size)
    unit = checked(training.micro_batch_size) * config.parallel.data_parallel_size
    if start >= size or (size - start) % increment:
        raise UserError(f"{shown}: the start plus a whole number of increments must give --global-batch-size {size}.")
    if not training.decrease_batch_size_if_needed and (start % unit or increment % unit):
        raise UserError(
            f"{shown}: start and increment must be multiples of --micro-batch-size x data-parallel size = {unit}."
        )
    if start < unit:
        raise UserError(f"{shown}: the start is less than --micro-batch-size x data-parallel size = {unit}.")
    return config


def train_length(config: Config) -> Config:
    """Check that iterations or samples are given, and the learning rate's flags in the same unit."""
    training = config.training
    if training.skip_train:
        return config
    if (training.train_iters is None) == (training.train_samples is None):
        raise UserError("give exactly one of --train-iters and --train-samples.")
    by = "iters" if training.train_iters is not None else "samples"
    other = "samples" if by == "iters" else "iters"
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if getattr(training, f"{name}_{other}"):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag}-{other} does not go with --train-{by}; use {flag}-{by}.")
    return config


def learning_rate(config: Config) -> Config:
    training = config.training
    if training.lr is None:
        return config
    for flag, low in (("--min-lr", training.min_lr), ("--lr-warmup-init", training.lr_warmup_init)):
        if low > training.lr:
            raise UserError(f"{flag} {low:g} must not be more than --lr {training.lr:g}.")
    if training.override_opt_param_scheduler and training.use_checkpoint_opt_param_scheduler:
        raise UserError(
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler contradict each other."
        )
    return config


def warmup_and_decay(config: Config) -> Config:
    """Check that the warm-up is given once and is shorter than the decay, and that WSD's last phase has a length."""
    training = config.training
    if training.skip_train:
        return config
    by = "iters" if training.train_iters is not None else "samples"
    length = getattr(training, f"lr_decay_{by}")
    if length is None:
        length = getattr(training, f"train_{by}")
    warmup = getattr(training, f"lr_warmup_{by}")
    if training.lr_warmup_fraction is not None and warmup:
        raise UserError(f"--lr-warmup-fraction and --lr-warmup-{by} both say the warm-up; give one.")
    if warmup >= length:
        raise UserError(f"--lr-warmup-{by} {warmup} must be less than the {length} {by} over which the rate decays.")
    last = getattr(training, f"lr_wsd_decay_{by}")
    if training.lr_decay_style == "WSD" and (last is None or last > length):
        raise UserError(f"--lr-decay-style WSD needs --lr-wsd-decay-{by}, from 1 to {length}.")
    return config


def weight_decay(config: Config) -> Config:
    """Set a constant weight decay, or check one that grows from a first to a last value."""
    training = config.training
    start, end = training.start_weight_decay, training.end_weight_decay
    if training.weight_decay_incr_style == "constant":
        if start is not None or end is not None:
            raise UserError(
                "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine."
            )
        start = end = training.weight_decay
    elif start is None or end is None:
        raise UserError(
            f"--weight-decay-incr-style {training.weight_decay_incr_style} needs --start-weight-decay and "
            "--end-weight-decay."
        )
    if start > end:
        raise UserError(f"the weight decay from {start:g} to {end:g} must not fall.")
    return config.replace("training", start_weight_decay=start, end_weight_decay=end)


def precision(config: Config) -> Config:
    """Check for bf16 or fp16; gradients of bf16 are kept in float32 unless asked; NaNs are fp16's signal to its loss
    scale.
    """
    if config.parallel.ddp_average_in_collective and config.training.calculate_per_token_loss:
        raise UserError("--ddp-average-in-collective cannot be combined with --calculate-per-token-loss; give one.")
    training = config.training
    if training.fp16 and training.bf16:
        raise UserError("--fp16 and --bf16 name two precisions; give one.")
    if training.grad_reduce_in_bf16 and training.accumulate_allreduce_grads_in_fp32:
        raise UserError("--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 contradict each other.")
    if training.loss_scale is not None and not training.fp16:
        raise UserError(f"--loss-scale {training.loss_scale:g} needs --fp16.")
    adaptive = training.fp16 and training.loss_scale is None
    if adaptive and training.min_loss_scale > training.initial_loss_scale:
        raise UserError(
            f"--min-loss-scale {training.min_loss_scale:g} must not be more than --initial-loss-scale "
            f"{training.initial_loss_scale:g}."
        )
    if training.loss_scale_window % 1:  # a number of steps is compared with it for equality
        raise UserError(f"--loss-scale-window {training.loss_scale_window:g} must be a whole number of iterations.")
    if training.bf16 and not training.grad_reduce_in_bf16:
        config = config.replace("training", accumulate_allreduce_grads_in_fp32=True)
    if adaptive:
        config = config.replace("training", check_for_nan_in_loss_and_grad=False)
    return config


def optimizer_on_host(config: Config) -> Config:
    """Check --optimizer-cpu-offload, which megatron-core has for Adam's float32 weights and moments if weights are in
    half precision and kept by the distributed optimizer, which then keeps none of these on the device.
    """
    training = config.training
    if not training.optimizer_cpu_offload:
        if training.use_precision_aware_optimizer:
            raise UserError(
                "--use-precision-aware-optimizer needs --optimizer-cpu-offload: on the device the optimizer's state is "
                "kept in float32."
            )
        return config
    for flag, fits in (
        ("--optimizer adam", training.optimizer == "adam"),
        ("--bf16 or --fp16", training.bf16 or training.fp16),
        ("--use-distributed-optimizer", config.parallel.use_distributed_optimizer),
    ):
        if not fits:
            raise UserError(f"--optimizer-cpu-offload needs {flag}.")
    if training.enable_optimizer_post_validation:
        raise UserError(
            "--enable-optimizer-post-validation, which keeps state to go back to, cannot be combined with "
            "--optimizer-cpu-offload; give one."
        )
    return config


def recomputation(config: Config) -> Config:
    """Drop --recompute-method and --recompute-num-layers, with a warning, if alone: they say how, not whether, as in
    Megatron-LM.
    """
    options = config.recompute
    given = [name for name in ("recompute_method", "recompute_num_layers") if getattr(options, name) is not None]
    if options.granularity is not None or not given:
        return config
    flags = listing([f"--{name.replace('_', '-')}" for name in given])
    config = config.replace("recompute", recompute_method=None, recompute_num_layers=None)
    return config.warn(f"{flags} {'do' if len(given) > 1 else 'does'} nothing without --recompute-granularity full.")
