"""Reports the progress of long work on standard error: a line that changes on a terminal, occasional lines in a log.

    progress = ProgressLine("measuring")
    for done in range(8):
        progress.at(done, 8)
    progress.end()

prints `measuring: 3 of 8, 12 s, about 20 s left`. What is over before `_FIRST` seconds prints nothing.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

_FIRST, _EACH, _LOGGED = 1.0, 0.2, 10.0  # seconds until the first line, between two on a terminal, and in a log


class ProgressLine:
    """The progress of one piece of work. what: its description. stream: default standard error. clock: seconds. unit:
    after numbers.
    """

    def __init__(
        self,
        what: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        unit: str = "",
    ) -> None:
        self._what, self._stream, self._clock, self._unit = what, stream or sys.stderr, clock, unit
        self._terminal = self._stream.isatty()
        self._began = clock()
        self._next = self._began + _FIRST
        self._shown = 0

    def at(self, done: int, of: int, note: str = "") -> None:
        """Report that `done` of `of` parts are done; may be called at any rate. note: further text."""
        now = self._clock()
        if now < self._next or not of:
            return
        self._next = now + (_EACH if self._terminal else _LOGGED)
        past = now - self._began
        left = f", about {past * (of - done) / done:.0f} s left" if 0 < done < of else ""
        self._write(f"{self._what}: {done} of {of}{self._unit}, {past:.0f} s{left}{note and f'; {note}'}")

    @contextmanager
    def parts(self, of: int) -> Iterator[Callable[[], None]]:
        """Within, a line now and then also while one part takes long; call what it gives after each part."""
        done, over = [0], threading.Event()

        def tick() -> None:
            while not over.wait(_EACH):
                self.at(done[0], of)

        def count() -> None:
            done[0] += 1

        ticking = threading.Thread(target=tick, name="progress", daemon=True)
        with suppress(RuntimeError):  # there are no threads, as in a browser: `count` then writes nothing
            ticking.start()
        try:
            yield count
        finally:
            over.set()
            if ticking.ident is not None:
                ticking.join()
            self.end()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def end(self) -> None:
        """Leave the terminal's line free for what follows; in a log that has lines, write a last one."""
        if self._shown and self._terminal:
            self._put("\r" + " " * self._shown + "\r")
        elif self._shown:
            self._put(f"{self._what}: ended, {self._clock() - self._began:.0f} s\n")
        self._shown = 0

    def _write(self, line: str) -> None:
        self._put(f"\r{line.ljust(self._shown)}" if self._terminal else f"{line}\n")
        self._shown = len(line)

    def _put(self, text: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads it any more
            self._stream.write(text)
            self._stream.flush()
