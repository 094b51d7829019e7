"""--profile: torch.profiler's Chrome trace, or ranges for nsys, over some iterations on some ranks.

Ops show as `PP:2F5.1`, the ranges the executor puts around them. nsys sees them, and torch's own operators, as NVTX
ranges while the iterations run that `nsys profile --capture-range=cudaProfilerApi` waits for.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from helixpipe.common.output import say
from megatron.pretrain.config import Config


class Profiler:
    """Context around the training loop; `after(iteration)` is called at the end of each iteration.

    iteration: iterations done before the loop. As in Megatron-LM for nsys: it starts when --profile-step-start are done
    and stops when --profile-step-end are, whichever profiler it is.
    """

    def __init__(self, config: Config, rank: int, iteration: int = 0):
        self._logging = config.logging
        self._active = config.logging.profile and rank in config.logging.profile_ranks
        self._rank = rank
        self._iteration = iteration
        self._profile: Any = None

    def __enter__(self) -> Profiler:
        self._start_if_due(self._iteration)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def after(self, iteration: int) -> None:
        """Stop or start the profiler if due. iteration: the number of iterations done."""
        if iteration == self._logging.profile_step_end:
            self._stop()
        self._start_if_due(iteration)

    def _start_if_due(self, iteration: int) -> None:
        if not self._active or iteration != self._logging.profile_step_start:
            return
        if self._logging.use_pytorch_profiler or not torch.cuda.is_available():
            self._profile = torch.profiler.profile(record_shapes=True)
            self._profile.start()
        else:
            torch.cuda.profiler.start()
            self._profile = torch.autograd.profiler.emit_nvtx(record_shapes=True)
            self._profile.__enter__()

    def _stop(self) -> None:
        profile, self._profile = self._profile, None
        if isinstance(profile, torch.profiler.profile):
            profile.stop()
            folder = Path(self._logging.tensorboard_dir or "profile")
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"trace-rank{self._rank}.json.gz"
            profile.export_chrome_trace(str(path))
            say(f"[Rank {self._rank}] profile written to {path}")
        elif profile is not None:
            profile.__exit__(None, None, None)
            torch.cuda.profiler.stop()
