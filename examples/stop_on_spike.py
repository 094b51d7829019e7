"""An extension of the trainer that ends a run whose loss jumps: --extension examples.stop_on_spike:StopOnSpike"""

from __future__ import annotations

from collections import deque

from helixpipe.common.errors import UserError
from megatron.pretrain.config import Config
from megatron.pretrain.extension import StepOutcome, TrainerExtension


class StopOnSpike(TrainerExtension):
    """Compares each step's loss with the mean of the steps before it."""

    steps, largest = 20, 1.5

    def __init__(self, config: Config):
        super().__init__(config)
        self.losses: deque[float] = deque(maxlen=self.steps)

    def outcome(self, outcome: StepOutcome) -> None:
        """Raise an error on all ranks alike: the loss is summed over all of them."""
        before = sum(self.losses) / max(1, len(self.losses))
        if len(self.losses) == self.steps and outcome.loss > self.largest * before:
            raise UserError(
                f"the loss is {outcome.loss:.3f} at iteration {outcome.iteration}, {self.largest} times the mean of "
                f"the {self.steps} steps before; resume from an earlier checkpoint with --ckpt-step."
            )
        self.losses.append(outcome.loss)
