"""Data, checkpoints, profiles: what the run reads and writes."""

from __future__ import annotations

import re
from pathlib import PurePath

from helixpipe.common.errors import UserError
from megatron.pretrain.config import Config
from megatron.pretrain.data.options import DataOptions, parse_split
from megatron.pretrain.validation.wording import checked


def data_source(config: Config) -> Config:
    """Check that there is one well-formed source of data. --split divides --data-path, so --mock-data drops it."""
    if config.data.mock_data:
        config = config.replace("data", split=None)
    options = DataOptions.from_flags(
        config.data, seq_length=checked(config.model.seq_length), seed=config.training.seed
    )
    if options.split is not None:
        parse_split(options.split)
    return config


def tokenizer(config: Config) -> Config:
    """Set the default tokenizer, GPT2BPETokenizer as in Megatron-LM's pretrain_gpt.py."""
    data = config.data
    return config if data.tokenizer_type is not None else config.replace("data", tokenizer_type="GPT2BPETokenizer")


def one_iteration(config: Config) -> Config:
    """Read --load DIR/iter_0000004, a checkpoint's own folder, as --load DIR --ckpt-step 4."""
    checkpoint = config.checkpoint
    path = PurePath(checkpoint.load or "")
    match = re.fullmatch(r"iter_(\d{7,})", path.name)
    if not match:
        return config
    if checkpoint.ckpt_step not in (None, int(match[1])):
        raise UserError(f"--load {path} and --ckpt-step {checkpoint.ckpt_step} name two iterations; give one.")
    return config.replace("checkpoint", load=str(path.parent), ckpt_step=int(match[1]))


def checkpoints(config: Config) -> Config:
    checkpoint = config.checkpoint
    interval, retain = checkpoint.save_interval, checkpoint.save_retain_interval
    if interval is not None and checkpoint.save is None:
        config = config.warn(f"--save-interval {interval} does nothing without --save.")
    if retain is not None and (interval is None or retain % interval):
        raise UserError(
            f"--save-retain-interval {retain} must be a multiple of --save-interval {interval or '(not given)'}."
        )
    for flag, needs in (
        ("--ckpt-step", checkpoint.ckpt_step),
        ("--use-checkpoint-args", checkpoint.use_checkpoint_args),
    ):
        if needs and checkpoint.load is None:
            raise UserError(f"{flag} needs --load.")
    return config


def profiling(config: Config) -> Config:
    logging = config.logging
    if logging.profile and logging.profile_step_start >= logging.profile_step_end:
        raise UserError(
            f"--profile-step-start {logging.profile_step_start} must be less than "
            f"--profile-step-end {logging.profile_step_end}."
        )
    return config
