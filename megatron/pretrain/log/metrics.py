"""TensorBoard and Weights & Biases, under Megatron-LM's tags."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from helixpipe.common.errors import UserError
from helixpipe.common.output import complain
from megatron.pretrain.config import Config


class MetricsWriter:
    """Writes scalars where the flags say: nowhere, TensorBoard, Weights & Biases. Build it with `from_config`."""

    def __init__(self, tensorboard: Any = None, wandb_run: Any = None) -> None:
        self.tensorboard = tensorboard
        self._wandb = wandb_run

    @classmethod
    def from_config(cls, config: Config) -> MetricsWriter:
        """Return the writers of the last rank; a writer of nothing on the others.

        Call it on every rank. Raises UserError on all of them when a package that the flags need is not installed.
        """
        logging, launch = config.logging, config.launch
        for flag, value, package in (
            ("--tensorboard-dir", logging.tensorboard_dir, "tensorboard"),
            ("--wandb-project", logging.wandb_project, "wandb"),
        ):
            if value and importlib.util.find_spec(package) is None:
                raise UserError(
                    f"{flag} {value} needs the package {package}, which is not installed (pip install {package})."
                )
        if launch.rank != launch.world_size - 1:
            return cls()
        tensorboard = wandb_run = None
        if logging.tensorboard_dir:
            from torch.utils.tensorboard import SummaryWriter

            tensorboard = SummaryWriter(log_dir=logging.tensorboard_dir, max_queue=logging.tensorboard_queue_size)
            tensorboard.add_text("arguments", "\n".join(f"    {k} = {v}" for k, v in sorted(config.flat().items())))
        if logging.wandb_project:
            import wandb  # type: ignore[import-not-found,unused-ignore]  # optional

            wandb_run = wandb.init(
                project=logging.wandb_project,
                entity=logging.wandb_entity or None,
                name=logging.wandb_exp_name or None,
                dir=logging.wandb_save_dir or config.checkpoint.save or None,
                config=config.flat(),
            )
        return cls(tensorboard, wandb_run)

    @property
    def active(self) -> bool:
        """Whether anything is written; if not, values need not be computed."""
        return self.tensorboard is not None or self._wandb is not None

    def scalars(self, values: Mapping[str, float], iteration: int, consumed_samples: int | None = None) -> None:
        """Write values by tag; with `consumed_samples` also `TAG vs samples` (TensorBoard only).

        A full disk, which TensorBoard's own thread meets and the next call is told of, ends TensorBoard, not the run.
        """
        if self.tensorboard is not None:
            try:
                for tag, value in values.items():
                    self.tensorboard.add_scalar(tag, value, iteration)
                    if consumed_samples is not None:
                        self.tensorboard.add_scalar(f"{tag} vs samples", value, consumed_samples)
            except OSError as error:
                self._give_up(error)
        if self._wandb is not None:
            self._wandb.log(dict(values), step=iteration)

    def _give_up(self, error: OSError) -> None:
        self.tensorboard = None
        complain(f"WARNING: --tensorboard-dir cannot be written ({error.strerror or error}): nothing more goes there.")

    def close(self) -> None:
        """Write what is held back and close."""
        if self.tensorboard is not None:
            try:
                self.tensorboard.close()
            except OSError as error:
                self._give_up(error)
        if self._wandb is not None:
            self._wandb.finish()
