"""Defines the options that saving and loading depend on."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class CheckpointOptions:
    """Flags of the checkpoint group that saving and loading depend on; the texts are in `config/checkpoint.py`."""

    save: str | None = None
    load: str | None = None
    ckpt_step: int | None = None
    ckpt_format: str = "torch_dist"
    save_retain_interval: int | None = None
    overwrite_checkpoints: bool = False
    async_save: bool = False
    trust_checkpoint: bool = False
    resume_with_other: tuple[str, ...] = ()
    no_save_optim: bool = False
    no_save_rng: bool = False
    no_load_optim: bool = False
    no_load_rng: bool = False
    finetune: bool = False
    exit_on_missing_checkpoint: bool = False
    dist_ckpt_strictness: str = "assume_ok_unexpected"
    ckpt_fully_parallel_save: bool = True
    ckpt_fully_parallel_load: bool = False
    local_names: bool = False
    """Whether norms are saved under the names that megatron-core's local layers look for."""

    @classmethod
    def from_config(cls, config: Any) -> CheckpointOptions:
        """Return the options of a `megatron.pretrain.config.Config`."""
        names = [field.name for field in dataclasses.fields(cls) if field.name != "local_names"]
        values = {name: getattr(config.checkpoint, name) for name in names}
        return cls(**values, local_names=config.model.transformer_impl == "local")

    @property
    def continues(self) -> bool:
        """Whether --load and --save are the same folder, so that relaunching with the same flags continues the run."""
        return bool(self.save and self.load) and Path(self.save or "").resolve() == Path(self.load or "").resolve()


def missing(load: str, why: str) -> str:
    """Return the sentence about a --load without a checkpoint.

    Args:
        load: value of the flag.
        why: rest of the sentence where it may be a folder.
    """
    if re.fullmatch(r"[\w.-]+/[\w.-]+", load) and not Path(load).exists():
        return f"--load {load} is not there: give a local folder (a model of that name on a hub: download it first)."
    return f"--load {load} holds no checkpoint{why}."
