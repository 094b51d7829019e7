"""Ops show as ranges in a profile, and cost nothing without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helixpipe.lowering.lower import lower
from helixpipe.runtime.executor import Executor, Step
from helixpipe.runtime.transport import SingleRankTransport
from schedules import Shape, build


class Toy:
    """A model of one weight, whose loss is its sum."""

    payload_dtype = torch.float32

    def __init__(self) -> None:
        self.weight = torch.ones(3, requires_grad=True)

    def run(self, *arguments: Any) -> tuple[Tensor, ...]:
        return (self.weight.sum(),)


def test_ops_are_ranges_while_a_profiler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = Toy()
    lowered = lower(build("1f1b", Shape(1, 2, layers=1)))
    executor = Executor(0, model, SingleRankTransport())
    batch: Any = None
    step = Step(0, lambda index: index, lambda index: batch, lambda index: torch.tensor(0.5), 1, 4)
    with torch.profiler.profile() as profile:
        executor.run(lowered, step)
    ranges = [event.key for event in profile.key_averages() if event.key.startswith("PP:")]
    assert sorted(ranges) == ["PP:0B0", "PP:0B1", "PP:0F0", "PP:0F1"]
    monkeypatch.setattr(torch.autograd.profiler, "record_function", None)
    executor.run(lowered, step)
    assert torch.equal(model.weight.grad, torch.full((3,), 2.0))  # of two runs with two microbatches
