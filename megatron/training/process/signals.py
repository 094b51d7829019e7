"""When to stop before the end: SIGTERM, --exit-duration-in-mins, --exit-interval, decided alike on all ranks."""

from __future__ import annotations

import enum
import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from megatron.training.config import Config


class StopReason(enum.IntEnum):
    """Why a run stops early; where ranks see different reasons, the greatest holds for all."""

    INTERVAL = 1
    DURATION = 2
    SIGNAL = 3


Agree = Callable[[int], int]
"""The greatest of all ranks' numbers, on every rank: a collective."""


class SignalFlag:
    """Context in which a signal sets `received` instead of killing the process; the handler before it comes back after.

    With `active=False` (--no-exit-signal-handler) nothing is installed. Must be entered on the main thread.
    """

    def __init__(self, signum: signal.Signals = signal.SIGTERM, *, active: bool = True) -> None:
        self.received = False
        self._signum = signum
        self._active = active
        self._previous: Any = None

    def __enter__(self) -> SignalFlag:
        if self._active:
            self._previous = signal.signal(self._signum, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active:
            signal.signal(self._signum, self._previous)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.received = True  # the launcher and the cluster may both send it: a second one changes nothing


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
        """Whether to stop after this iteration, and why. Collective."""
        agreed = self._agree(int(self.wish(iteration) or 0))
        return StopReason(agreed) if agreed else None

    def wish(self, iteration: int) -> StopReason | None:
        """What this rank alone would do; clocks and signals differ between ranks."""
        minutes, interval = self._training.exit_duration_in_mins, self._training.exit_interval
        if self._flag.received:
            return StopReason.SIGNAL
        if minutes is not None and self.minutes() > minutes:
            return StopReason.DURATION
        if interval is not None and iteration % interval == 0:
            return StopReason.INTERVAL
        return None

    def minutes(self) -> float:
        """Minutes since the start."""
        return (self._clock() - self._started) / 60.0

    def message(self, reason: StopReason, iteration: int) -> str:
        """Megatron-LM's line about it."""
        if reason is StopReason.SIGNAL:
            return "exiting program after receiving SIGTERM."
        if reason is StopReason.DURATION:
            return f"exiting program after {self.minutes():.1f} minutes"
        return f"exiting program at iteration {iteration}"


def all_ranks_max(device: Any, group: Any = None) -> Agree:
    """An `Agree` over torch.distributed (`group`: default all ranks); the identity where it is not initialised."""
    import torch

    def agree(number: int) -> int:
        if not torch.distributed.is_initialized():
            return number
        value = torch.tensor([number], dtype=torch.int32, device=device)
        torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX, group=group)
        return int(value.item())

    return agree
