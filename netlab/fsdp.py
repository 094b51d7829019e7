"""FSDP2 (torch's `fully_shard`) on our pieces: the engine that network.py compares pipelines with.

Each rank has the whole model, of which FSDP2 keeps a slice, and its share of the microbatches. The embedding, each
layer and the head are gathered on their own, for the forward of every microbatch and again for its backward, after
which gradients are reduced and scattered: what FSDP2 does unless told otherwise (ZeRO-3). Or (`once`) weights stay
gathered from the first forward of a step to its last backward, and gradients are reduced in that last backward alone,
which takes memory for all weights and gradients.

fully_shard of torch 2.13 runs on CPUs over gloo. There its collectives block: nothing is computed meanwhile. They are
our own here, because gloo's would make it slower than it has to be (see `_Collective`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.engines import CONTEXT, Engine, Problem
from helixpipe.model import Microbatch, PipelineModel
from helixpipe.program.stages import Piece, model_pieces


class FsdpEngine(Engine):
    """The microbatches of a step shared out over the ranks, every gradient summed over them."""

    def __init__(self, problem: Problem, once: bool = False):
        self.problem, self.once = problem, once
        pieces = model_pieces(problem.layers)
        model = problem.model(pieces)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        layers = [[piece for piece in pieces if piece.layer == layer] for layer in range(problem.layers)]
        own: list[list[torch.nn.Module]] = [[model.embedding], *([layer] for layer in model.decoder.layers.values())]
        own.append([model.decoder.final_layernorm, model.output_layer])
        parts = [
            _Part(model, part, modules) for part, modules in zip([[pieces[0]], *layers, [pieces[-1]]], own, strict=True)
        ]
        order = [[names[id(parameter)] for parameter in part.parameters()] for part in parts]
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in parts:
            fully_shard(part, mesh=mesh)
            assert isinstance(part, FSDPModule)
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            part.set_custom_all_gather(_AllGather())  # type: ignore[arg-type]
            part.set_custom_reduce_scatter(_ReduceScatter())  # type: ignore[arg-type]
        self.model: Any = fully_shard(_Whole(parts), mesh=mesh)
        sharded = [zip(given, part.parameters(), strict=True) for given, part in zip(order, parts, strict=True)]
        super().__init__({name: parameter for part in sharded for name, parameter in part}, self._step)

    def _step(self) -> None:
        world = dist.get_world_size()
        numbers = range(dist.get_rank(), self.problem.count, world)
        for number in numbers:
            last = number + world >= self.problem.count
            if self.once:
                self.model.set_requires_gradient_sync(last)
                self.model.set_reshard_after_forward(False)
                self.model.set_reshard_after_backward(last)
            self.model.set_is_last_backward(last)
            loss: Tensor = self.model(self.problem.microbatch(number))
            loss.backward(torch.tensor(self.problem.scale))

    def gradients(self) -> dict[str, Tensor | None]:
        every = super().gradients()
        return {name: value.full_tensor() for name, value in every.items() if isinstance(value, DTensor)}


class _Part(torch.nn.Module):
    """Some pieces of a model as a module that FSDP2 can gather for itself."""

    def __init__(self, model: PipelineModel, pieces: Sequence[Piece], own: Sequence[torch.nn.Module]):
        super().__init__()
        self.own = torch.nn.ModuleList(own)  # the model itself must not be a child: it has all weights
        self._run = partial(model.run, pieces)

    def forward(self, batch: Microbatch, *state: Tensor) -> tuple[Tensor, ...]:
        return self._run(state, batch, CONTEXT)


class _Whole(torch.nn.Module):
    def __init__(self, parts: Sequence[_Part]):
        super().__init__()
        self.parts = torch.nn.ModuleList(parts)

    def forward(self, batch: Microbatch) -> Tensor:
        state: tuple[Tensor, ...] = ()
        for part in self.parts:
            state = part(batch, *state)
        return state[0]


class _Collective:
    """Slices exchanged rank by rank. gloo's own reduce-scatter is an all-reduce, which sends twice the bytes, and in
    its other collectives the two directions of a link take turns when the ranks start together: a receiver says that
    it is ready on the connection on which it sends, behind what it sends. So receives are posted first."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        """received[r] from and sent[r] to every rank r but this one."""
        others = [rank for rank in range(group.size()) if rank != group.rank()]
        works = [dist.irecv(received[rank], group=group, group_src=rank) for rank in others]
        works += [dist.isend(sent[rank], group=group, group_dst=rank) for rank in others]
        for work in works:
            assert work is not None
            work.wait()


class _AllGather(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        assert not async_op
        slices = output_tensor.view(group.size(), -1)
        slices[group.rank()].copy_(input_tensor)
        self.exchange(list(slices), [input_tensor] * group.size(), group)


class _ReduceScatter(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM and not async_op
        own, slices = input_tensor.view(group.size(), -1), torch.empty_like(input_tensor).view(group.size(), -1)
        slices[group.rank()].copy_(own[group.rank()])
        self.exchange(list(slices), list(own), group)
        torch.sum(slices, 0, out=output_tensor)
