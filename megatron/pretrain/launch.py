"""The outermost layer of the program: one sentence for a user's mistake, a quick end on every rank for anything
else."""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from helixpipe.common.errors import UserError
from helixpipe.planning.plan import Plans
from megatron.pretrain.config import CheckpointConfig, Config
from megatron.pretrain.process.lifetime import end_with_parent
from megatron.pretrain.process.output import complain

_LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Parts of gloo's messages when the process at the other end is gone."""

_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "HELIXPIPE_LAUNCHER")
"""Variables that torchrun and `helixpipe train` set, which a rank does not outlive."""

_WAIT_FOR_RANK_0 = 3.0  # seconds; torchrun ends the others as soon as rank 0 has ended


Work = Callable[[Config, Plans[int], float], None]
"""What a job does with its configuration, its planner and the time it began."""


def run(started: float, argv: Sequence[str] | None = None, work: Work | None = None) -> int:
    """Parse, train, and return the exit status. started: `time.monotonic()` when the program began. work: what to do
    instead of training.

    After a failure the process ends at once, without waiting for other ranks: their connections to it close, which ends
    them too. A mistake that all ranks see is told once, by rank 0.
    """
    if any(name in os.environ for name in _LAUNCHERS):
        end_with_parent()  # a rank that no launcher watches would train on, against its successor
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # torch's profiler tells of every start and stop
    gc.disable()  # while much is imported and all of it stays; `pretrain` turns it on again
    from megatron.pretrain.arguments import parse_and_plan

    try:
        config, plans = parse_and_plan(argv, load_checkpoint_args=_saved_arguments)
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            complain(f"helixpipe: {error}")
        else:
            time.sleep(_WAIT_FOR_RANK_0)  # the first rank to end makes torchrun stop the others: let rank 0 speak
            complain(f"[Rank {os.environ['RANK']}] helixpipe: {error}")  # rank 0 had nothing to say
        return 2

    from megatron.pretrain.pretrain import pretrain

    try:
        (work or pretrain)(config, plans, started)
    except UserError as error:
        _tell(error)
        _leave(error.status)
    except KeyboardInterrupt:
        _leave(130)
    except BaseException as error:
        _explain(error, config, plans)
        _leave(1)
    return 0


def _saved_arguments(options: CheckpointConfig) -> dict[str, Any] | None:
    from helixpipe.model.device import prepare

    prepare()
    from megatron.pretrain.checkpoint.saved_arguments import read_arguments

    return read_arguments(options.load, options.ckpt_step, options.trust_checkpoint) if options.load else None


def _tell(error: UserError) -> None:
    """Print a sentence that several ranks may have, once: whoever comes first, as the job's store knows."""
    from megatron.pretrain.process.meeting import MeetingError

    alone = isinstance(error, MeetingError) and os.environ.get("LOCAL_RANK", "0") == "0"
    if alone or _first_to_say(str(error)):
        complain(f"helixpipe: {error}")


def _first_to_say(sentence: str) -> bool:
    import torch.distributed as dist

    if not dist.is_initialized():
        return os.environ.get("RANK", "0") == "0"
    try:
        store = dist.distributed_c10d._get_default_store()
        return bool(store.add(f"told: {sentence}", 1) == 1)
    except Exception:  # the store may be gone with the rank that held it
        return True


def _cause(error: BaseException | None, kind: type[Exception]) -> BaseException | None:
    """The error of that kind that led to this one, or itself; None where there is none."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def _explain(error: BaseException, config: Config, plans: Plans[int]) -> None:
    from torch import OutOfMemoryError

    from helixpipe.runtime.executor import ExecutionError

    rank, cause = config.launch.rank, _cause(error, OutOfMemoryError)
    if cause is not None:
        from megatron.pretrain.plan.out_of_memory import out_of_memory

        if _first_to_say("out of memory"):
            complain(f"helixpipe: rank {rank}: {out_of_memory(config, plans, str(cause))}")
    elif any(words in str(error) for words in _LOST_CONNECTION):
        sentence = (
            "lost the connection to another rank, which has ended; if it said why, that is printed above or below."
        )
        complain(f"[Rank {rank}] {sentence}")
    elif isinstance(error, ExecutionError):
        complain(f"[Rank {rank}] {error}")
    else:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        complain(f"[Rank {rank}] {text}")


def _leave(status: int) -> None:
    """End this process now: neither process groups nor loader processes may hold it up."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
