"""Command lines of their own flags, and any of pretrain_gpt.py's."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from helixpipe.common.command import run_command
from helixpipe.common.errors import UserError
from helixpipe.common.flags import FlagParser, add_dataclass_arguments, check_ranges, dataclass_from_namespace
from megatron.pretrain.config import Config
from megatron.pretrain.launch import run
from megatron.pretrain.process.once import tell

Options = TypeVar("Options")

CHECKPOINT_FLAGS = (
    "--use-checkpoint-args",
    *("--micro-batch-size", "1", "--train-iters", "1", "--lr", "0", "--mock-data"),
    *("--no-load-optim", "--no-load-rng"),
)
"""Flags of pretrain_gpt.py beside --load: the model is the checkpoint's, of which weights alone are loaded; what only
training needs has values without effect."""


def run_with_model(
    options: type[Options],
    description: str,
    work: Callable[[Any, Options], None],
    argv: Sequence[str] | None = None,
) -> int:
    """Parse, open the model of --load, do `work(model, options)` on every rank, and return the exit status."""
    return run_command("helixpipe", lambda: _run(options, description, work, argv), tell)


def _run(
    options: type[Options], description: str, work: Callable[[Any, Options], None], argv: Sequence[str] | None
) -> int:
    started = time.monotonic()
    parser = FlagParser(
        description=description, epilog="Besides these, any flag of pretrain_gpt.py; --load FOLDER is needed."
    )
    add_dataclass_arguments(parser, options)
    namespace, rest = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    chosen = dataclass_from_namespace(options, namespace)
    check_ranges(chosen)
    if not any(word.partition("=")[0] == "--load" for word in rest):
        raise UserError("--load is needed: the folder of the model's checkpoints.")

    def job(config: Config, plans: Any, began: float) -> None:
        import torch.distributed as dist

        from megatron.pretrain.inference.model import open_model

        model = open_model(config)
        work(model, chosen)
        dist.barrier()
        dist.destroy_process_group()

    return run(started, [*CHECKPOINT_FLAGS, *rest], job)
