"""What must be given, and the range of single values."""

from __future__ import annotations

from helixpipe.common.errors import UserError
from megatron.training.config import Config
from megatron.training.validation.wording import listing

_AT_LEAST_1 = {
    "model": (
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "kv_channels",
        "num_query_groups",
        "seq_length",
        "max_position_embeddings",
        "rotary_base",
        "make_vocab_size_divisible_by",
    ),
    "parallel": (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "ddp_bucket_size",
    ),
    "training": (
        "micro_batch_size",
        "global_batch_size",
        "train_iters",
        "train_samples",
        "lr_decay_iters",
        "lr_decay_samples",
        "exit_interval",
    ),
    "data": ("vocab_size", "padded_vocab_size", "max_tokens"),
    "checkpoint": ("save_interval", "save_retain_interval", "ckpt_step"),
    "logging": ("log_interval", "tensorboard_log_interval", "tensorboard_queue_size"),
}
_AT_LEAST_0 = {
    "model": ("chunk_size", "loss_chunk_size"),
    "training": ("clip_grad", "exit_duration_in_mins", "seed"),
    "data": ("num_workers",),
    "logging": ("eval_interval", "eval_iters"),
}

_TIMEOUT_MINUTES = 10.0
"""torch's timeout at least, by default: Megatron-LM's. Ranks wait for each other in more than steps: while checkpoints
are written, or kernels are compiled."""

_STEPS_OF_TIMEOUT = 3.0
"""torch's timeout at least, by default, in steps as they are predicted."""


def required_flags(config: Config) -> Config:
    """What has no default."""
    needed: dict[str, float | None] = {
        "--num-layers": config.model.num_layers,
        "--hidden-size": config.model.hidden_size,
        "--num-attention-heads": config.model.num_attention_heads,
        "--seq-length": config.model.seq_length,
        "--micro-batch-size": config.training.micro_batch_size,
    }
    if not config.training.skip_train:
        needed["--lr"] = config.training.lr
    missing = [flag for flag, value in needed.items() if value is None]
    if missing:
        raise UserError(f"{listing(missing)} must be given.")
    return config


def ranges(config: Config) -> Config:
    """Sizes, counts and intervals are not 0 or negative; probabilities are probabilities."""
    for least, table in ((1, _AT_LEAST_1), (0, _AT_LEAST_0)):
        for group, names in table.items():
            for name in names:
                value = getattr(getattr(config, group), name)
                if value is not None and value < least:
                    raise UserError(f"{_flag(name)} {value} must be at least {least}.")
    for name in ("attention_dropout", "hidden_dropout"):
        value = getattr(config.model, name)
        if not 0 <= value < 1:
            raise UserError(f"{_flag(name)} {value:g} must be at least 0 and less than 1.")
    if not 0 < config.model.rotary_percent <= 1:
        raise UserError(f"--rotary-percent {config.model.rotary_percent:g} must be more than 0 and at most 1.")
    if config.parallel.memory_limit is not None and not config.parallel.memory_limit > 0:
        raise UserError(f"--memory-limit {config.parallel.memory_limit:g} must be more than 0 GiB.")
    if config.parallel.host_memory is not None and not config.parallel.host_memory > 0:
        raise UserError(f"--host-memory {config.parallel.host_memory:g} must be more than 0 GiB.")
    minutes = config.parallel.distributed_timeout_minutes
    if minutes is not None and not minutes > 0:
        raise UserError(f"--distributed-timeout-minutes {minutes:g} must be more than 0.")
    return config


def timeouts(config: Config, step: float | None) -> Config:
    """torch's timeout and the watchdog's, once a step is planned. step: the seconds it takes on paper; None: not known.

    torch's follows from the step where that is long: a rank may have to wait for one from end to end (the last in a
    pipeline for the first gradients of a tied weight, for example), the first step is slower than the others, and
    hardware's figures are a guess. A message waits no longer than that, since the host issues it a few ops before the
    device comes to it (`helixpipe.runtime.run_ahead`). The watchdog's is half of torch's by default; less than that in
    any case, or it would never be heard of.
    """
    if config.parallel.distributed_timeout_minutes is None:
        minutes = max(_TIMEOUT_MINUTES, _STEPS_OF_TIMEOUT * (step or 0.0) / 60.0)
        config = config.replace("parallel", distributed_timeout_minutes=minutes)
    torchs, given = config.parallel.timeout_seconds, config.parallel.stall_timeout_seconds
    if given is None:
        return config.replace("parallel", stall_timeout_seconds=torchs / 2)
    if not 0 <= given < torchs:
        raise UserError(
            f"--stall-timeout-seconds {given:g} must be less than --distributed-timeout-minutes, which are {torchs:g} "
            "seconds, and at least 0 (never)."
        )
    return config


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
