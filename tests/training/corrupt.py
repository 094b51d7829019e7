"""Runs on the ranks of test_corruption.py: training in which a bit flips somewhere, or none does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from helixpipe.common.errors import CorruptionError
from megatron.pretrain.step.corruption import make_check
from tests.training.steps import Figures, Run, make_trainer, of_runs

WHERE = ("weight", "state", "message", "computed", "flickering")
"""What a flipped bit is of: a weight or the optimizer's state in memory, a tensor in a message, what a rank computes,
from then on in each forward, or in every second one."""


@dataclass(frozen=True)
class Flip:
    """A bit of a value that flips on a rank in a step. which, element: numbers of the tensor or message and of its
    element, modulo how many there are."""

    where: str
    rank: int
    step: int
    bit: int
    which: int
    element: int

    def of(self, tensors: Sequence[Tensor]) -> None:
        """Flip the bit in one of the tensors."""
        tensor = tensors[self.which % len(tensors)].detach().view(-1)
        words = tensor.view({4: torch.int32, 2: torch.int16}[tensor.element_size()])
        bits = 8 * words.element_size()
        value = 1 << self.bit % bits
        words[self.element % words.numel()] ^= value - (1 << bits if value == 1 << bits - 1 else 0)


@dataclass(frozen=True)
class Found:
    """What a run said, and at which step; step 0: nothing. losses: of its steps."""

    step: int
    says: str
    losses: list[float]


def clean(rank: int, world_size: int, runs: list[Run]) -> list[tuple[Found, list[float]]]:
    """What each run says, and its losses without checks."""

    def both(run: Run) -> tuple[Found, list[float]]:
        checked = train(run, rank, world_size, None)
        return checked, train(run, rank, world_size, None, checks=False).losses

    return of_runs(runs, both)


def flipped(rank: int, world_size: int, run: Run, flips: list[Flip]) -> list[Found]:
    return of_runs([run] * len(flips), iter_of(run, rank, world_size, flips))


def iter_of(run: Run, rank: int, world_size: int, flips: list[Flip]) -> Any:
    rest = iter(flips)
    return lambda _: train(run, rank, world_size, next(rest))


def train(run: Run, rank: int, world_size: int, flip: Flip | None, checks: bool = True) -> Found:
    config = run.config(rank, world_size)
    trainer = make_trainer(config)
    trainer.log = figures = Figures(0)  # type: ignore[assignment]
    if checks:
        trainer.check = make_check(config, trainer.parallel, trainer.pipeline, trainer.state)
    if flip is not None and flip.rank == rank:
        inject(trainer, flip)
    try:
        for _ in range(run.steps):
            trainer._iteration(record=False)
    except CorruptionError as error:
        return Found(len(figures.losses) + 1, str(error), figures.losses)
    finally:
        trainer.pipeline.close()
    return Found(0, "", figures.losses)


def inject(trainer: Any, flip: Flip) -> None:
    """Have the bit flip in this rank's step."""
    pipeline, model = trainer.pipeline, trainer.state.model
    run, model_run = pipeline.run, model.run
    came = calls = 0

    def run_with_flip(iteration: int, *arguments: Any, **named: Any) -> Any:
        if iteration == flip.step and flip.where == "weight":
            flip.of(list(model.parameters()))
        if iteration == flip.step and flip.where == "state":
            flip.of(state_of(trainer.state.optimizer))
        return run(iteration, *arguments, **named)

    def receive(*arguments: Any) -> Any:
        nonlocal came
        receipt, iteration = plain_receive(*arguments), trainer.progress.iteration + 1
        came += iteration == flip.step
        return Flipping(receipt, flip) if iteration == flip.step and came == 1 + flip.which % MESSAGES else receipt

    def run_sick(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        outputs = model_run(*arguments, **named)
        calls += trainer.progress.iteration + 1 >= flip.step
        if calls % 2 or (calls and flip.where == "computed"):
            with torch.no_grad():
                flip.of([outputs[0].data])
        return outputs

    pipeline.run = run_with_flip
    if flip.where == "message":
        plain_receive = pipeline._transport.receive
        pipeline._transport.receive = receive
    if flip.where in ("computed", "flickering"):
        model.run = run_sick


MESSAGES = 4
"""Of a step, each rank receives at least so many."""


class Flipping:
    """A receipt whose tensors have a flipped bit when they come."""

    def __init__(self, receipt: Any, flip: Flip):
        self._receipt, self._flip = receipt, flip

    def wait(self) -> tuple[Tensor, ...]:
        tensors: tuple[Tensor, ...] = self._receipt.wait()
        self._flip.of(tensors)
        return tensors


def state_of(optimizer: Any) -> list[Tensor]:
    return [
        value
        for each in optimizer.chained_optimizers
        for state in each.optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim()
    ]
