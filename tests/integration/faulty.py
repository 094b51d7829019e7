"""pretrain_gpt.py over a network with a fault, named by FAULT in the environment:

`lose RANK STEP NUMBER`: what this rank sends as that message of that step (from 1) never leaves;
`slow RANK SECONDS`: this rank takes so long before it receives anything.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch


class Faulty:
    """A transport with the fault of its rank."""

    def __init__(self, transport: Any, fault: str, *numbers: str) -> None:
        self._transport = transport
        self._lost = tuple(map(int, numbers)) if fault == "lose" else None
        self._slow = float(numbers[0]) if fault == "slow" else 0.0
        self._step = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, tensors: Sequence[torch.Tensor], target: int, number: int, *more: Any, **named: Any) -> None:
        if (self._step, number) != self._lost:
            self._transport.send(tensors, target, number, *more, **named)

    def receive(self, shapes: Sequence[torch.Size], dtype: torch.dtype, source: int, number: int) -> Any:
        time.sleep(self._slow)
        return self._transport.receive(shapes, dtype, source, number)

    def finish(self) -> None:
        self._transport.finish()
        self._step += 1


def main() -> None:
    started = time.monotonic()
    from helixpipe.model.device import prepare

    prepare()
    from helixpipe.runtime.transport import make_transport
    from megatron.pretrain import launch
    from megatron.pretrain.plan import pipeline

    fault, rank, *numbers = os.environ["FAULT"].split()
    if rank == os.environ["RANK"]:
        make: Any = make_transport
        mock.patch.object(pipeline, "make_transport", lambda *given: Faulty(make(*given), fault, *numbers)).start()
    sys.exit(launch.run(started))


if __name__ == "__main__":
    main()
