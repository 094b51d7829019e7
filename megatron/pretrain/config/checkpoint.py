"""Flags for saving and loading checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from helixpipe.common.flags import option


@dataclass(frozen=True)
class CheckpointConfig:
    """Flags of checkpoints: what is saved, where and when, and what a run starts from."""

    save: str | None = option(None, "Folder to save checkpoints in.", metavar="DIR")
    save_interval: int | None = option(
        None,
        "Iterations between checkpoints; by default only the end of training is saved.",
        flags=["--save-interval", "--persistent-save-interval"],
        at_least=1,
    )
    save_retain_interval: int | None = option(
        None, "Keep only the newest checkpoint and those at multiples of this; by default all are kept.", at_least=1
    )
    overwrite_checkpoints: bool = option(
        False, "Replace checkpoints that are in --save already, without --load of the same folder."
    )
    async_save: bool = option(
        False, "Train on while a checkpoint is written from a copy of the state in the host's memory."
    )
    in_memory_checkpoint_interval: int | None = option(
        None,
        "Iterations between snapshots in the hosts' memory, a rank's own and a copy of a neighbour's, from which it "
        "goes on when ranks are lost; 1: no finished step is lost (docs/resilience.md; by default there are none).",
        at_least=1,
    )
    load: str | None = option(
        None, "Folder to load the newest usable checkpoint from, or one iter_N in it.", metavar="DIR"
    )
    ckpt_step: int | None = option(None, "Load the checkpoint of this iteration instead of the newest.", at_least=1)
    trust_checkpoint: bool = option(
        False, "Load also what is not known to be part of a checkpoint, which may run code of whoever wrote it."
    )
    resume_with_other: tuple[str, ...] = option(
        (),
        "Resume although the checkpoint's tokenizer, or its data or a flag that decides the samples and their order "
        "(such as --seed, --seq-length, --split), is another.",
        choices=("tokenizer", "data"),
        nargs="+",
    )
    no_save_optim: bool = option(False, "Leave the optimizer out of checkpoints.")
    no_save_rng: bool = option(False, "Leave the random state out of checkpoints.")
    no_load_optim: bool = option(False, "Do not load the optimizer.")
    no_load_rng: bool = option(False, "Do not load the random state.")
    finetune: bool = option(False, "Load only the weights and start at iteration 0.")
    use_checkpoint_args: bool = option(False, "Take the model's shape from the checkpoint instead of from the flags.")
    exit_on_missing_checkpoint: bool = option(False, "Stop when --load holds no checkpoint instead of starting afresh.")
    ckpt_format: Literal["torch_dist"] = option("torch_dist", "Checkpoint format.")
    dist_ckpt_strictness: Literal[
        "assume_ok_unexpected",
        "log_unexpected",
        "log_all",
        "raise_unexpected",
        "raise_all",
        "return_unexpected",
        "return_all",
        "ignore_all",
    ] = option("assume_ok_unexpected", "What to do about keys that are in only one of checkpoint and model.")
    ckpt_fully_parallel_save: bool = option(
        True, "Do not share the writing between data-parallel ranks.", flags=["--no-ckpt-fully-parallel-save"]
    )
    ckpt_fully_parallel_load: bool = option(False, "Share the reading between data-parallel ranks.")
