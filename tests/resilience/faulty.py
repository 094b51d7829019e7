"""Runs pretrain_gpt.py with a fault that FAULT in the environment names; without it as it is.

`flip WHERE RANK STEP BIT`: a bit of a value flips on this rank in this step (flipping.py);
`slow RANK FIRST END SECONDS`: every op of this rank sleeps so long for each of its layers in the iterations from FIRST
on, before END, and half of it in all others, as do the ops of the other ranks.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from helixpipe.model.device import prepare


def main() -> None:
    started = time.monotonic()
    prepare()
    from megatron.pretrain import launch

    kind, *words = os.environ.get("FAULT", "none").split()
    if kind == "flip":
        where, *numbers = words
        _flip(where, *map(int, numbers))
    elif kind == "slow":
        rank, first, end = map(int, words[:3])
        _slow(rank, first, end, float(words[3]))
    sys.exit(launch.run(started))


def _flip(where: str, rank: int, step: int, bit: int) -> None:
    from megatron.pretrain.train import Trainer
    from tests.resilience.flipping import Flip, inject

    run = Trainer.run

    def run_with_flip(self: Trainer) -> None:
        if self.parallel.rank == rank:
            inject(self, Flip(where, rank, step, bit, which=5, element=77))
        run(self)

    Trainer.run = run_with_flip  # type: ignore[method-assign]


def _slow(rank: int, first: int, end: int, seconds: float) -> None:
    from helixpipe.program.stages import layers_of
    from helixpipe.runtime.step_run import StepRun

    begin = StepRun.__init__

    def slowed(self: StepRun, *arguments: Any) -> None:
        begin(self, *arguments)
        slow = int(os.environ["RANK"]) == rank and first <= self.step.iteration < end
        pause = seconds if slow else seconds / 2

        layers = layers_of(self.plan.program.stages)

        def paused(handler: Any) -> Any:
            def run(op: Any) -> None:
                handler(op)
                time.sleep((pause / 2 if op.op.kind in "IW" else pause) * layers[op.op.stage])

            return run

        self._ops = {kind: paused(handler) for kind, handler in self._ops.items()}

    StepRun.__init__ = slowed  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    main()
