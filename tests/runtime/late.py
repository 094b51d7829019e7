"""Messages that leave late, to run programs under."""

from __future__ import annotations

import random
import threading
import time

from torch import Tensor

from helixpipe.runtime.gloo import GlooTransport


class LateTransport(GlooTransport):
    """Every message leaves up to 20 ms late, each by a time of its own: as over links of several speeds."""

    def _start(self, tensors: list[Tensor], target: int, number: int) -> None:
        start, seconds = super()._start, random.Random(number).uniform(0.0, 0.02)

        def later() -> None:
            time.sleep(seconds)
            start(tensors, target, number)

        thread = threading.Thread(target=later, daemon=True)
        thread.start()
        self._starting.append(thread)
