"""A model whose ops wait: tensors of true shape, an autograd graph as a model's, and no arithmetic to speak of.

Everything but the arithmetic is the engine's own: graphs a segment, keys and values in their store, weights that
travel, gradients that W leaves for later. A weight's gradient is 1 for each unit that ran, so that who adds up a step's
gradients sees whether all of it ran, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.piece_kinds import inputs_after
from helixpipe.lowering.bound import BoundCosts
from helixpipe.model import UnitContext
from helixpipe.model.attention.kv_store import UnitKeyValues
from helixpipe.model.linear import WeightGradients
from helixpipe.program.costs import Costs
from helixpipe.program.stages import Piece
from helixpipe.runtime.executor import Executor, Step, StepRun
from helixpipe.runtime.step import PlannedOp

_PASSES_RESIDUAL = ("norm", "qkv", "attn")
"""Pieces whose last output is their last input."""


class WaitingModel:
    """A model as the executor asks for, of any pieces, which are made when they are first asked for. shell: whether its
    weights come from elsewhere. micro_batch_size: of all steps."""

    payload_dtype = torch.float32

    def __init__(self, costs: ModelCosts, micro_batch_size: int, shell: bool = False):
        self._costs, self._micro, self._shell = costs, micro_batch_size, shell
        self.weights: dict[Piece, torch.nn.Parameter] = {}
        self._gradients = WeightGradients()

    def payload_shapes(self, after: Piece, micro_batch_size: int, length: int) -> tuple[torch.Size, ...]:
        return self._shapes(inputs_after(after.kind), length)

    def attention_layers(self, pieces: Sequence[Piece], training: bool) -> list[int]:
        return [piece.layer for piece in pieces if piece.role == "attn"]

    def _shapes(self, names: Sequence[str], length: int) -> tuple[torch.Size, ...]:
        model, rows = self._costs.model, (length, self._micro)
        shapes = {
            "hidden": (*rows, model.hidden),
            "query": (*rows, model.heads, model.channels),
            "key": (*rows, model.groups, model.channels),
            "value": (*rows, model.groups, model.channels),
            "attention": (*rows, model.query_hidden),
        }
        return tuple(torch.Size(shapes[name]) for name in names)

    def run(
        self, pieces: Sequence[Piece], inputs: tuple[Tensor, ...], batch: Any, context: UnitContext
    ) -> tuple[Tensor, ...]:
        for piece in pieces:
            inputs = self._run_piece(piece, inputs, context)
        return inputs

    def _run_piece(self, piece: Piece, inputs: tuple[Tensor, ...], context: UnitContext) -> tuple[Tensor, ...]:
        assert context.length is not None
        if piece.kind == "head":
            return self._work(piece, [torch.Size(())], inputs)
        shapes = self._shapes(inputs_after(piece.kind), context.length)
        if piece.kind not in _PASSES_RESIDUAL:
            return self._work(piece, shapes, inputs)
        *given, residual = inputs if len(inputs) > 1 else (*inputs, inputs[0])
        if piece.kind == "attn" and context.keys_values is not None:
            assert isinstance(context.keys_values, UnitKeyValues), "no schedule here has keys and values in blocks"
            given[1:] = context.keys_values.join(piece.layer, given[1], given[2])
        return (*self._work(piece, shapes[:-1], given), residual)

    def _work(self, piece: Piece, shapes: Sequence[torch.Size], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        weight = self._weight(piece)
        outputs: tuple[Tensor, ...] = _Work.apply(self._gradients, shapes, weight, *inputs)
        return outputs

    def _weight(self, piece: Piece) -> torch.nn.Parameter | None:
        """All weights of a piece as one, [1, elements]; attention has none."""
        if piece not in self.weights:
            elements = self._costs.bytes.parameters([piece])
            if not elements:
                return None
            weight = torch.nn.Parameter(torch.ones(0 if self._shell else (1, elements)))
            weight.whole_shape = torch.Size((1, elements))  # type: ignore[attr-defined]
            self.weights[piece] = weight
        return self.weights[piece]

    def weights_of(self, pieces: Sequence[Piece]) -> list[torch.nn.Parameter]:
        return [weight for weight in map(self._weight, pieces) if weight is not None]

    def shell(self, pieces: Sequence[Piece]) -> WaitingModel:
        return WaitingModel(self._costs, self._micro, shell=True)

    def weight_gradients(self) -> WeightGradients:
        return self._gradients


class _Work(torch.autograd.Function):
    """Tensors of these shapes from any inputs; gradients of the inputs' shapes from any gradients."""

    @staticmethod
    def forward(
        ctx: Any, store: WeightGradients, shapes: Sequence[torch.Size], weight: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.store, ctx.weight = store, weight
        ctx.shapes = [tensor.shape for tensor in inputs]
        return tuple([torch.ones(shape) for shape in shapes])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, one = None, torch.ones(1, 1)
        if ctx.weight is not None:
            ones = torch.ones(ctx.weight.shape)
            weight = None if ctx.store.put_off(ctx.weight, ones, one, False) else ones
        return None, None, weight, *[torch.ones(shape) for shape in ctx.shapes]


# ------------------------------------------------------------------------------------------------------------ waiting


class WaitingRun(StepRun):
    """A step whose ops do what they do, and then wait until as much time has passed as they are said to take."""

    def __init__(self, executor: Any, plan: Any, step: Step, record: bool):
        super().__init__(executor, plan, step, record)
        bound, scale = BoundCosts(plan.program, executor.costs), executor.time_scale
        self._ops = {kind: _waiting(handler, bound, scale) for kind, handler in self._ops.items()}


class WaitingExecutor(Executor):
    """costs: say how long ops take, in seconds. time_scale: of these, in the steps that follow."""

    step_run = WaitingRun

    def __init__(self, costs: Costs, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.costs, self.time_scale = costs, 1.0


def _waiting(handler: Callable[[PlannedOp], None], bound: BoundCosts, scale: float) -> Callable[[PlannedOp], None]:
    def run(op: PlannedOp) -> None:
        end = time.perf_counter() + scale * bound.op_time(op.op)
        handler(op)
        wait_until(end)

    return run


SPIN = 2e-4
"""Seconds before the end of a wait from which on it looks at the clock: about what a process takes to wake up."""


def wait_until(end: float) -> None:
    """Of `time.perf_counter`. Asleep for most of it, so that many ranks share few cores."""
    if (left := end - time.perf_counter()) > SPIN:
        time.sleep(left - SPIN)
    while time.perf_counter() < end:
        pass
