"""Checks which values must be given, and the range of single values."""

from __future__ import annotations

from helixpipe.common.errors import UserError
from helixpipe.common.flags import check_ranges
from megatron.pretrain.config import Config
from megatron.pretrain.config.container import GROUPS
from megatron.pretrain.validation.wording import listing

_TIMEOUT_MINUTES = 10.0
"""torch's timeout at least, by default: Megatron-LM's. Ranks wait for each other in more than steps: while checkpoints
are written, or kernels are compiled."""

_STEPS_OF_TIMEOUT = 3.0
"""torch's timeout at least, by default, in steps as they are predicted."""


def required_flags(config: Config) -> Config:
    """Check that the flags without a default are given."""
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
    """Check that every value lies in the range declared with its flag."""
    for group in (*GROUPS, "schedule_options"):
        options = getattr(config, group)
        if options is not None:
            check_ranges(options)
    return config


def timeouts(config: Config, step: float | None) -> Config:
    """Set torch's timeout and the watchdog's, once a step is planned. step: its predicted seconds; None: not known.

    torch's follows from the step if that is long: a rank may have to wait for one from end to end (the last in a
    pipeline for the first gradients of a tied weight, for example), the first step is slower than the others, and
    hardware's figures are a guess. A message waits no longer than that, since the host issues it a few ops before the
    device comes to it (`helixpipe.runtime.run_ahead`). The watchdog's is half of torch's by default; it must be less,
    or torch ends the job before the watchdog reports.
    """
    if config.parallel.distributed_timeout_minutes is None:
        minutes = max(_TIMEOUT_MINUTES, _STEPS_OF_TIMEOUT * (step or 0.0) / 60.0)
        config = config.replace("parallel", distributed_timeout_minutes=minutes)
    torchs, given = config.parallel.timeout_seconds, config.parallel.stall_timeout_seconds
    if given is None:
        return config.replace("parallel", stall_timeout_seconds=torchs / 2)
    if given >= torchs:
        raise UserError(
            f"--stall-timeout-seconds {given:g} must be less than --distributed-timeout-minutes, which are {torchs:g} "
            "seconds."
        )
    return config
