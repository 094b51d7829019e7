"""Costs bound to programs: what is asked once for all that are alike is what each would be told."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from helixpipe.adapt.measured_costs import MeasuredCosts
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Layout, find_model
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.build import graph_of
from helixpipe.planning.memory.early import peak_memory
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.planning.vocabulary.choice import WithoutHead
from helixpipe.program.costs import Costs
from helixpipe.program.program import Op, Program
from schedules import Shape, build
from schedules.infinipipe import InfinipipeOptions
from tests.lowering.ragged import random_chains

RANKS, LAYERS = 4, 12


def programs(costs: Costs, seed: int) -> list[Program]:
    """Of one workload: orders with B, with I and W, without recomputation, unit by unit, and of whole stages."""
    shape = Shape(RANKS, 6, LAYERS, costs=costs, ragged=random_chains(Random(seed), 6, 4, longest=4096))
    whole = InfinipipeOptions(infinipipe_zb=False)
    plain = build("infinipipe", shape, whole)
    limit = max(peak_memory(plain, costs)) - 0.4 * plain.workload.mean_tokens * 4096 * LAYERS  # type: ignore[operator]
    tight = Shape(RANKS, 6, LAYERS, costs=costs, ragged=shape.ragged, memory_limit=limit)
    full = Shape(RANKS, 6, LAYERS, costs=costs, ragged=shape.ragged, recompute=RecomputeOptions("full"))
    every = [plain, build("seq1f1b-zb", shape), build("infinipipe", tight, whole), build("infinipipe", full)]
    assert every[2].activations
    return every


@pytest.mark.parametrize(
    "more", [{"tied": True}, {"window": 512, "windowed": (1, 1, 1, 1, 1, 0, 0)}], ids=("tied", "windows")
)
def test_orders_of_one_workload_are_told_what_each_alone_is_told(more: dict[str, Any]) -> None:
    model = replace(find_model("llama3-8b"), layers=LAYERS, **more)
    costs = ModelCosts(model, HARDWARE["h100"], Layout(tensor_parallel=4), 8192)  # two ranks a node
    for program in programs(costs, seed=len(more)):
        bound = BoundCosts(program, costs)
        alone = BoundCosts(replace(program, workload=replace(program.workload)), replace(costs))
        graph = graph_of(program)
        for op in graph.ops:
            own = costs.op_time(alone.work(op))
            assert bound.op_time(op) == own + (alone.recompute_time(op) if alone.recomputes_inside(op) else 0.0)
        for transfer in graph.transfers:
            told = costs.transfer_time(alone.load(transfer.kind, transfer.ranks, transfer.unit))
            assert bound.transfer_time(transfer) == told
        for buffer in graph.buffers:
            contents = alone.contents(buffer)
            assert bound.size(buffer) == (0.0 if contents is None else costs.size(contents))


@pytest.mark.parametrize("slow", range(4))
def test_stages_alike_that_were_measured_apart_are_told_apart(slow: int) -> None:
    """Also where the head is left out."""
    program = build("1f1b", Shape(4, 4, 8))
    homes = {piece: stage for stage, own in enumerate(program.stages) for piece in own.pieces}
    factors = {("F", stage): 2.0 if stage == slow else 1.0 for stage in range(4)}
    measured = MeasuredCosts(PieceTimes({"mlp": 1.0}), homes, factors, {})
    for costs in (measured, WithoutHead(measured)):
        bound = BoundCosts(program, costs)
        assert [bound.op_time(Op("F", stage, 0)) for stage in range(4)] == [4.0 if s == slow else 2.0 for s in range(4)]
