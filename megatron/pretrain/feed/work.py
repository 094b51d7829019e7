"""Defines one step's work, and the interface of its producer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from helixpipe.lowering.project import LoweredProgram
from helixpipe.model import Microbatch
from megatron.pretrain.checkpoint.state import TrainingProgress


@dataclass(frozen=True)
class StepWork:
    """The work of a step.

    Attributes:
        microbatches: The microbatches of this rank's pipeline.
        lowered: The program that runs them.
        samples: Samples of the step, over all data-parallel ranks.
        scheduled_samples: Samples that the step adds to the count which the learning rate follows.
        tokens: Real tokens of the step, over all ranks.
        flops: FLOPs of the model on these tokens.
        counted_here: [microbatches, 2] float64, tokens and FLOPs of each microbatch, which are still to be summed over
            ranks and added to `tokens` and `flops`; None: there are no others.
        figures: Further numbers for the log, by name.
    """

    microbatches: Sequence[Microbatch]
    lowered: LoweredProgram
    samples: int
    scheduled_samples: int
    tokens: int
    flops: float
    counted_here: torch.Tensor | None = None
    figures: Mapping[str, float] = field(default_factory=dict)


class Feed(Protocol):
    """Prepares the work of every step, in the order of the steps."""

    has_valid: bool
    has_test: bool

    def train(self, progress: TrainingProgress) -> StepWork:
        """Return the work of the step after `progress`. Raises UserError on all ranks if data or plans are wrong."""
        ...

    def evaluation(self, split: str) -> StepWork:
        """Return the work of an evaluation's next step, of split `valid` or `test`; an evaluation is `--eval-iters`
        steps.
        """
        ...

    def close(self) -> None:
        """End all processes and threads."""
        ...
