"""The empty rows of bench.py: a model that computes next to nothing, so that a step takes what its engine does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.engines import Engine, OurEngine, Pairs, Problem
from benchmarks.other_engines import megatron_core, torch_1f1b
from helixpipe.model import Microbatch, UnitContext
from helixpipe.program.stages import Piece


class EmptyModel(torch.nn.Module):
    """Multiplies by a weight of its rank, whatever its pieces are."""

    payload_dtype = torch.float32

    def __init__(self, pieces: Sequence[Piece], shape: Sequence[int]):
        super().__init__()
        self._shape = torch.Size(shape)
        self._ones = torch.ones(self._shape)
        weight = torch.nn.Parameter(torch.full(self._shape, 0.5))
        name = "embedding" if pieces[0].kind == "embed" else "output_layer"
        self.add_module(name, torch.nn.ParameterDict({"weight": weight}))

    def run(
        self, pieces: Sequence[Piece], inputs: tuple[Tensor, ...], batch: Microbatch, context: UnitContext
    ) -> tuple[Tensor, ...]:
        """(hidden_states [s, b, h],), of the head its sum."""
        (weight,) = self.parameters()
        output = weight * (self._ones if pieces[0].kind == "embed" else inputs[0])
        return (output.sum() if pieces[-1].kind == "head" else output,)

    def logits(self, hidden: Tensor) -> Tensor:
        """What torch's schedule takes the loss of."""
        return hidden

    def payload_shapes(self, after: Piece, micro_batch_size: int, length: int) -> tuple[torch.Size, ...]:
        return (self._shape,)


class EmptyProblem(Problem):
    """A problem of the same shape with the empty model, whose logits are as long as a hidden state."""

    def __init__(self, size: list[int]):
        super().__init__(size, vocabulary=size[1])

    def model(self, pieces: Sequence[Piece], copies: Mapping[Piece, int] | None = None) -> Any:
        return EmptyModel(pieces, (self.sequence, self.micro, self.config.hidden_size))

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        return output.sum()


def empty(problem: Problem) -> tuple[dict[str, Engine], Pairs]:
    """Each op is one product of a few elements, each message one tensor."""
    problem = EmptyProblem(problem.size)
    every = {
        "ours, 1f1b": OurEngine(problem, problem.program("1f1b")),
        "megatron-core 1F1B, same pieces": megatron_core(problem, whole=False),
        "torch Schedule1F1B": torch_1f1b(problem),
    }
    first, *others = every
    return every, [(first, other) for other in others]
