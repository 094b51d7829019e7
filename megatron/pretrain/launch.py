"""The outermost layer of the program: one sentence for a user's mistake, a quick end on every rank for anything
else."""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from helixpipe.common import memory
from helixpipe.common.command import FAILED, INTERRUPTED, run_command
from helixpipe.common.errors import UserError
from helixpipe.common.output import complain
from helixpipe.planning.plan import Plans
from megatron.pretrain.config import CheckpointConfig, Config
from megatron.pretrain.process.groups import RankGroups
from megatron.pretrain.process.lifetime import end_with_parent, has_launcher
from megatron.pretrain.process.once import say_once, tell
from megatron.pretrain.process.slurm import adopt_task

_LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Parts of gloo's messages when the process at the other end is gone."""

_LOST = 76
"""Exit status of a rank that only lost the connection to another one. It tells launchers which rank is at fault."""

_TOLD = 15.0  # seconds for the launcher to tell a rank that has lost others that it goes on without them

Work = Callable[[Config, Plans[int], float], None]
"""The work of a job, called with its configuration, its planner and its start time."""


def run(started: float, argv: Sequence[str] | None = None, work: Work | None = None) -> int:
    """Parse, train, and return the exit status. started: `time.monotonic()` when the program began. work: what to do
    instead of training.

    After a failure the process ends at once, without waiting for other ranks: their connections to it close, which ends
    them too. A mistake that several ranks see is told once.
    """
    return run_command("helixpipe", lambda: _run(started, argv, work), tell)


def _run(started: float, argv: Sequence[str] | None, work: Work | None) -> int:
    adopt_task(os.environ)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # SLURM's --signal=USR1 must not kill a rank that still starts
    if has_launcher():
        end_with_parent()  # a rank that no launcher watches would train on, against its successor
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # torch's profiler tells of every start and stop
    gc.disable()  # while much is imported and all of it stays; `pretrain` turns it on again
    groups = RankGroups.of_launcher()
    if groups is not None and "RANK" not in os.environ:
        from megatron.pretrain.pretrain import import_all

        import_all()
        os.environ.update(groups.next())
    while not _run_in_group(started, argv, work, groups):
        assert groups is not None
        os.environ.update(groups.next())
    return 0


def _run_in_group(started: float, argv: Sequence[str] | None, work: Work | None, groups: RankGroups | None) -> bool:
    """Parse, and train among the ranks that the environment tells of. False: this rank has left them, and goes on
    among others. All that training has made is gone then, but for its snapshots in the host's memory."""
    from megatron.pretrain.arguments import parse_and_plan

    config, plans = parse_and_plan(argv, load_checkpoint_args=saved_arguments)

    from megatron.pretrain.pretrain import pretrain
    from megatron.pretrain.process.parallel import can_leave, leave_groups

    try:
        if groups is not None and can_leave(config):
            groups.stay()
        if work is None:
            work = pretrain if groups is None else partial(pretrain, leaving=groups.leaving)
        work(config, plans, started)
    except KeyboardInterrupt:
        _leave(INTERRUPTED)
    except BaseException as error:
        if groups is None or not groups.leaving(0.0 if isinstance(error, UserError) else _TOLD):
            _fail(error, config, plans)
    else:
        return True
    leave_groups()
    return False


def _fail(error: BaseException, config: Config, plans: Plans[int]) -> None:
    """End this process with what is to be said of an error."""
    if isinstance(error, UserError):
        tell("helixpipe", error)
        _leave(error.status)
    _leave(_explain(error, config, plans))


def saved_arguments(options: CheckpointConfig) -> dict[str, Any] | None:
    """Return the `args` of the checkpoint that --load names; None, without importing torch, if nothing is there."""
    if not options.load or not os.path.exists(options.load):
        return None
    from helixpipe.model.device import prepare

    prepare()
    from megatron.pretrain.checkpoint.saved_arguments import read_arguments

    return read_arguments(options.load, options.ckpt_step, options.trust_checkpoint)


def _short_of_memory(error: BaseException | None) -> tuple[str, str] | None:
    """Return which memory was exhausted and the message, from the error or one of its causes; else None."""
    while error is not None:
        if (short := memory.out_of_memory(error)) is not None:
            return short, str(error)
        error = error.__cause__ or error.__context__
    return None


def _explain(error: BaseException, config: Config, plans: Plans[int]) -> int:
    """Say what went wrong and return the exit status."""
    from helixpipe.runtime.executor import ExecutionError

    rank, memory_error = config.launch.rank, _short_of_memory(error)
    if memory_error is not None:
        from helixpipe.model.device import device
        from megatron.pretrain.plan.out_of_memory import out_of_memory

        sentence = out_of_memory(config, plans, memory_error[1], memory_error[0], device().type == "cuda")
        say_once(f"helixpipe: rank {rank}: {sentence}", "out of memory")
    elif any(words in str(error) for words in _LOST_CONNECTION):
        sentence = (
            "lost the connection to another rank, which has ended; if it said why, that is printed above or below."
        )
        complain(f"[Rank {rank}] {sentence}")
        return _LOST
    elif isinstance(error, ExecutionError):
        complain(f"[Rank {rank}] {error}")
    else:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        complain(f"[Rank {rank}] {text}")
    return FAILED


def _leave(status: int) -> None:
    """End this process now: neither process groups nor loader processes may hold it up."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader is gone, or the disk is full
            stream.flush()
    os._exit(status)
