"""Tells who knows what of whom: vector clocks of streams, communicators and threads of the host, and what was found
wrong.

Everything that does one thing after another is an actor. A step of an actor is known to another once that has waited
for it, for an event recorded after it, or for somebody who knows it. Two accesses to the same memory are ordered if the
later actor knows the step of the earlier; nothing else orders them, however they happened to run here.
"""

from __future__ import annotations

import _thread
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

Clock = dict[int, int]
"""The last step known of each actor, by its number."""

PROGRAM = ("helixpipe", "pretrain", "happens_before")
"""Folders whose lines are worth naming in a report."""


class Actor:
    """A stream, a communicator or a thread of the host. known: what has happened before its next step. version: changes
    whenever that does."""

    def __init__(self, number: int, name: str):
        self.number, self.name = number, name
        self.time = 0
        self.known: Clock = {}
        self.version = 0
        self._heard = (-1, -1)

    def step(self) -> None:
        self.time += 1
        self.version += 1
        self.known[self.number] = self.time

    def learn(self, clock: Clock) -> None:
        """Wait for what a clock says. It is a step of its own: who knew this actor before does not know it."""
        known, new = self.known, False
        for number, step in clock.items():
            if known.get(number, 0) < step:
                known[number] = step
                new = True
        if new:
            self.step()

    def hear(self, thread: Actor) -> None:
        """Learn what the thread that launches something knows."""
        if self._heard != (thread.number, thread.version):
            self._heard = thread.number, thread.version
            self.learn(thread.known)

    def knows(self, number: int, step: int) -> bool:
        return number == self.number or self.known.get(number, 0) >= step


class World:
    """All actors of one process. findings: what was wrong, and how often. kernels: how many were launched.

    compute: the default stream. seed: of what is up to chance, such as whether a poll finds a send done.
    """

    def __init__(self, seed: int = 0):
        self.actors: list[Actor] = []
        self.findings: Counter[str] = Counter()
        self.kernels = 0
        self.random = random.Random(seed)
        self.lock = _thread.RLock()
        """Threads take turns here; nobody learns anything by it."""
        self.others: Clock = {}
        """What any thread but the main one has waited for."""
        self.turn = 0
        """Of the main thread: how often it has done something that others may notice."""
        self._here = threading.local()
        self.main = self._here.thread = self.actor("the main thread")
        self.compute = self.actor("compute")

    def actor(self, name: str) -> Actor:
        with self.lock:
            self.actors.append(Actor(len(self.actors), name))
            return self.actors[-1]

    @property
    def thread(self) -> Actor:
        """The thread of the host that asks."""
        found: Actor | None = getattr(self._here, "thread", None)
        if found is None:
            found = self._here.thread = self.actor("a thread")  # it may not know its own name yet
        return found

    @property
    def stream(self) -> Actor:
        """The current stream of the thread that asks."""
        found: Actor = getattr(self._here, "stream", self.compute)
        return found

    @stream.setter
    def stream(self, stream: Actor) -> None:
        self._here.stream = stream

    def turned(self) -> None:
        """The thread that asks does something that others may notice."""
        if self.thread is self.main:
            self.turn += 1

    def wait_in_thread(self, clock: Clock) -> None:
        """The thread of the host that asks waits. A thread beside the main one comes late to that, once the main one
        has gone on: whatever it let go of when it started the thread is gone by then."""
        thread = self.thread
        if thread is not self.main:
            since, deadline = self.turn_at_start, time.monotonic() + 1.0
            while self.turn == since and time.monotonic() < deadline:
                time.sleep(0.0005)
            with self.lock:
                for number, step in clock.items():
                    self.others[number] = max(self.others.get(number, 0), step)
        thread.learn(clock)

    @property
    def turn_at_start(self) -> int:
        """The main thread's turn when it started the thread that asks."""
        return getattr(self._here, "turn", -1)

    @turn_at_start.setter
    def turn_at_start(self, turn: int) -> None:
        self._here.turn = turn

    def launch(self, stream: Actor) -> None:
        """A kernel starts in a stream, after all that the launching thread knows."""
        stream.hear(self.thread)
        stream.step()
        self.turned()
        self.kernels += 1

    def missing(self, actor: Actor, what: str, other: int, before: str) -> None:
        """Report two accesses that nothing orders."""
        earlier = self.actors[other].name
        self.report(f"{what} in {actor.name} is not after {before} in {earlier}: {actor.name} waits for nothing of it")

    def report(self, text: str) -> None:
        self.findings[f"{text}{place()}"] += 1


def place() -> str:
    """Where in the program this happens: the innermost line of it on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.parent.name in ("runtime", "step", "model") and "happens_before" not in path.parts:
            return f" [{path.name}:{frame.f_lineno}]"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
