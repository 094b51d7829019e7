"""Copies of weights and sums of their gradients on one rank: what they hold, and when they let go of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest
import torch

from helixpipe.lowering.build import build_graph
from helixpipe.lowering.graph import Graph
from helixpipe.model.linear import WeightGradients
from helixpipe.program.program import Op
from helixpipe.program.stages import Piece, ring_stages
from helixpipe.program.transfer import Transfer
from helixpipe.runtime.borrowed_weights import BorrowedWeights
from helixpipe.runtime.weights import WholeWeights
from schedules import Shape, build
from schedules.weipipe import WeipipeOptions


@dataclass
class Model:
    """A weight of two elements for each piece."""

    payload_dtype: torch.dtype = torch.float32
    weights: dict[Piece, torch.nn.Parameter] = field(default_factory=dict)

    def weights_of(self, pieces: Sequence[Piece]) -> list[torch.nn.Parameter]:
        return [self.weights[piece] for piece in pieces]

    def shell(self, pieces: Sequence[Piece]) -> Model:
        shell = Model(weights={piece: torch.nn.Parameter(torch.empty(0)) for piece in pieces})
        for weight in shell.weights.values():
            weight.whole_shape = torch.Size([2])  # type: ignore[attr-defined]
        return shell

    def weight_gradients(self) -> WeightGradients:
        return WeightGradients()


def on_rank_0() -> tuple[Graph, BorrowedWeights, Model]:
    """Of three ranks; it owns the first ring stage and runs the other two on copies."""
    graph = build_graph(build("weipipe-naive", Shape(3, 6, 3), WeipipeOptions(weipipe_slots=1)))
    assert graph.program.stages == ring_stages(3, 3)
    copies = BorrowedWeights(0, Model(), WholeWeights())
    copies.begin(graph)
    assert isinstance(copies.shell, Model)
    return graph, copies, copies.shell


def run(graph: Graph, copies: BorrowedWeights, shell: Model, op: Op) -> tuple[Transfer, Transfer]:
    """An op of a loss whose gradient of every weight is its number in the stage. Returns its two messages."""
    brought, taken = graph.weights_of[op], graph.sum_of[op]
    weights = shell.weights_of(graph.program.stages[op.stage].pieces)
    copies.put(brought, torch.ones(2 * len(weights)))
    copies.prepare(op)
    torch.stack([number * weight.sum() for number, weight in enumerate(weights)]).sum().backward()
    return brought, taken


def test_a_sum_that_has_left_is_kept_by_no_weight() -> None:
    graph, copies, shell = on_rank_0()
    brought, taken = run(graph, copies, shell, Op("B", 3, 0))
    total = copies.take_sum(taken)
    copies.drop(brought)
    assert total.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]
    for weight in shell.weights.values():
        assert getattr(weight, "main_grad", None) is None and weight.grad is None
        assert weight.untyped_storage().nbytes() == 0


def test_two_sums_of_a_stage_stay_apart() -> None:
    """The first leaves while the second is being added to."""
    graph, copies, shell = on_rank_0()
    first, second = (run(graph, copies, shell, Op("B", 3, microbatch))[1] for microbatch in (0, 3))
    assert first != second
    sent = copies.take_sum(first)
    copies.prepare(Op("B", 3, 3))
    weight = shell.weights_of(graph.program.stages[3].pieces)[1]
    (5.0 * weight).sum().backward()
    assert sent[2:4].tolist() == [1.0, 1.0]
    assert copies.take_sum(second)[2:4].tolist() == [6.0, 6.0]


@pytest.mark.parametrize(
    ("weights", "asked", "gradients"),
    [
        (torch.bfloat16, "fp32", torch.float32),
        (torch.float64, "fp32", torch.float64),
        (torch.bfloat16, "bf16", torch.bfloat16),
    ],
)
def test_sums_are_of_float32_unless_asked_otherwise(
    weights: torch.dtype, asked: Literal["fp32", "bf16"], gradients: torch.dtype
) -> None:
    graph = build_graph(build("weipipe-naive", Shape(3, 6, 3), WeipipeOptions(weipipe_grad_dtype=asked)))
    copies = BorrowedWeights(0, Model(payload_dtype=weights), WholeWeights())
    copies.begin(graph)
    brought, taken = graph.weights_of[Op("B", 3, 0)], graph.sum_of[Op("B", 3, 0)]
    assert copies.payload(brought) == (torch.Size([10]), weights)
    assert copies.payload(taken) == (torch.Size([10]), gradients)
