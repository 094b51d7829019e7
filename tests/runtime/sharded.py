"""Runs on the ranks of test_weights.py: steps with weights in shards over data-parallel ranks, beside whole ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from helixpipe.model.device import device, prepare

prepare()  # before megatron-core is imported, whose notices it silences

from megatron.core import parallel_state

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.lower import lower
from helixpipe.model import PipelineModel
from helixpipe.planning.memory.sharding import shared_out
from helixpipe.program.costs import Contents
from helixpipe.program.program import Program, forward_only
from helixpipe.program.stages import Piece
from helixpipe.runtime.executor import Executor, LossSum, Step
from helixpipe.runtime.replicas import replicated_weights
from helixpipe.runtime.sharded_weights import FlatWeights, ShardedWeights
from helixpipe.runtime.transport import Transport, make_transport
from helixpipe.simulate.sweep import sweep
from tests.model.common import set_parallel
from tests.runtime.equality import Case, make_model, make_step, microbatches

LEARNING_RATE = 0.1


class WholeWeights(PieceTimes):
    """Elements of weights that are whole, and of their gradients; all else weighs nothing."""

    store: ShardedWeights

    def __init__(self, store: ShardedWeights):
        super().__init__()
        object.__setattr__(self, "store", store)

    def size(self, contents: Contents) -> float:
        if contents.kind not in ("gathered", "made_gradients"):
            return 0.0
        pieces = [piece for segment in contents.segments for piece in segment.pieces]
        return float(sum(elements(unit) for unit in self.store.used(pieces)))


def elements(unit: FlatWeights) -> int:
    """Without what is filled up."""
    return sum(shape.numel() for shape in unit.shapes.values())


class Watched(ShardedWeights):
    """Looks on. most: elements of weights and gradients that were whole at a time. gathered: the pieces that are whole
    now. completed, summed: the pieces of each stage that was complete, and whose replicas were to be summed."""

    def __init__(self, model: PipelineModel, program: Program, data: dist.ProcessGroup, pipeline: dist.ProcessGroup):
        self._pipeline = pipeline
        held = [program.pieces_of_rank(rank) for rank in range(program.num_ranks)]
        own = [stage.pieces for index, stage in enumerate(program.stages) if pipeline.rank() in program.holders(index)]
        super().__init__(model, own, data, torch.float64, expert_group=copies_of_experts())
        replicated = replicated_weights(model, held)
        assert all(len(weight.ranks) == pipeline.size() for weight in replicated)
        self._once = program.gathered_once
        self._replicas = {id(weight.parameter) for weight in replicated}
        self._model = model
        self.most = 0
        self.gathered: tuple[Piece, ...] = ()
        self.begin()

    def begin(self) -> None:
        self.zero_gradients()
        self.completed: list[tuple[Piece, ...]] = []
        self.summed: list[tuple[Piece, ...]] = []
        self._done: list[FlatWeights] = []

    def gather(self, pieces: Sequence[Piece], kind: str) -> None:
        assert not self.gathered, "one stage at a time"
        assert kind not in ("B", "I", "W") or tuple(pieces) not in self.completed, "gradients after the stage's last"
        assert all(weight.grad is None for weight in self._model.parameters())
        whole = [weight for weight in self._model.parameters() if weight.numel()]
        mine = [weight for unit in self.used(pieces) for weight in unit.weights.values()]
        if kind != "W" and not self._once:  # which needs none, and another stage's may stay
            assert all(any(weight is own for own in mine) for weight in whole), "more is whole than its weights"
        self.gathered = tuple(pieces)
        super().gather(pieces, kind)
        self._look()

    def start_gathering(self, pieces: Sequence[Piece]) -> None:
        super().start_gathering(pieces)
        self._look()

    def _look(self) -> None:
        whole = ((unit._whole is not None) + len(unit._made) + len(unit._scattering) for unit in self.units)
        self.most = max(self.most, sum(count * elements(unit) for count, unit in zip(whole, self.units, strict=True)))

    def release(self, pieces: Sequence[Piece], kind: str, keeps: bool = False, scatters: bool = False) -> None:
        assert self.gathered == tuple(pieces)
        self.gathered = ()
        used_elsewhere = [unit for unit in self.used(pieces) if unit._holders - {tuple(pieces)}]
        super().release(pieces, kind, keeps, scatters)
        assert all(unit._whole is not None for unit in used_elsewhere), "another stage's weights were let go of"

    def complete(self, pieces: Sequence[Piece]) -> None:
        self.completed.append(tuple(pieces))

    def sum_replicas(self, pieces: Sequence[Piece]) -> None:
        self.summed.append(tuple(pieces))
        summed = {piece for stage in self.summed for piece in stage}
        for unit in self.used(pieces):
            if unit.users <= summed and any(id(weight) in self._replicas for weight in unit.weights.values()):
                self._sum(unit)

    def _sum(self, unit: FlatWeights) -> None:
        assert unit not in self._done
        self._done.append(unit)
        unit.finish()
        dist.all_reduce(unit.total, group=self._pipeline)

    def update(self) -> None:
        for part in self.parts():
            parameter: Any = part.parameter
            parameter.data -= LEARNING_RATE * parameter.main_grad

    def whole_gradients(self) -> dict[str, Tensor]:
        gradients = {}
        for unit in self.units:
            whole = torch.empty(unit.numel, dtype=torch.float64)
            dist.all_gather_into_tensor(whole, unit.total, group=unit.group)
            gradients |= dict(zip(unit.weights, unit.views(whole), strict=True))
        return gradients


def run_sharded(rank: int, world_size: int, cases: list[Case]) -> list[dict[str, Any]]:
    """Two steps and an evaluation of every case, both ways. For each what differed, and what the store was told of the
    second step."""
    found: dict[int, dict[str, Any]] = {}
    for ep in sorted({case.ep for case in cases}):
        set_parallel(pp=2, ep=ep)
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        transport = make_transport(pipeline, device())
        ours = [index for index, case in enumerate(cases) if case.ep == ep]
        found.update((index, run_both(cases[index], transport, pipeline)) for index in ours)
        transport.close()
    return [found[index] for index in range(len(cases))]


def copies_of_experts() -> dist.ProcessGroup | None:
    """The ranks that have the same experts as this one; None where all have all."""
    shared_out = parallel_state.get_expert_model_parallel_world_size() > 1
    return parallel_state.get_expert_data_parallel_group() if shared_out else None


def run_both(case: Case, transport: Transport, pipeline: dist.ProcessGroup) -> dict[str, Any]:
    data, program = parallel_state.get_data_parallel_group(), case.program()
    shared = shared_out(program, data.size(), case.gathered_once)
    rank, steps = pipeline.rank(), [make_data_step(case, data, training=training) for training in (True, False)]
    plain, model = make_model(case), make_model(case)
    store = Watched(model, shared, data, pipeline)
    whole, sharded = Executor(rank, plain, transport), Executor(rank, model, transport, weights=store)
    plans = [
        (whole, lower(program), lower(forward_only(program))),
        (sharded, lower(shared), lower(forward_only(shared))),
    ]
    losses, differing = [], []
    for _ in range(2):
        store.begin()
        losses.append([sums(executor.run(plan, steps[0])[0]) for executor, plan, _ in plans])
        expected, gradients = sum_whole(plain, data, pipeline), store.whole_gradients()
        assert set(expected) == set(gradients)
        differing += [name for name, value in expected.items() if worst(value, gradients[name]) > 1e-11]
        step_whole(plain)
        store.update()
    completed, summed = list(store.completed), list(store.summed)
    losses.append([sums(executor.run(plan, steps[1])[0]) for executor, _, plan in plans])
    swept = sweep(plans[1][1], BoundCosts(shared, WholeWeights(store)), rank).total
    return {
        "losses": losses,
        "differing": differing,
        "completed": completed,
        "summed": summed,
        "rank": rank,
        "whole": (store.most, swept),
    }


def make_data_step(case: Case, data: dist.ProcessGroup, training: bool) -> Step:
    """On other microbatches than the other data-parallel rank's."""
    if case.ep > 1:  # which deals them out over its pipelines
        return make_step(case, training)
    own = microbatches(replace(case, m=case.m * data.size()))[data.rank() :: data.size()]
    return replace(make_step(case, training), batch=own.__getitem__)


def sums(losses: list[LossSum]) -> list[float]:
    return [loss.value.item() for loss in losses]


def sum_whole(model: PipelineModel, data: dist.ProcessGroup, pipeline: dist.ProcessGroup) -> dict[str, Tensor]:
    """The gradients of a model whose weights are whole, over all data and, of replicas, over the pipeline."""
    replicas = {id(weight) for weight in model.replicated_parameters().values()}
    gradients = {}
    for name, weight in model.named_parameters():
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        if getattr(weight, "allreduce", True):
            dist.all_reduce(weight.grad, group=data)
        if id(weight) in replicas:
            dist.all_reduce(weight.grad, group=pipeline)
        gradients[name] = weight.grad
    return gradients


def worst(expected: Tensor, found: Tensor) -> float:
    """The largest error, relative to the largest value."""
    return float((expected - found).abs().max() / expected.abs().max().clamp(min=1e-30))


def step_whole(model: PipelineModel) -> None:
    for weight in model.parameters():
        assert weight.grad is not None
        weight.data -= LEARNING_RATE * weight.grad
        weight.grad = None
