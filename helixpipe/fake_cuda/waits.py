"""Where the host waits for the fake device: which functions of this project, or of megatron-core, asked for it."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple

_PACKAGES = ("helixpipe", "megatron", "schedules")
_DEPTH = 12  # functions kept


class Wait(NamedTuple):
    """what: "a number", "a copy to the host", "an event" and so on. chain: the functions under way, innermost first,
    by module and name; main: on the main thread, or autograd's of the device."""

    what: str
    chain: tuple[str, ...]
    main: bool

    @property
    def where(self) -> str:
        return self.chain[0] if self.chain else "elsewhere"

    def __str__(self) -> str:
        return f"{self.what}, by {' < '.join(self.chain[:3]) or 'a thread of torch'}"


class Waits:
    """Counts waits, as the listener of the compiled module."""

    def __init__(self) -> None:
        self.counts: Counter[Wait] = Counter()

    def __call__(self, what: str) -> None:
        import torch

        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")
        self.counts[Wait(what, _chain(), threading.current_thread() is threading.main_thread())] += 1

    def take(self) -> Counter[Wait]:
        taken, self.counts = self.counts, Counter()
        return taken


def _chain(skip: Sequence[str] = ("helixpipe.fake_cuda",)) -> tuple[str, ...]:
    chain: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(chain) < _DEPTH:
        module = frame.f_globals.get("__name__", "")
        if module.split(".")[0] in _PACKAGES and not module.startswith(tuple(skip)):
            chain.append(f"{module}.{frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(chain)
