"""Weights of which every data-parallel rank keeps a part: whole only around an op, gradients summed into the parts.

This is the third stage of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020), which torch calls fully sharded data parallelism. The weights of a stage make one flat tensor, padded
so that n ranks have equal parts of it. An op that computes with the weights gathers it; an op that makes weight
gradients adds them to a flat tensor alike, of which afterwards every rank gets its part of the sum over all ranks. So a
rank always has 1/n of weights and gradients, and beside them the whole of what its op works on.

    F, R    gather, run, release
    B       gather, run, release and scatter
    I       gather, run, release: what it finds of gradients (biases, norms) is left to W
    W       run, scatter: linear layers' weight gradients need no weights

All ranks of the group run the same stream of instructions, so their collectives stand in one order. Experts that
expert-parallel ranks share out are a flat tensor of their own, in parts over the ranks that hold the same ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from helixpipe.model.linear import WeightGradients
from helixpipe.program.stages import Piece
from helixpipe.runtime.replicas import used_by

ALIGNMENT = 64
"""Elements; weights begin, and parts end, at multiples of it, as kernels and copies like it."""

_ENDS = ("embedding.word_embeddings.weight", "output_layer.weight")
_ATTRIBUTES = (
    "tensor_model_parallel",
    "partition_dim",
    "partition_stride",
    "sequence_parallel",
    "shared",
    "is_embedding_or_output_parameter",
    "allreduce",
)
"""The attributes by which megatron-core's optimizer knows which weights to count, which are experts that other ranks do
not have (`allreduce` is False), and their learning rates."""


class ShardedModel(Protocol):
    """The interface of a model whose weights are sharded; `helixpipe.model.PipelineModel` is one."""

    share_embeddings_and_output_weights: bool

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]: ...

    def weight_gradients(self) -> WeightGradients: ...

    def piece_of(self, parameter: str) -> Piece: ...


class WeightShard(NamedTuple):
    """The shard of a weight that this rank keeps: elements `start` to `end` of it, flat. parameter: these, with the
    part of the summed gradient as `main_grad`; of a matrix [1, elements], of a vector [elements], since what has one
    dimension has no weight decay."""

    name: str
    start: int
    end: int
    parameter: torch.nn.Parameter


class FlatWeights:
    """Weights that are gathered together. users: the pieces whose ops use one of them.

    group: the ranks that have parts of them. shard, total: this rank's part of the flat weights and of the sum of their
    gradients. starts: of each weight in the flat tensor. numel: of that, with padding.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.nn.Parameter],
        users: frozenset[Piece],
        group: dist.ProcessGroup,
        gradient_dtype: torch.dtype,
    ):
        self.weights, self.users, self.group = dict(weights), users, group
        self.shapes = {name: weight.shape for name, weight in weights.items()}
        self.starts, end = {}, 0
        for name, shape in self.shapes.items():
            self.starts[name] = end
            end += -(-shape.numel() // ALIGNMENT) * ALIGNMENT
        alike = ALIGNMENT * group.size()
        self.numel = -(-end // alike) * alike
        first = next(iter(weights.values()))
        flat = first.new_zeros(self.numel, requires_grad=False)
        for view, weight in zip(self.views(flat), weights.values(), strict=True):
            view.copy_(weight.detach())
        own = self.numel // group.size()
        self.offset = own * group.rank()
        self.shard = flat[self.offset : self.offset + own].clone()
        self.total = first.new_zeros(own, dtype=gradient_dtype, requires_grad=False)
        self.parts = list(self._parts())
        self._whole: Tensor | None = None
        self._gathering: dist.Work | None = None
        self._made: deque[Tensor] = deque()
        self._scattering: deque[tuple[dist.Work, Tensor, Tensor]] = deque()
        for weight in weights.values():
            weight.whole_shape = weight.shape  # type: ignore[attr-defined]
        self.forget()

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the parts of a flat tensor in the shapes of the weights."""
        ends = ((self.starts[name], shape) for name, shape in self.shapes.items())
        return [flat[start : start + shape.numel()].view(shape) for start, shape in ends]

    def _parts(self) -> Iterator[WeightShard]:
        for name, weight in self.weights.items():
            begin = self.starts[name] - self.offset
            first, last = max(begin, 0), min(begin + weight.numel(), self.shard.numel())
            if first >= last:
                continue
            shape = (1, -1) if weight.dim() > 1 else (-1,)
            parameter = torch.nn.Parameter(self.shard[first:last].view(shape))
            parameter.main_grad = self.total[first:last].view(shape)  # type: ignore[attr-defined]
            for attribute in _ATTRIBUTES:
                if hasattr(weight, attribute):
                    setattr(parameter, attribute, getattr(weight, attribute))
            yield WeightShard(name, first - begin, last - begin, parameter)

    def range_in(self, own: Tensor, part: WeightShard) -> Tensor:
        """Return the place of a shard in this rank's share of a flat tensor."""
        begin = self.starts[part.name] - self.offset + part.start
        return own[begin : begin + part.end - part.start]

    def all_parts(self, own: Tensor) -> Tensor:
        """Gather the flat tensor of which every rank has a share. Collective."""
        whole = own.new_empty(self.numel)
        dist.all_gather_into_tensor(whole, own, group=self.group)
        return whole

    # ------------------------------------------------------------------------------------------------------- weights

    def start_gathering(self, who: object) -> None:
        """Start to gather the shards of all ranks, unless they are here or in progress. who: needs the weights until it
        releases them.
        """
        self._holders.add(who)
        if self._whole is None:
            self._whole = torch.empty(self.numel, dtype=self.shard.dtype, device=self.shard.device)
            self._gathering = dist.all_gather_into_tensor(self._whole, self.shard, group=self.group, async_op=True)

    def gather(self, who: object) -> Tensor:
        """Wait until the weights are whole, and put them where the model looks for them; returns them, flat."""
        self.start_gathering(who)
        assert self._whole is not None
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            for weight, view in zip(self.weights.values(), self.views(self._whole), strict=True):
                weight.data = view
        return self._whole

    def release(self, who: object) -> None:
        """Release the whole weights; they are freed once none needs them."""
        self._holders.discard(who)
        if not self._holders:
            self.forget()

    def forget(self) -> None:
        """Free the whole weights, whatever still needs them."""
        if self._gathering is not None:
            self._gathering.wait()
        self._whole = self._gathering = None
        self._holders: set[object] = set()
        for weight in self.weights.values():
            weight.data = weight.new_empty(0)

    # ----------------------------------------------------------------------------------------------------- gradients

    def expect_gradients(self) -> None:
        """Make the flat tensor that an op adds its gradients to."""
        made = torch.zeros(self.numel, dtype=self.total.dtype, device=self.total.device)
        self._made.append(made)
        for weight, view in zip(self.weights.values(), self.views(made), strict=True):
            weight.main_grad = view  # type: ignore[attr-defined]

    def expect_no_gradients(self) -> None:
        for weight in self.weights.values():
            weight.main_grad = None  # type: ignore[attr-defined]

    def start_scattering(self, scale: float) -> None:
        """Start to sum up what the oldest op has added, times `scale`, over the ranks, each of which gets its part."""
        whole = self._made.popleft()
        if scale != 1.0:
            whole.mul_(scale)
        part = torch.empty_like(self.total)
        work = dist.reduce_scatter_tensor(part, whole, group=self.group, async_op=True)
        self._scattering.append((work, part, whole))

    def finish_scattering(self) -> None:
        """Add this rank's part of the oldest scatter in progress to its sum, if there is one."""
        if self._scattering:
            work, part, _ = self._scattering.popleft()
            work.wait()
            self.total.add_(part)

    def finish(self) -> None:
        """Add this rank's part of all scatters in progress to its sum."""
        while self._scattering:
            self.finish_scattering()


class ShardedWeights:
    """The `StageWeights` of one rank in parts over the ranks of a data-parallel group.

    stages: the pieces of this rank's stages, each of which is gathered as a whole. group: the ranks that share the
    weights; expert_group: those of them that share the same experts, where expert-parallel ranks have others (None:
    all have all). gradient_dtype: of the sums of gradients. scale: what gradients are multiplied by before they are
    summed.

    A weight that embedding and head share, on one rank or as a replica on two, is gathered by itself, so that its parts
    are the same wherever it is. From now on the model's parameters have no data between ops, and a `whole_shape`.
    """

    def __init__(
        self,
        model: ShardedModel,
        stages: Sequence[Sequence[Piece]],
        group: dist.ProcessGroup,
        gradient_dtype: torch.dtype,
        scale: float = 1.0,
        expert_group: dist.ProcessGroup | None = None,
    ):
        self._store, self._scale = model, scale
        tied = model.share_embeddings_and_output_weights
        groups: dict[tuple[object, bool], dict[str, torch.nn.Parameter]] = {}
        stage_of = {piece: number for number, pieces in enumerate(stages) for piece in pieces}
        for name, weight in model.named_parameters():
            key: object = name if tied and name in _ENDS else stage_of[model.piece_of(name)]
            shared_out = expert_group is not None and not getattr(weight, "allreduce", True)
            groups.setdefault((key, shared_out), {})[name] = weight
            weight.register_post_accumulate_grad_hook(self._add_to_sum)
        self.units = [
            FlatWeights(
                weights,
                frozenset(piece for name in weights for piece in used_by(name, model)),
                expert_group if shared_out and expert_group is not None else group,
                gradient_dtype,
            )
            for (_, shared_out), weights in groups.items()
        ]
        self._units: dict[tuple[Piece, ...], list[FlatWeights]] = {}

    def begin(self) -> None:
        for unit in self.units:
            unit.finish()
            unit.forget()

    def gather(self, pieces: Sequence[Piece], kind: str) -> None:
        for unit in self.used(pieces):
            if kind != "W":
                unit.gather(tuple(pieces))
            if kind in "BW":
                unit.expect_gradients()
            else:
                unit.expect_no_gradients()

    def release(self, pieces: Sequence[Piece], kind: str, keeps: bool = False, scatters: bool = False) -> None:
        for unit in self.used(pieces):
            unit.expect_no_gradients()
            if kind != "W" and not keeps:
                unit.release(tuple(pieces))
        if kind in "BW" and not scatters:
            self.start_scattering(pieces)
            self.finish_scattering(pieces)

    def start_gathering(self, pieces: Sequence[Piece]) -> None:
        for unit in self.used(pieces):
            unit.start_gathering(tuple(pieces))

    def start_scattering(self, pieces: Sequence[Piece]) -> None:
        for unit in self.used(pieces):
            unit.start_scattering(self._scale)

    def finish_scattering(self, pieces: Sequence[Piece]) -> None:
        for unit in self.used(pieces):
            unit.finish_scattering()

    def leave_to_w(self, pieces: Sequence[Piece]) -> None:
        for unit in self.used(pieces):
            for weight in unit.weights.values():
                gradient: Tensor | None = weight.main_grad  # type: ignore[attr-defined]
                if gradient is not None:
                    self._store.weight_gradients().put_off_sum(weight, gradient)
                    weight.main_grad = None  # type: ignore[attr-defined]

    def complete(self, pieces: Sequence[Piece]) -> None: ...

    def sum_replicas(self, pieces: Sequence[Piece]) -> None: ...

    def zero_gradients(self) -> None:
        for unit in self.units:
            unit.finish()
            unit.total.zero_()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather all weights on every rank for the duration of the context. Collective."""
        for unit in self.units:
            unit.gather(self)
        try:
            yield
        finally:
            for unit in self.units:
                unit.release(self)

    def keep(self) -> None:
        """Update this rank's shards from the gathered weights."""
        for unit in self.units:
            unit.shard.copy_(unit.gather(self)[unit.offset : unit.offset + unit.shard.numel()])

    def parts(self) -> list[WeightShard]:
        """Return the shards of the weights that this rank has a part of."""
        return [part for unit in self.units for part in unit.parts]

    def used(self, pieces: Sequence[Piece]) -> list[FlatWeights]:
        """Return the flat weights that ops of these pieces use."""
        key = tuple(pieces)
        if key not in self._units:
            self._units[key] = [unit for unit in self.units if not unit.users.isdisjoint(key)]
        return self._units[key]

    def _add_to_sum(self, weight: Tensor) -> None:
        """Add autograd's gradient of one backward to the sum, as DDP's hook does; in an I (of a bias or a norm), to
        what its W will add.
        """
        gradient, weight.grad = weight.grad, None
        if gradient is None or getattr(weight, "grad_added_to_main_grad", False):
            return  # left to W, or added by the kernel
        total: Tensor | None = weight.main_grad  # type: ignore[attr-defined]
        if total is not None:
            total.add_(gradient)
        else:
            self._store.weight_gradients().put_off_sum(cast(torch.nn.Parameter, weight), gradient)
