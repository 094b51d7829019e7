"""An extension that ends a run, for test_extensions.py."""

from __future__ import annotations

from helixpipe.common.errors import UserError
from megatron.pretrain.extension import StepOutcome, TrainerExtension


class Stop(TrainerExtension):
    """Ends the run after its third step."""

    def outcome(self, outcome: StepOutcome) -> None:
        if outcome.iteration == 3:
            raise UserError("three steps are enough.")
