"""One executor runs plan after plan: of other sizes and orders, with other chunks, evaluation between."""

from __future__ import annotations

import torch

from tests.distributed import run_ranks
from tests.runtime.equality import GRADIENT_TOLERANCE, LOSS_TOLERANCE
from tests.runtime.plans import successive_steps


def test_plans_in_successive_steps() -> None:
    """Each step's gradients are plain megatron-core's, whatever ran before."""
    ranks = run_ranks(successive_steps, 2)
    training = [True, True, False, True, True, False]
    for result in (result for styles in ranks for result in styles):
        assert [step["made gradients"] for step in result] == training
        assert [step["left"] for step in result] == [0] * len(training)
        for step in result:
            if step["gradient"] is not None:
                error, parameter = step["gradient"]
                assert error < GRADIENT_TOLERANCE[torch.float64], parameter
    for result in ranks[1]:  # which has the head
        assert [set(step["losses"]) for step in result] == [set(range(m)) for m in (2, 3, 2, 2, 2, 2)]
        assert all(error < LOSS_TOLERANCE[torch.float64] for step in result for error in step["losses"].values())
