"""Runs on the ranks of test_precision.py: float16 with an overflow, and weight gradients added by a fused kernel."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any, cast
from unittest import mock

import torch
from megatron.core.tensor_parallel import layers

from megatron.pretrain.config import Config, core
from megatron.pretrain.log.log import StepResult
from megatron.pretrain.train import Trainer
from tests.fakes import WeightGradientKernels
from tests.model.common import set_parallel
from tests.training.steps import Run, make_trainer

ITERATIONS, SPOILED = 12, 5
"""Steps, and the one in which a gradient overflows on rank 1."""


@dataclass
class Steps:
    """The steps as a training log is told of them. weights_moved: whether this rank's weights changed in each step."""

    results: list[StepResult] = field(default_factory=list)
    weights_moved: list[bool] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        return [float(result.loss) for result in self.results]

    def step(self, iteration: int, consumed_samples: int, result: StepResult) -> None:
        self.results.append(result)


def with_an_overflow(rank: int, world_size: int, runs: list[Run]) -> list[Steps]:
    """Train; in the `SPOILED` step a gradient on rank 1 is infinite, or where nothing scales the loss, and so nothing
    looks for that, the step is left out."""
    found = []
    for run in runs:
        set_parallel(tp=run.tp, pp=run.pp)
        trainer = make_trainer(run.config(rank, world_size))
        steps: Any = Steps()
        trainer.log = steps
        for number in range(1, ITERATIONS + 1):
            before = [parameter.detach().clone() for parameter in kept(trainer)]
            iterate(trainer, number, spoils=rank == 1)
            after = kept(trainer)
            moved = any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
            steps.weights_moved.append(moved)
        trainer.pipeline.close()
        found.append(steps)
    return found


def kept(trainer: Trainer) -> list[torch.Tensor]:
    """The weights that this rank has, or its parts of them."""
    sharded = trainer.state.sharded
    return list(trainer.state.model.parameters()) if sharded is None else [part.parameter for part in sharded.parts()]


def iterate(trainer: Trainer, number: int, spoils: bool) -> None:
    state = trainer.state
    if number != SPOILED:
        trainer._iteration(record=False)
    elif not trainer.config.training.fp16:
        with mock.patch.object(state.optimizer, "step", lambda: (False, None, None)):
            trainer._iteration(record=False)
    else:
        reduce = state.weights.reduce

        def spoil_and_reduce(*arguments: Any) -> None:
            if spoils and state.sharded is not None:
                state.sharded.units[-1].total[0] = float("inf")
            elif spoils:
                weight = next(value for name, value in state.model.named_parameters() if "linear_qkv.weight" in name)
                weight.main_grad[0, 0] = float("inf")
            reduce(*arguments)

        with mock.patch.object(state.weights, "reduce", spoil_and_reduce):
            trainer._iteration(record=False)


def with_fused_weight_gradients(rank: int, world_size: int, runs: list[Run]) -> list[tuple[Steps, Steps, int]]:
    """Of each run, the first steps without and with the kernel, and how often it was called."""
    found = []
    for run in runs:
        set_parallel(tp=run.tp, pp=run.pp)
        config = run.config(rank, world_size)
        plain = first_steps(config)
        kernels = WeightGradientKernels()
        with (
            mock.patch.dict(sys.modules, {kernels.__name__: kernels}),
            mock.patch.multiple(
                layers, create=True, fused_weight_gradient_mlp_cuda=kernels, _grad_accum_fusion_available=True
            ),
            mock.patch.object(core, "fuses_weight_gradients", lambda machine: True),
        ):
            found.append((plain, first_steps(config), kernels.calls))
    return found


def first_steps(config: Config) -> Steps:
    """As many as show a gradient of the second in the loss of the third."""
    trainer = make_trainer(config)
    steps: Any = Steps()
    trainer.log = steps
    for _ in range(3):
        trainer._iteration(record=False)
    trainer.pipeline.close()
    return cast(Steps, steps)
