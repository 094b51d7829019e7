"""Ends a job that hangs, and says before where each rank is and which is the first cause.

Every rank has three threads. One looks at the rank's `Position` about every second and counts for how long it has not
changed. One follows the rank's GPU, and hangs where that does. The third talks to the job's key-value store, never to
the process groups, which may be what hangs. A rank that has waited too long for another opens a round: it asks all
ranks for their states, waits a few seconds for the answers, and if no rank that answered is getting on, prints the
report and has all ranks end. Otherwise (somebody reads data, writes a checkpoint, or has just finished an op) nothing
happens, and it asks again later.

In the store: `watchdog/word`, the last round as `NUMBER RANK`, or `end`; `watchdog/state/RANK`, a rank's last answer;
`watchdog/ended/RANK`, how it ended.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from helixpipe.watch import stall
from helixpipe.watch.position import Patience, Position, View, describe
from helixpipe.watch.stall import State

ANSWER_SECONDS = 5.0
"""The least time that a round waits for the states of other ranks; ranks that do not answer are silent."""

STORE_SECONDS = 30.0
"""The time without an answer of the store after which a rank that has waited too long reports its own state alone."""

STORE_REQUESTS = 500.0
"""The most requests a second of all ranks together while nothing happens: beyond 500 ranks each asks less often."""

_JOIN_SECONDS = 5.0
_WORD, _STATE, _ENDED = "watchdog/word", "watchdog/state/", "watchdog/ended/"
_NO_ROUND, _END = "0 0", "end"


def _complain(text: str) -> None:
    sys.stderr.write(text + "\n")  # in one write, since ranks share the terminal
    sys.stderr.flush()


class Watchdog:
    """A context in which this rank is watched, entered on all ranks of the job.

    store: a torch.distributed store that all ranks share. limits: for each `Patience`, the seconds that a rank may stay
    at one place (`math.inf`: no limit). leave: ends the process with a status, at once, from any thread. complain:
    takes the report. use_device: makes this rank's device the current one of the thread that follows it, which would
    otherwise open a context on the first GPU of the host.
    """

    def __init__(
        self,
        position: Position,
        store: Any,
        world_size: int,
        limits: Mapping[Patience, float],
        leave: Callable[[int], object] = os._exit,
        complain: Callable[[str], object] = _complain,
        use_device: Callable[[], object] = lambda: None,
    ):
        self._position = position
        self._rank = position.peers.rank
        # A connection of its own where this torch has it: one is blocked for all while somebody waits for a key.
        self._store = store.clone() if hasattr(store, "clone") else store
        self._world_size = world_size
        self._limits = limits
        self._leave = leave
        self._complain = complain
        self._use_device = use_device
        self._poll = min(1.0, limits[Patience.STEP] / 10)
        # The store is one process: all ranks together ask it no more than `STORE_REQUESTS` times a second.
        self._store_poll = max(self._poll, world_size / STORE_REQUESTS)
        self._pause = max(2 * self._store_poll, limits[Patience.STEP] / 20)  # between two rounds
        self._patience = max(ANSWER_SECONDS, self._pause)
        self._seen: tuple[View, float] = position.look(), 0.0
        self._heard = time.monotonic()
        self._closing = threading.Event()
        self._end = "normally"
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in (
                ("watchdog", self._watch),
                ("watchdog-device", self._follow),
                ("watchdog-store", self._talk),
            )
        ]

    def __enter__(self) -> Watchdog:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tell the others. After an error, which another rank's end may have caused, end quietly if all are to end."""
        self._end = "normally" if kind is None else f"with {kind.__name__}"
        self._closing.set()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)

    # -------------------------------------------------------------------------------------------- the watching thread

    def _watch(self) -> None:
        """Count how long the position has not changed, in polls that took place: a job that was suspended as a whole
        has not waited."""
        before = time.monotonic()
        while not self._closing.wait(self._poll):
            now = time.monotonic()
            view, (last, waited) = self._position.look(), self._seen
            self._seen = view, waited + min(now - before, 2 * self._poll) if view.place == last.place else 0.0
            before = now
            if now - self._heard > STORE_SECONDS + self._store_poll and self._waits_too_long():
                self._complain(f"[Rank {self._rank}] stalled, and the job's store does not answer: {self._state()}.")
                self._leave(1)
                return

    def _follow(self) -> None:
        self._use_device()
        while not self._closing.wait(self._poll):
            try:
                self._position.follow()
            except RuntimeError:  # the device has failed: the main thread is told the same
                return

    def _waits_too_long(self) -> bool:
        view, waited = self._seen
        return waited > self._limits[view.part.patience] and self._state().waits

    def _state(self) -> State:
        view, waited = self._seen
        return describe(view, self._position.peers, waited, self._limits[view.part.patience])

    # ------------------------------------------------------------------------------------------- the store's thread

    def _talk(self) -> None:
        try:
            self._store.compare_set(_WORD, "", _NO_ROUND)
            answered, earliest, word = _NO_ROUND, 0.0, _NO_ROUND  # the last round, and when to open another
            while word != _END and not self._closing.wait(self._store_poll):
                word = self._read(_WORD)
                if word == answered and time.monotonic() >= earliest and self._waits_too_long():
                    answered = word = self._open_round(word)
                    earliest = time.monotonic() + self._pause
                elif word not in (answered, _END):
                    self._answer(word)
                    answered, earliest = word, time.monotonic() + self._pause + 2 * self._patience  # it may go on
            if word == _END or self._read(_WORD) == _END:
                self._leave(1)
            else:
                self._store.set(f"{_ENDED}{self._rank}", self._end)
        except RuntimeError:  # the store is gone, and maybe the job with it; if not, `_watch` goes on
            return

    def _read(self, key: str) -> str:
        value: str = self._store.get(key).decode()
        self._heard = time.monotonic()
        return value

    def _answer(self, word: str) -> None:
        self._store.set(f"{_STATE}{self._rank}", json.dumps([word, self._state().to_json()]))

    def _open_round(self, before: str) -> str:
        """Ask all ranks, unless another rank is quicker, and if the job hangs, have it end. Returns the last word that
        this rank has acted on."""
        word = f"{int(before.split()[0]) + 1} {self._rank}"
        if self._store.compare_set(_WORD, before, word).decode() != word:
            return before
        states, ended = self._collect(word)
        if not stall.stalled(states.values()) or self._closing.is_set() or not self._waits_too_long():
            return word
        if self._store.compare_set(_WORD, word, _END).decode() != _END:
            return word
        self._complain(f"[Rank {self._rank}] {stall.report(states, self._world_size, ended)}")
        self._closing.wait(2 * self._store_poll)  # this process may hold the store, in which the others have to look
        return _END

    def _collect(self, word: str) -> tuple[dict[int, State], dict[int, str]]:
        """Collect the states of the ranks that answer a round, and how others ended."""
        states, ended = {self._rank: self._state()}, dict[int, str]()
        until = time.monotonic() + self._patience
        while len(states) + len(ended) < self._world_size and time.monotonic() < until and not self._closing.is_set():
            for rank in range(self._world_size):
                if rank in states or rank in ended:
                    continue
                if self._store.check([f"{_ENDED}{rank}"]):
                    ended[rank] = self._read(f"{_ENDED}{rank}")
                elif self._store.check([f"{_STATE}{rank}"]):
                    asked, text = json.loads(self._read(f"{_STATE}{rank}"))
                    if asked == word:
                        states[rank] = State.from_json(text)
            self._closing.wait(self._poll / 5)
        return states, ended
