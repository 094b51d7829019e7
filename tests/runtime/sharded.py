"""What the ranks of test_weights.py run: steps with weights in shards over data-parallel ranks, beside whole ones."""

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

from helixpipe.lowering.lower import lower
from helixpipe.model import PipelineModel
from helixpipe.program.program import Piece, Program, forward_only
from helixpipe.runtime.executor import Executor, LossSum, Step
from helixpipe.runtime.replicas import replicated_weights, used_by
from helixpipe.runtime.transport import Transport, make_transport
from tests.model.common import set_parallel
from tests.runtime.equality import Case, make_model, make_step, microbatches

LEARNING_RATE = 0.1


class ShardedWeights:
    """Each data-parallel rank keeps a part of every weight, and of its gradient when that is complete. Between ops a
    weight is full of NaN, and what its gradient has come to is elsewhere. gathered: the pieces that are whole now.
    completed, summed: the pieces of each stage that was complete, and whose replicas were to be summed."""

    def __init__(self, model: PipelineModel, program: Program, data: dist.ProcessGroup, pipeline: dist.ProcessGroup):
        self._data, self._pipeline = data, pipeline
        tied = model.share_embeddings_and_output_weights
        self._weights = dict(model.named_parameters())
        self._users = {name: used_by(name, tied) for name in self._weights}
        held = [program.pieces_of_rank(rank) for rank in range(program.num_ranks)]
        replicated = replicated_weights(model, held)
        assert all(len(weight.ranks) == pipeline.size() for weight in replicated)
        self._replicas = {id(weight.parameter) for weight in replicated}
        self._shards = {name: self._part(weight.data).clone() for name, weight in self._weights.items()}
        self.gathered: tuple[Piece, ...] = ()
        self.zero_gradients()
        for weight in self._weights.values():
            weight.data.fill_(torch.nan)

    def gather(self, pieces: Sequence[Piece]) -> None:
        assert not self.gathered, "one stage at a time"
        self.gathered = tuple(pieces)
        for name in self._used(pieces):
            weight = self._weights[name]
            assert weight.grad is None, f"something was added to {name} between ops"
            weight.data.copy_(self._whole(name, self._shards[name]))
            weight.grad = self._sums.pop(name, None)

    def release(self, pieces: Sequence[Piece]) -> None:
        assert self.gathered == tuple(pieces)
        self.gathered = ()
        for name in self._used(pieces):
            weight = self._weights[name]
            weight.data.fill_(torch.nan)
            if weight.grad is not None:
                self._sums[name], weight.grad = weight.grad, None

    def zero_gradients(self) -> None:
        self.completed: list[tuple[Piece, ...]] = []
        self.summed: list[tuple[Piece, ...]] = []
        self._sums: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}

    def complete(self, pieces: Sequence[Piece]) -> None:
        self.completed.append(tuple(pieces))
        complete = {piece for stage in self.completed for piece in stage}
        for name in self._used(pieces):
            if self._users[name] <= complete:
                self._reduce(name)

    def sum_replicas(self, pieces: Sequence[Piece]) -> None:
        self.summed.append(tuple(pieces))
        summed = {piece for stage in self.summed for piece in stage}
        for name in self._used(pieces):
            if id(self._weights[name]) in self._replicas and self._users[name] <= summed:
                if name not in self.gradients:  # no op ran here
                    self._reduce(name)
                dist.all_reduce(self.gradients[name], group=self._pipeline)

    def reduce(self, tokens: Tensor | None) -> None:
        assert tokens is None
        for name, weight in self._weights.items():
            if name not in self.gradients:
                self._reduce(name)
            assert weight.grad is None, f"something was added to {name} between ops"
        assert not self._sums, "reduced before the last backward"
        summed = {piece for stage in self.summed for piece in stage}
        for name, users in self._users.items():
            assert users <= summed or id(self._weights[name]) not in self._replicas, f"no place to sum {name} at"

    def update(self) -> None:
        for name, shard in self._shards.items():
            shard -= LEARNING_RATE * self.gradients[name]

    def whole_gradients(self) -> dict[str, Tensor]:
        return {name: self._whole(name, gradient) for name, gradient in self.gradients.items()}

    def _used(self, pieces: Sequence[Piece]) -> list[str]:
        return [name for name, users in self._users.items() if not users.isdisjoint(pieces)]

    def _reduce(self, name: str) -> None:
        gradient = self._sums.pop(name, None)
        if gradient is None:  # of a weight that no op here used
            gradient = torch.zeros_like(self._weights[name])
        dist.all_reduce(gradient, group=self._data)
        self.gradients[name] = self._part(gradient).clone()

    def _part(self, whole: Tensor) -> Tensor:
        return whole.reshape(-1).tensor_split(self._data.size())[self._data.rank()]

    def _whole(self, name: str, part: Tensor) -> Tensor:
        like = self._weights[name]
        parts = [torch.empty_like(each) for each in like.detach().reshape(-1).tensor_split(self._data.size())]
        dist.all_gather(parts, part, group=self._data)
        return torch.cat(parts).view_as(like)


def run_sharded(rank: int, world_size: int, cases: list[Case]) -> list[dict[str, Any]]:
    """Two steps and an evaluation of every case, both ways. For each what differed, and what the store was told of the
    second step."""
    set_parallel(pp=2)
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    transport = make_transport(pipeline, device())
    return [run_both(case, transport, pipeline) for case in cases]


def run_both(case: Case, transport: Transport, pipeline: dist.ProcessGroup) -> dict[str, Any]:
    data, program = parallel_state.get_data_parallel_group(), case.program()
    rank, steps = pipeline.rank(), [make_data_step(case, data, training=training) for training in (True, False)]
    plain, model = make_model(case), make_model(case)
    store = ShardedWeights(model, program, data, pipeline)
    lowered, evaluation = lower(program), lower(forward_only(program))
    whole, sharded = Executor(rank, plain, transport), Executor(rank, model, transport, weights=store)
    losses, differing = [], []
    for _ in range(2):
        store.zero_gradients()
        losses.append([sums(executor.run(lowered, steps[0])[0]) for executor in (whole, sharded)])
        store.reduce(None)
        expected, gradients = sum_whole(plain, data, pipeline), store.whole_gradients()
        assert set(expected) == set(gradients)
        differing += [name for name, value in expected.items() if not torch.equal(value, gradients[name])]
        step_whole(plain)
        store.update()
    completed, summed = list(store.completed), list(store.summed)
    store.zero_gradients()
    losses.append([sums(executor.run(evaluation, steps[1])[0]) for executor in (whole, sharded)])
    return {"losses": losses, "differing": differing, "completed": completed, "summed": summed, "rank": rank}


def make_data_step(case: Case, data: dist.ProcessGroup, training: bool) -> Step:
    """On other microbatches than the other data-parallel rank's."""
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
        dist.all_reduce(weight.grad, group=data)
        if id(weight) in replicas:
            dist.all_reduce(weight.grad, group=pipeline)
        gradients[name] = weight.grad
    return gradients


def step_whole(model: PipelineModel) -> None:
    for weight in model.parameters():
        assert weight.grad is not None
        weight.data -= LEARNING_RATE * weight.grad
        weight.grad = None
