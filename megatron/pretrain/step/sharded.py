"""Weights, gradients and optimizer state in parts over the data-parallel ranks: `--data-parallel-sharding-strategy
optim_grads_params`.

Weights are gathered around ops and gradients scattered after them by `helixpipe.runtime.sharded_weights`. What a rank
keeps of each weight is a parameter of megatron-core's ordinary optimizer, which so has the arithmetic, the groups and
the loss scale that it has for whole weights, and state for these parts alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from helixpipe.model import PipelineModel
from helixpipe.program.stages import Piece
from helixpipe.runtime.replicas import holders
from helixpipe.runtime.sharded_weights import ShardedWeights, WeightShard
from megatron.pretrain.process.parallel import Parallel
from megatron.pretrain.step.gradients import ReplicaSums, Sum
from megatron.pretrain.step.optimizer_update import OptimizerUpdate


class PartsOfModel(torch.nn.Module):
    """The parts of a rank's weights where an optimizer expects a model, under the weights' names. config, ddp_config:
    megatron-core's, which it looks at."""

    def __init__(self, parts: Sequence[WeightShard], config: Any, ddp_config: Any):
        super().__init__()
        self._parts, self.config, self.ddp_config = parts, config, ddp_config

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from ((part.name, part.parameter) for part in self._parts)

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        yield from (part.parameter for part in self._parts)


class _ReplicatedShards:
    """The parts of the weights that other pipeline ranks hold, too: theirs are the same parts."""

    def __init__(self, model: PipelineModel, parts: Sequence[WeightShard]):
        self.share_embeddings_and_output_weights = model.share_embeddings_and_output_weights
        self.piece_of = model.piece_of
        names = {id(weight): name for name, weight in model.named_parameters()}
        own = {part.name: part.parameter for part in parts}
        held = ((key, own.get(names[id(weight)])) for key, weight in model.replicated_parameters().items())
        self._held = {key: part for key, part in held if part is not None}

    def tied_rows(self, part: Piece) -> list[tuple[torch.nn.Parameter, slice]]:
        raise AssertionError("data-parallel ranks cut the embedding and a part of the head at other elements")

    def replicated_parameters(self) -> dict[str, torch.nn.Parameter]:
        return self._held


class TrainedParts(OptimizerUpdate):
    """`TrainedWeights` sharded over data-parallel ranks. sharded: gathers the weights; optimizer: megatron-core's, of
    the shards.

    The constructor is collective over all ranks, which tell each other what they hold.
    """

    def __init__(
        self, sharded: ShardedWeights, model: PipelineModel, optimizer: Any, parallel: Parallel, per_token: bool
    ):
        self._own = [part.parameter for part in sharded.parts()]
        super().__init__(optimizer, parallel, self._own)
        self.sharded, self._model, self._per_token = sharded, model, per_token
        self.begin, self.gather, self.release = sharded.begin, sharded.gather, sharded.release
        self.start_gathering, self.start_scattering = sharded.start_gathering, sharded.start_scattering
        self.finish_scattering = sharded.finish_scattering
        self.leave_to_w, self.complete = sharded.leave_to_w, sharded.complete
        self._held: list[Any] = [None] * parallel.pp_size
        dist.all_gather_object(self._held, model.pieces, group=parallel.pp_group)
        self._partial = [part for part in self._own if getattr(part, "sequence_parallel", False)]
        partial = {id(part) for part in self._partial} if parallel.tp_size > 1 else set()
        self._replicas = ReplicaSums(_ReplicatedShards(model, sharded.parts()), self._held, parallel, partial)

    def holders(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        return holders(self._held, pieces)

    # ---------------------------------------------------------------------------------------------------- gradients

    def zero_gradients(self) -> None:
        self.sharded.zero_gradients()
        self._optimizer.zero_grad()

    def sum_replicas(self, pieces: Sequence[Piece]) -> None:
        for unit in self.sharded.used(pieces):
            unit.finish()
        self._replicas.start(pieces)

    def reduce(self, tokens: Tensor | None) -> None:
        """Complete the sums over data-parallel ranks that are in progress, then those over tensor-parallel ranks and
        replicas.
        """
        for unit in self.sharded.units:
            unit.finish()
        if self._parallel.tp_size > 1:
            Sum(self._partial, self._parallel.tp_group).finish()
        self._replicas.finish()
        if self._per_token and tokens is not None:
            scale = 1.0 / tokens.clamp(min=1.0).reshape(())
            for unit in self.sharded.units:
                unit.total.mul_(scale)

    # ------------------------------------------------------------------------------------------------------- counts

    def count(self) -> tuple[int, int]:
        own = sum(math.prod(shape) for unit in self.sharded.units for shape in unit.shapes.values())
        counted = sum(part.numel() for part in self._own if self.counts_here(part))
        total = self._over_all(torch.tensor(counted, dtype=torch.int64, device=self._parallel.device))
        return own, int(total)

    def norm(self) -> float:
        square = torch.zeros((), dtype=torch.float64, device=self._parallel.device)
        for part in self._own:
            if self.counts_here(part):
                square += part.detach().double().pow(2).sum()
        return math.sqrt(float(self._over_all(square)))

    def _over_all(self, value: Tensor) -> Tensor:
        dist.all_reduce(value)
        return value
