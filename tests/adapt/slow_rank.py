"""Runs pretrain_gpt.py with one rank whose ops take longer in some iterations.

    torchrun tests/adapt/slow_rank.py RANK FIRST END SECONDS [flags of pretrain_gpt.py]

Every op of that pipeline rank sleeps `SECONDS` in the iterations from FIRST on, before END, and a tenth of it in all
others, as do the ops of the other ranks.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from helixpipe.model.device import prepare

prepare()

from helixpipe.runtime.step_run import StepRun

slow_rank, first, end = map(int, sys.argv[1:4])
seconds = float(sys.argv[4])
begin = StepRun.__init__


def slowed(self: StepRun, *arguments: Any) -> None:
    begin(self, *arguments)
    slow = int(os.environ["RANK"]) == slow_rank and first <= self.step.iteration < end
    pause = seconds if slow else seconds / 2

    def paused(handler: Any) -> Any:
        def run(op: Any) -> None:
            handler(op)
            time.sleep(pause / 2 if op.op.kind in "IW" else pause)

        return run

    self._ops = {kind: paused(handler) for kind, handler in self._ops.items()}


StepRun.__init__ = slowed  # type: ignore[method-assign]
sys.argv = ["pretrain_gpt.py", *sys.argv[5:]]

from pretrain_gpt import main

if __name__ == "__main__":
    main()
