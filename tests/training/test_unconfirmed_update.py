"""An update before the norm is known, on a simulated device: the host reads the norm no sooner than it has come, and
what it is made of lives until then."""

from __future__ import annotations

import pytest
import torch

from megatron.pretrain.step.update import UnconfirmedUpdate, UpdateResult
from tests.runtime.happens_before.cuda import Simulation
from tests.runtime.happens_before.nccl import Communicators, Nowhere


class Kept:
    def __init__(self, weight: torch.Tensor):
        self._weight, self._before = weight, weight.clone()

    def restore(self) -> None:
        self._weight.copy_(self._before)


class OneWeight:
    """Of four numbers, with a gradient of four times `size`, so of norm 2 * size."""

    def __init__(self, size: float):
        self.weight, self.gradient = torch.ones(4), torch.full((4,), size)
        self.overflows: list[bool] = []

    def step(self) -> tuple[bool, float | None, float | None]:
        raise AssertionError("the norm is not known")

    def prepare(self) -> torch.Tensor:
        self.prepared = self.gradient.clone()
        return torch.isinf(self.prepared).any().float().reshape(1)

    def square_norm(self) -> torch.Tensor:
        return self.prepared.square().sum()

    def keep(self) -> Kept:
        return Kept(self.weight)

    def update(self) -> None:
        self.weight.sub_(self.prepared)

    def clip(self, largest: float, norm: float) -> None:
        self.prepared.mul_(largest / norm)

    def settle_loss_scale(self, overflow: bool) -> None:
        self.overflows.append(overflow)


def steps(size: float, monkeypatch: pytest.MonkeyPatch) -> tuple[OneWeight, list[UpdateResult], list[str]]:
    """Two steps with a forward after each update; the outcomes, and what the checker says."""
    simulation, outcomes = Simulation(), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with Communicators(simulation, Nowhere()).replaced(), simulation.replaced():
        weights = OneWeight(size)
        update = UnconfirmedUpdate(weights, largest=3.0)
        for _ in range(2):
            update.start(torch.ones(2, dtype=torch.float64))
            (weights.weight * torch.ones(4)).sum()
            outcomes.append(update.finish())
            assert outcomes[-1].sums.tolist() == [1.0, 1.0]
            (weights.weight * torch.ones(4)).sum()
        simulation.memories.settle()
    return weights, outcomes, list(simulation.world.findings)


@pytest.mark.parametrize(("size", "norm", "left"), [(1.0, 2.0, -1.0), (2.0, 4.0, -2.0), (float("inf"), None, 1.0)])
def test_the_sums_are_read_once_they_have_come(
    size: float, norm: float | None, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that are small enough, too large, and that overflowed."""
    weights, outcomes, findings = steps(size, monkeypatch)
    assert findings == []
    assert [outcome.grad_norm for outcome in outcomes] == [norm] * 2
    assert [outcome.confirmed for outcome in outcomes] == [size == 1.0] * 2
    assert weights.weight.tolist() == pytest.approx([left] * 4)
    assert weights.overflows == [norm is None] * 2
