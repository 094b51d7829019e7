"""Weights that are not where they are used: copies of other ranks' stages here, and of this rank's own elsewhere.

A stage's weights travel as one flat tensor, and so do sums of their gradients. Which message brings the weights an op
runs with, and which takes its gradient away, stands in the program's graph (see `lowering.lower`). Copies never
meet DDP or the optimizer: the owner adds what comes back to its own gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, cast

import torch
from torch import Tensor

from helixpipe.lowering.graph import Graph
from helixpipe.model.linear import WeightGradients, add_gradient
from helixpipe.program.program import Op
from helixpipe.program.stages import Piece
from helixpipe.program.transfer import Transfer
from helixpipe.runtime.weights import StageWeights


class ModelWithWeights(Protocol):
    """The interface of a model whose weights travel; `helixpipe.model.PipelineModel` is one."""

    payload_dtype: torch.dtype

    def weights_of(self, pieces: Sequence[Piece]) -> list[torch.nn.Parameter]: ...

    def shell(self, pieces: Sequence[Piece]) -> ModelWithWeights: ...

    def weight_gradients(self) -> WeightGradients: ...


class BorrowedWeights:
    """The borrowed weights of one rank, for the whole run. `stages`: those that run here on copies under the current
    plan, with the modules of `shell`.

    own: the model that holds the weights of this rank's own pieces, store: who keeps these. A shell's weights are views
    of the copy an op runs with, their `main_grad` views of the sum its gradient is added to.
    """

    def __init__(self, rank: int, own: ModelWithWeights, store: StageWeights):
        self._rank, self._own, self._own_weights = rank, own, store
        self.stages: frozenset[int] = frozenset()
        self.shell: ModelWithWeights | None = None
        self._shells: dict[tuple[Piece, ...], ModelWithWeights] = {}
        self._graph: Graph | None = None

    def begin(self, graph: Graph) -> None:
        """Prepare a step of a plan: discard everything of the last step, also if that failed."""
        self._copies: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}
        self._bound: dict[int, int] = {}
        self._packed: dict[int, tuple[Tensor, int]] = {}
        if graph is self._graph:
            return
        self._graph, program = graph, graph.program
        self.stages = frozenset(program.copied_stages(self._rank))
        self._known: dict[int, list[torch.nn.Parameter]] = {}
        if self.stages:
            self.shell = self._shell(tuple(p for stage in sorted(self.stages) for p in program.stages[stage].pieces))
        self._joins = {m.follows: m for m in graph.messages if m.kind == "weight_gradients" and m.follows >= 0}
        sent = (m for m in graph.messages if m.kind == "weights" and m.source == self._rank and m.follows < 0)
        self._sends = Counter(message.unit.stage for message in sent)

    def _shell(self, pieces: tuple[Piece, ...]) -> ModelWithWeights:
        """Return modules without weights of their own, made once for the same pieces."""
        if pieces not in self._shells:
            shell = self._shells[pieces] = self._own.shell(pieces)
            for weight in shell.weights_of(pieces):
                weight.register_post_accumulate_grad_hook(self._add_to_sum)
        return self._shells[pieces]

    def payload(self, message: Transfer) -> tuple[torch.Size, torch.dtype]:
        """Shape and type of a message with weights or gradients. Gradients are summed in float32, or in the weights'
        type where that is wider, or in bfloat16 where a ring's are to be."""
        stage, dtype = message.unit.stage, self._own.payload_dtype
        if message.kind == "weight_gradients":
            ring = self._plan.program.stages[stage].placement == "ring"
            narrow = ring and self._plan.program.ring.gradient_bytes == 2
            dtype = torch.bfloat16 if narrow else torch.promote_types(dtype, torch.float32)
        return torch.Size((sum(_whole_shape(weight).numel() for weight in self._weights(stage)),)), dtype

    # ------------------------------------------------------------------------------------------------ at the copies

    def put(self, message: Transfer, flat: Tensor) -> None:
        """Store weights that have arrived."""
        self._copies[message.number] = flat

    @property
    def copies(self) -> list[Tensor]:
        """Weights that have come and are here, a flat tensor for each stage and copy."""
        return list(self._copies.values())

    def drop(self, message: Transfer) -> None:
        """Let go of weights that have come."""
        del self._copies[message.number]
        stage = message.unit.stage
        if self._bound.get(stage) == message.number:
            del self._bound[stage]
            for weight in self._weights(stage):
                weight.data = weight.new_empty(0)

    def prepare(self, op: Op) -> None:
        """Bind the weights and the sum of gradients for an op of a stage that runs here on copies."""
        weights = self._weights(op.stage)
        copy = self._plan.weights_of.get(op)
        if copy is not None and self._bound.get(op.stage) != copy.number:
            self._bound[op.stage] = copy.number
            for weight, data in zip(weights, _views(self._copies[copy.number], weights), strict=True):
                weight.data = data
        total = self._plan.sum_of.get(op)
        for weight in weights:
            weight.main_grad = None  # type: ignore[attr-defined]
        if total is not None:
            if total.number not in self._sums:
                size, dtype = self.payload(total)
                self._sums[total.number] = torch.zeros(size, dtype=dtype, device=weights[0].device)
            for weight, gradient in zip(weights, _views(self._sums[total.number], weights), strict=True):
                weight.main_grad = gradient  # type: ignore[attr-defined]

    def leave_to_w(self, op: Op) -> None:
        """Pass on gradients that layers over slices have computed in an I, for its W to add."""
        for weight in self._weights(op.stage):
            gradient: Tensor | None = weight.main_grad  # type: ignore[attr-defined]
            if gradient is not None:
                self._shell_gradients().put_off_sum(weight, gradient)
                weight.main_grad = None  # type: ignore[attr-defined]

    def take_sum(self, message: Transfer) -> Tensor:
        """Return the sum of the ops' gradients and of those received; it is sent with this message."""
        for weight in self._weights(message.unit.stage):
            weight.main_grad = None  # type: ignore[attr-defined]  # a view of it, or of a sum that `prepare` puts back
        return self._sums.pop(message.number)

    def _add_to_sum(self, weight: Tensor) -> None:
        """Add autograd's gradient of one backward to the sum, as DDP's hook does; in an I (of a bias or a norm), to
        what its W will add.
        """
        gradient, weight.grad = weight.grad, None
        if gradient is None or getattr(weight, "grad_added_to_main_grad", False):
            return  # left to W, or added by the kernel
        total = weight.main_grad  # type: ignore[attr-defined]
        if total is not None:
            total.add_(gradient)
        else:
            self._shell_gradients().put_off_sum(cast(torch.nn.Parameter, weight), gradient)

    def _shell_gradients(self) -> WeightGradients:
        assert self.shell is not None
        return self.shell.weight_gradients()

    # ------------------------------------------------------------------------------------------------- at the owner

    @torch.no_grad()
    def pack(self, stage: int) -> Tensor:
        """Return the weights of a stage of this rank as one tensor, the same one for all sends of a step."""
        flat, left = self._packed.pop(stage, (None, self._sends[stage]))
        if flat is None:
            with self._gathered(stage, "F"):
                flat = pack_weights(self._weights(stage))
        if left > 1:
            self._packed[stage] = flat, left - 1
        return flat

    @torch.no_grad()
    def add(self, message: Transfer, flat: Tensor) -> None:
        """Add gradients that have arrived to the sum that leaves next, or at the owner to its own gradients."""
        following = self._joins.get(message.number)
        if following is not None:
            self._sums[following.number].add_(flat)
            return
        stage = message.unit.stage
        weights = self._weights(stage)
        with self._gathered(stage, "W"):
            for weight, gradient in zip(weights, _views(flat, weights), strict=True):
                add_gradient(weight, gradient)

    @contextmanager
    def _gathered(self, stage: int, kind: str) -> Iterator[None]:
        """Gather this rank's own weights of a stage, or (W) their gradients, for the duration of the context."""
        pieces = self._plan.program.stages[stage].pieces
        self._own_weights.gather(pieces, kind)
        yield
        self._own_weights.release(pieces, kind)

    @property
    def _plan(self) -> Graph:
        assert self._graph is not None
        return self._graph

    def _weights(self, stage: int) -> list[torch.nn.Parameter]:
        """Return the stage's weights, in the shell if it is copied here, else this rank's own."""
        if stage not in self._known:
            home = self.shell if self.shell is not None and stage in self.stages else self._own
            self._known[stage] = home.weights_of(self._plan.program.stages[stage].pieces)
        return self._known[stage]


def pack_weights(weights: Sequence[torch.nn.Parameter]) -> Tensor:
    """Pack weights into one tensor."""
    return torch.cat([weight.detach().reshape(-1) for weight in weights])


def _whole_shape(weight: torch.nn.Parameter) -> torch.Size:
    shape: torch.Size = getattr(weight, "whole_shape", weight.shape)
    return shape


def _views(flat: Tensor, weights: Sequence[torch.nn.Parameter]) -> list[Tensor]:
    """Return the parts of a flat tensor in the shapes of the weights."""
    shapes = [_whole_shape(weight) for weight in weights]
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
