"""Checks every place a run will write to before it computes anything: a failure to write must not cost a run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from helixpipe.common.files import try_file, try_folder
from helixpipe.draw.formats import check_suffix
from megatron.pretrain.config import Config


def try_outputs(config: Config) -> None:
    """Try what this rank will write to. Raises UserError that names the flag and the reason.

    Nothing is left behind except the folder of a recorded step's files, which is created where it is missing.

    Rank 0 tries the folder of checkpoints and the files of a recorded step, the last rank, which logs, the folders of
    metrics. That every rank sees the folder of checkpoints is seen when it is locked.
    """
    logging, launch = config.logging, config.launch
    if launch.rank == 0:
        if config.checkpoint.save:
            try_folder("--save", config.checkpoint.save)
        if logging.timeline_png:
            check_suffix(logging.timeline_png)
        for flag, path in (("--record-timeline", logging.record_timeline), ("--timeline-png", logging.timeline_png)):
            if path:
                with suppress(OSError):  # try_file then names the flag and the reason
                    Path(path).parent.mkdir(parents=True, exist_ok=True)
                try_file(flag, path)
    if launch.rank == launch.world_size - 1:
        for flag, path in (
            ("--tensorboard-dir", logging.tensorboard_dir),
            ("--wandb-save-dir", logging.wandb_save_dir),
        ):
            if path:
                try_folder(flag, path)
