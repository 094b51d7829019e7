"""What threads of the host know of each other: what was done before one started, before it was joined, and before a
lock was released that they take (so by queues and conditions, too)."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from tests.runtime.happens_before.clocks import Clock, World
from tests.runtime.happens_before.kernels import Kernels


class Lock:
    """`threading.Lock`."""

    def __init__(self, world: World):
        self._world, self._own = world, _thread.allocate_lock()
        self._told: Clock = {}

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        got = self._own.acquire(blocking, timeout)
        if got:
            self._world.thread.learn(self._told)
        return got

    def release(self) -> None:
        self._told = dict(self._world.thread.known)
        self._own.release()

    def locked(self) -> bool:
        return self._own.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


@contextmanager
def replaced(world: World, kernels: Kernels) -> Iterator[None]:
    """Threads and locks that are made from now on are followed."""
    start, run, join = threading.Thread.start, threading.Thread.run, threading.Thread.join
    told: dict[int, Clock] = {}
    """What a thread is told as it starts, later what it knows as it ends."""
    turns: dict[int, int] = {}

    def start_followed(thread: threading.Thread) -> None:
        world.turned()
        told[id(thread)], turns[id(thread)] = dict(world.thread.known), world.turn
        start(thread)

    def run_followed(thread: threading.Thread) -> None:
        world.thread.name = f"thread {thread.name}"
        world.thread.learn(told[id(thread)])
        world.turn_at_start = turns[id(thread)]
        try:
            with kernels.alike():
                run(thread)
        finally:
            told[id(thread)] = dict(world.thread.known)

    def join_followed(thread: threading.Thread, timeout: float | None = None) -> None:
        world.turned()
        join(thread, timeout)
        if id(thread) in told and not thread.is_alive():
            world.thread.learn(told[id(thread)])

    replacements: dict[str, Any] = {"start": start_followed, "run": run_followed, "join": join_followed}
    with ExitStack() as stack:
        for name, value in replacements.items():
            stack.enter_context(mock.patch.object(threading.Thread, name, value))
        stack.enter_context(mock.patch.object(threading, "Lock", lambda: Lock(world)))
        yield
