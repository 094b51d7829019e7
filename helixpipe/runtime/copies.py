"""Weights that are not where they are used: copies of other ranks' stages here, and of this rank's own elsewhere.

A stage's weights travel as one flat tensor, and so do their gradients, added up in float32 (or in the weights' type
where that is wider). Copies never meet DDP or the optimizer: the owner adds what comes back to its own gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from helixpipe.model.linear import WeightGradients, add_gradient
from helixpipe.program import Piece, Program


class ModelWithWeights(Protocol):
    """What is asked of a model whose stages are shipped; `helixpipe.model.PipelineModel` is one."""

    payload_dtype: torch.dtype

    def weights_of(self, pieces: Sequence[Piece]) -> list[torch.nn.Parameter]: ...

    def shell(self, pieces: Sequence[Piece]) -> ModelWithWeights: ...

    def weight_gradients(self) -> WeightGradients: ...


class StageCopies:
    """Of one rank. `stages`: those copied here, which `model` runs once `put` has been given their weights.

    model (argument): holds the weights this rank owns.
    """

    def __init__(self, program: Program, rank: int, model: ModelWithWeights):
        self.stages = frozenset(program.copied_stages(rank))
        self._program, self._own = program, model
        self.model: ModelWithWeights | None = None
        if self.stages:
            copied = sorted(self.stages)
            self.model = model.shell([piece for stage in copied for piece in program.stages[stage].pieces])
            for weight in self._weights(copied):
                weight.register_post_accumulate_grad_hook(_add_to_main)
        self._gradients: dict[int, Tensor] = {}
        copies = [stage for other in range(program.num_ranks) for stage in program.copied_stages(other)]
        self._targets = {stage: copies.count(stage) for stage in copies if program.stages[stage].owner == rank}
        self._packed: dict[int, tuple[Tensor, int]] = {}

    def size(self, stage: int) -> torch.Size:
        """Of the flat tensor of its weights, or of their gradients."""
        return torch.Size((sum(_whole_shape(weight).numel() for weight in self._weights([stage])),))

    @property
    def weights_dtype(self) -> torch.dtype:
        return self._own.payload_dtype

    @property
    def gradients_dtype(self) -> torch.dtype:
        return torch.promote_types(self.weights_dtype, torch.float32)

    # ------------------------------------------------------------------------------------------------ at the copies

    def put(self, stage: int, flat: Tensor) -> None:
        """Weights have come: run the stage on them from now on."""
        weights = self._weights([stage])
        for weight, data in zip(weights, _views(flat, weights), strict=True):
            weight.data = data

    def begin_gradients(self, stage: int) -> None:
        """Before a backward of the stage: gradients are added up from zero, unless they are already."""
        if stage in self._gradients:
            return
        weights = self._weights([stage])
        flat = torch.zeros(self.size(stage), dtype=self.gradients_dtype, device=weights[0].device)
        self._gradients[stage] = flat
        for weight, gradient in zip(weights, _views(flat, weights), strict=True):
            weight.main_grad = gradient  # type: ignore[attr-defined]

    def take_gradients(self, stage: int) -> Tensor:
        """What the backwards have added up; the next begins anew."""
        for weight in self._weights([stage]):
            del weight.main_grad  # type: ignore[attr-defined]
        return self._gradients.pop(stage)

    def drop(self, stage: int) -> None:
        """Let go of the weights."""
        for weight in self._weights([stage]):
            weight.data = weight.new_empty(0)

    # ------------------------------------------------------------------------------------------------- at the owner

    @torch.no_grad()
    def pack(self, stage: int) -> Tensor:
        """The weights of a stage of this rank as one tensor, the same one for all copies of a step."""
        flat, left = self._packed.pop(stage, (None, self._targets[stage]))
        if flat is None:
            flat = torch.cat([weight.detach().reshape(-1) for weight in self._weights([stage])])
        if left > 1:
            self._packed[stage] = flat, left - 1
        return flat

    @torch.no_grad()
    def add(self, stage: int, flat: Tensor) -> None:
        """Gradients have come back: add them to those of this rank."""
        weights = self._weights([stage])
        for weight, gradient in zip(weights, _views(flat, weights), strict=True):
            add_gradient(weight, gradient.to(weight.dtype) if not hasattr(weight, "main_grad") else gradient)

    def _weights(self, stages: Sequence[int]) -> list[torch.nn.Parameter]:
        pieces = [piece for stage in stages for piece in self._program.stages[stage].pieces]
        home = self.model if self.model is not None and stages[0] in self.stages else self._own
        return home.weights_of(pieces)


def _whole_shape(weight: torch.nn.Parameter) -> torch.Size:
    shape: torch.Size = getattr(weight, "whole_shape", weight.shape)
    return shape


def _views(flat: Tensor, weights: Sequence[torch.nn.Parameter]) -> list[Tensor]:
    """The parts of a flat tensor in the shapes of the weights."""
    shapes = [_whole_shape(weight) for weight in weights]
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _add_to_main(weight: Tensor) -> None:
    """As DDP's hook does: autograd's gradient of one backward goes to where they are added up."""
    if weight.grad is not None and not getattr(weight, "grad_added_to_main_grad", False):
        weight.main_grad.add_(weight.grad)  # type: ignore[attr-defined]
    weight.grad = None
