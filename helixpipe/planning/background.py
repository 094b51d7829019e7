"""Plans made in a process of their own, while this one trains.

    python -m helixpipe.planning.background FD     (by `BackgroundPlanner` alone)

The child is a fresh interpreter, not a fork: a process with threads, CUDA and open connections cannot be forked safely.
It takes what makes plans first, then sizes of steps, and answers each with a plan, all pickled, until its end of the
pipe closes.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from helixpipe.common.child import python_command
from helixpipe.common.output import complain
from helixpipe.planning.plan import Size

NICENESS = 5
"""The niceness of the child: without more cores than ranks, it plans while the ranks wait for each other."""

PATIENCE = 10.0
"""Seconds that a plan which is not there yet is waited for, before it is made here instead."""


Made = TypeVar("Made")


class BackgroundPlanner(Generic[Size, Made]):
    """A planner that may be told early what will be asked for.

    make: from the size of a step to its plan, a `Plan` or what holds more; anything that can be pickled, such as a
    function of a module. Plans that were not announced, that the child could not make, or that it did not make within
    `patience` seconds, are made here. say: told once that the child is gone, and each time that it is late.
    """

    def __init__(self, make: Callable[[Size], Made], patience: float = PATIENCE, say: Callable[[str], None] = complain):
        self._make, self._patience, self._say = make, patience, say
        self._answers: dict[Size, Made | None] = {}
        self._announced: set[Size] = set()
        ours, theirs = Pipe()
        self._pipe: Connection | None = ours
        command = python_command("helixpipe.planning.background", str(theirs.fileno()))
        self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        theirs.close()
        self._send(make)

    def announce(self, size: Size) -> None:
        """Have the child make the plan of a step of this size, which will be asked for."""
        if self._pipe is not None and size not in self._announced:
            self._announced.add(size)
            self._send(size)

    def plan(self, size: Size, give_up: Callable[[], bool] | None = None, instead: Size | None = None) -> Made:
        """Return the announced plan, or one made here. An announcement is good for one plan.

        give_up: polled a few times a second, whether to stop waiting for the child; None: after `patience` seconds,
        with a warning. instead: the size to plan here then, such as the same one quickly.
        """
        if size not in self._announced:
            return self._make(size)
        end = time.monotonic() + self._patience
        while size not in self._answers and self._pipe is not None:
            if self._pipe.poll(0.05):
                self._receive()
            elif give_up is not None and give_up():
                break
            elif give_up is None and time.monotonic() > end:
                self._say(f"the planner was not done within {self._patience:g} s, so its plan is made here.")
                break
        self._announced.discard(size)
        plan = self._answers.pop(size, None)
        return plan if plan is not None else self._make(size if instead is None else instead)

    def close(self) -> None:
        """End the child."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        self.process.terminate()
        self.process.wait()

    def _send(self, value: Any) -> None:
        try:
            if self._pipe is not None:
                self._pipe.send_bytes(pickle.dumps(value))
        except OSError:
            self._lose()

    def _receive(self) -> None:
        """Take one answer in."""
        assert self._pipe is not None
        try:
            size, plan = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            self._lose()
            return
        if size in self._announced:  # else it is late
            self._answers[size] = plan

    def _lose(self) -> None:
        self.close()
        status = self.process.returncode
        self._say(f"the planner's process has ended (status {status}): plans are made here from now on.")


def serve(descriptor: int) -> None:
    """Serve in the child until the other end of the pipe closes. A plan that cannot be made is answered with None; the
    parent makes it again and gets the error.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other end's matter
    with suppress(OSError):
        os.nice(NICENESS)
    pipe = Connection(descriptor)
    with suppress(EOFError, OSError):
        make = pickle.loads(pipe.recv_bytes())
        while True:
            size = pickle.loads(pipe.recv_bytes())
            try:
                plan = make(size)
            except Exception:
                plan = None
            pipe.send_bytes(pickle.dumps((size, plan), pickle.HIGHEST_PROTOCOL))


if __name__ == "__main__":
    serve(int(sys.argv[1]))
