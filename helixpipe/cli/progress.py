"""A bar on standard error, where someone sees it."""

from __future__ import annotations

import sys

from helixpipe.planning.search.explore import Tried

WIDTH = 30


class Progress:
    """Of a search."""

    def __init__(self) -> None:
        self._shown = False

    def show(self, done: float, best: Tried | None) -> None:
        if not sys.stderr.isatty():
            return
        bar = "#" * round(done * WIDTH)
        found = f"  best {best.trial.step:.4g} s, {best.candidate.setting.schedule}" if best else ""
        sys.stderr.write(f"\r[{bar:<{WIDTH}}] {100 * done:3.0f} %{found}\033[K")
        sys.stderr.flush()
        self._shown = True

    def end(self) -> None:
        if self._shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
