"""--profile: torch.profiler's Chrome trace, or a range for nsys, over some iterations on some ranks."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megatron.training.config import Config
from megatron.training.output import say


class Profiler:
    """Context around the training loop; `after(iteration)` is called at the end of each iteration."""

    def __init__(self, config: Config, rank: int):
        self._logging = config.logging
        self._active = config.logging.profile and rank in config.logging.profile_ranks
        self._rank = rank
        self._profile: Any = None

    def __enter__(self) -> Profiler:
        self._start_if_due(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def after(self, iteration: int) -> None:
        """Start before iteration --profile-step-start, stop before --profile-step-end."""
        if iteration + 1 == self._logging.profile_step_end:
            self._stop()
        self._start_if_due(iteration)

    def _start_if_due(self, iteration: int) -> None:
        if not self._active or self._profile is not None or iteration + 1 != max(self._logging.profile_step_start, 1):
            return
        if self._logging.use_pytorch_profiler or not torch.cuda.is_available():
            self._profile = torch.profiler.profile(record_shapes=True)
            self._profile.start()
        else:
            torch.cuda.cudart().cudaProfilerStart()
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
            torch.cuda.cudart().cudaProfilerStop()
