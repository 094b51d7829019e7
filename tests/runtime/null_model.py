"""A model that computes next to nothing: tensors of one element between its pieces, one weight of one element each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from helixpipe.costs.piece_kinds import inputs_after
from helixpipe.model.linear import WeightGradients
from helixpipe.program.stages import Piece
from helixpipe.runtime.executor import Step


class NullModel:
    """A model as the executor asks for, of any pieces. shell: whether its weights come from elsewhere."""

    payload_dtype = torch.float32

    def __init__(self, shell: bool = False) -> None:
        self._shell = shell
        self._weights: dict[Piece, torch.nn.Parameter] = {}
        self._gradients = WeightGradients()

    def payload_shapes(self, after: Piece, micro_batch_size: int, length: int) -> tuple[torch.Size, ...]:
        return tuple(torch.Size([1]) for _ in inputs_after(after.kind))

    def attention_layers(self, pieces: Sequence[Piece], training: bool) -> list[int]:
        return []

    def run(self, pieces: Sequence[Piece], inputs: tuple[Tensor, ...], batch: Any, context: Any) -> tuple[Tensor, ...]:
        own = torch.stack([weight.reshape(1) for weight in self.weights_of(pieces)]).sum(0)
        total = sum((tensor.reshape(1) for tensor in inputs), own)  # nothing is saved for the backward
        if pieces[-1].kind == "head":
            return (total.sum(),)
        return tuple(total + number for number, _ in enumerate(inputs_after(pieces[-1].kind)))

    def weights_of(self, pieces: Sequence[Piece]) -> list[torch.nn.Parameter]:
        for piece in pieces:
            if piece not in self._weights:
                weight = torch.nn.Parameter(torch.zeros(0 if self._shell else 1))
                weight.whole_shape = torch.Size([1])  # type: ignore[attr-defined]
                self._weights[piece] = weight
        return [self._weights[piece] for piece in pieces]

    def shell(self, pieces: Sequence[Piece]) -> NullModel:
        return NullModel(shell=True)

    def weight_gradients(self) -> WeightGradients:
        return self._gradients


def null_step(confirm: Any = None) -> Step:
    """A training step of sequences of one token each."""
    nothing: Any = None
    return Step(
        iteration=1,
        microbatch_number=lambda index: index,
        batch=lambda index: nothing,
        root_gradient=lambda index: torch.ones(()),
        micro_batch_size=1,
        seq_length=1,
        confirm=confirm,
    )
