"""Flips a bit in a training run of this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KINDS = ("weight", "state", "message", "computed", "flickering", "once")
"""What a flipped bit is of. Of what a rank computes: each forward from then on, every second one, a single one."""

MESSAGES = 4
"""A rank must receive at least so many messages, and run as many forwards, in a step."""


@dataclass(frozen=True)
class Flip:
    """A bit of a value that flips on a rank in a step. which, element: numbers of the tensor or message and of its
    element, modulo how many there are; of what is computed once, `which` is the number of the forward."""

    where: str
    rank: int
    step: int
    bit: int
    which: int
    element: int

    def __post_init__(self) -> None:
        if self.where not in KINDS:
            raise ValueError(f"{self.where} is nothing that a bit flips in: {', '.join(KINDS)}")

    def of(self, tensors: Sequence[Tensor]) -> None:
        """Flip the bit in one of the tensors."""
        tensor = tensors[self.which % len(tensors)].detach().view(-1)
        words = tensor.view({4: torch.int32, 2: torch.int16}[tensor.element_size()])
        bits = 8 * words.element_size()
        value = 1 << self.bit % bits
        words[self.element % words.numel()] ^= value - (1 << bits if value == 1 << bits - 1 else 0)


def inject(trainer: Any, flip: Flip) -> None:
    """Have the bit flip in a step of this rank's trainer."""
    pipeline, model = trainer.pipeline, trainer.state.model
    run, model_run, receive = pipeline.run, model.run, pipeline._transport.receive
    came = calls = 0

    def run_with_flip(iteration: int, *arguments: Any, **named: Any) -> Any:
        if iteration == flip.step and flip.where == "weight":
            flip.of(list(model.parameters()))
        if iteration == flip.step and flip.where == "state":
            flip.of(state_of(trainer.state.optimizer))
        return run(iteration, *arguments, **named)

    def receive_with_flip(*arguments: Any) -> Any:
        nonlocal came
        receipt = receive(*arguments)
        came += trainer.progress.iteration + 1 == flip.step
        hit = trainer.progress.iteration + 1 == flip.step and came == 1 + flip.which % MESSAGES
        return Flipping(receipt, flip) if hit else receipt

    def run_sick(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        outputs = model_run(*arguments, **named)
        calls += trainer.progress.iteration + 1 >= flip.step
        sick = {"computed": calls > 0, "flickering": calls % 2 == 1, "once": calls == 1 + flip.which % MESSAGES}
        if sick[flip.where]:
            with torch.no_grad():
                flip.of([outputs[0].data])
        return outputs

    pipeline.run = run_with_flip
    if flip.where == "message":
        pipeline._transport.receive = receive_with_flip
    if flip.where in ("computed", "flickering", "once"):
        model.run = run_sick


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
