"""Decides when to stop early: a signal, --exit-duration-in-mins, --exit-interval, the same on all ranks."""

from __future__ import annotations

import enum
import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

from megatron.pretrain.config import Config


class StopReason(enum.IntEnum):
    """Why a run stops early; if ranks see different reasons, the greatest applies to all."""

    INTERVAL = 1
    DURATION = 2
    SIGHUP = 3
    SIGINT = 4
    SIGTERM = 5
    SIGUSR1 = 6


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""The signals of launchers and clusters, of Ctrl-C, of a closed terminal, and of SLURM's --signal=USR1."""

Agree = Callable[[int], int]
"""The greatest of all ranks' numbers, on every rank: a collective."""


class SignalFlag:
    """Context in which a signal sets `received` instead of killing the process; the handlers before it come back after.

    A second SIGINT is for who cannot wait: it does what it did before the context, which is to end the process. A
    signal that is ignored, as SIGHUP is under nohup, stays so. SIGUSR1 does not: launchers ignore it for themselves.
    With `active=False` (--no-exit-signal-handler) nothing is installed. Must be entered on the main thread.
    """

    def __init__(self, signals: Sequence[signal.Signals] = SIGNALS, *, active: bool = True) -> None:
        self.received: signal.Signals | None = None
        self._signals = signals if active else ()
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalFlag:
        for signum in self._signals:
            if signum == signal.SIGUSR1 or signal.getsignal(signum) != signal.SIG_IGN:
                self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, previous in self._previous.items():
            signal.signal(signum, previous)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        again = signum == signal.SIGINT == self.received
        if again and callable(self._previous[signal.SIGINT]):
            self._previous[signal.SIGINT](signum, frame)
        elif self.received is None:  # the launcher and the cluster may both send one: a second changes nothing
            self.received = signal.Signals(signum)


class StopCheck:
    """Asked by all ranks after each iteration; all get the same answer.

        with SignalFlag(active=config.training.exit_signal_handler) as flag:
            stop = StopCheck(config, flag, agree=all_ranks_max(device))
            ...
            reason = stop.after(iteration)     # a collective
            if reason is not None: save, print stop.message(reason, iteration), leave the loop

    started: `time.monotonic()` when the program began, from which --exit-duration-in-mins counts.
    """

    def __init__(
        self,
        config: Config,
        flag: SignalFlag,
        *,
        agree: Agree,
        started: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._training = config.training
        self._flag = flag
        self._agree = agree
        self._clock = clock
        self._started = clock() if started is None else started

    def after(self, iteration: int) -> StopReason | None:
        """Return the reason to stop after this iteration, or None. Collective."""
        agreed = self._agree(int(self.wish(iteration) or 0))
        return StopReason(agreed) if agreed else None

    def wish(self, iteration: int) -> StopReason | None:
        """Return this rank's own reason to stop; clocks and signals differ between ranks."""
        minutes, interval = self._training.exit_duration_in_mins, self._training.exit_interval
        if self._flag.received is not None:
            return StopReason[self._flag.received.name]
        if minutes is not None and self.minutes() > minutes:
            return StopReason.DURATION
        if interval is not None and iteration % interval == 0:
            return StopReason.INTERVAL
        return None

    def minutes(self) -> float:
        """Return the minutes since the start."""
        return (self._clock() - self._started) / 60.0

    def message(self, reason: StopReason, iteration: int) -> str:
        """Return Megatron-LM's line about a reason to stop."""
        if reason >= StopReason.SIGHUP:
            return f"exiting program after receiving {reason.name}."
        if reason is StopReason.DURATION:
            return f"exiting program after {self.minutes():.1f} minutes"
        return f"exiting program at iteration {iteration}"


def all_ranks_max(device: Any, group: Any = None) -> Agree:
    """Return an `Agree` over torch.distributed (`group`: default all ranks); the identity if that is
    not initialised.
    """
    import torch

    def agree(number: int) -> int:
        if not torch.distributed.is_initialized():
            return number
        value = torch.tensor([number], dtype=torch.int32, device=device)
        torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX, group=group)
        return int(value.item())

    return agree
