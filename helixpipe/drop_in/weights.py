"""Weights in a user's own loop: whole on their rank, in megatron-core's DistributedDataParallel or as they are, updated
by the user, and their gradients finished by the user's `finalize_model_grads_func`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from helixpipe.model import PipelineModel
from helixpipe.model.device import device
from helixpipe.program.program import Program
from helixpipe.runtime.replicas import replicated_weights
from helixpipe.runtime.weights import WholeWeights


class LoopWeights(WholeWeights):
    """The weights of one rank of a pipeline. own: the model of pieces, which may hold replicas of other ranks' weights;
    None for chunks of another kind.
    """

    def __init__(self, own: PipelineModel | None, program: Program, group: dist.ProcessGroup):
        self._own = own
        self._replicas = None if own is None else _ReplicatedGradients(own, program, group)

    @contextmanager
    def step(self, chunks: list[torch.nn.Module], config: TransformerConfig) -> Iterator[None]:
        """During it weights are whole, and no backward starts a data-parallel reduction: a weight's last gradient may
        come from any unit's B or W."""
        if self._own is not None:
            _finish_gathers(chunks)
        functions = config.no_sync_func if isinstance(config.no_sync_func, list) else [config.no_sync_func]
        with ExitStack() as stack:
            for function in functions:
                if function is not None:
                    stack.enter_context(function())
            for chunk in _overlapping(chunks):
                stack.enter_context(_plain_hooks(chunk))
            yield

    def reduce(
        self,
        chunks: list[torch.nn.Module],
        config: TransformerConfig,
        num_tokens: Tensor,
        groups: ProcessGroupCollection,
        force_all_reduce: bool | None,
    ) -> None:
        """Sum over replicas, start reductions, and let the user's function finish them."""
        finalize = config.finalize_model_grads_func
        if self._replicas is not None and finalize is not None:
            self._replicas.sum()
        _start_reductions(chunks, force_all_reduce)
        if finalize is not None:
            groups = groups if self._own is None else _without_embeddings(groups)
            tokens = num_tokens if config.calculate_per_token_loss else None
            finalize(chunks, tokens, pg_collection=groups, force_all_reduce=force_all_reduce)


class _ReplicatedGradients:
    """The gradients of weights that several ranks hold, on whichever ranks: tied word embeddings, replicated stages."""

    def __init__(self, model: PipelineModel, program: Program, group: dist.ProcessGroup):
        self._group = group
        held = [program.pieces_of_rank(rank) for rank in range(program.num_ranks)]
        self._weights = replicated_weights(model, held)
        # NCCL makes the group's communicator with all its ranks: not in `_exchange`, which only some of them run.
        dist.all_reduce(torch.zeros(1, device=device()), group=group)

    def sum(self) -> None:
        """Sum the gradients of replicas. Runs before the data-parallel reduction, while all ranks hold
        whole gradients.
        """
        for weight in self._weights:
            parameter = weight.parameter
            main = getattr(parameter, "main_grad", None)
            if main is None and parameter.grad is None:  # held here, but run by others alone
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad if main is None else main
            assert gradient is not None
            if len(weight.ranks) == self._group.size():
                dist.all_reduce(gradient, group=self._group)
            else:
                self._exchange(gradient, weight.ranks)

    def _exchange(self, gradient: Tensor, ranks: tuple[int, ...]) -> None:
        """Sum in the order of ranks, the same to the bit on all; a group for every set of ranks would need the whole
        job to make it."""
        parts = [gradient if rank == self._group.rank() else torch.empty_like(gradient) for rank in ranks]
        transfers = []
        for rank, part in zip(ranks, parts, strict=True):
            if part is not gradient:
                peer = dist.get_global_rank(self._group, rank)
                transfers.append(dist.P2POp(dist.isend, gradient, peer, self._group))
                transfers.append(dist.P2POp(dist.irecv, part, peer, self._group))
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        gradient.copy_(torch.stack(parts).sum(dim=0))


class _OneRank:
    """A group without other ranks, in place of the one that megatron-core expects to share a weight."""

    def size(self) -> int:
        return 1


def _without_embeddings(groups: ProcessGroupCollection) -> ProcessGroupCollection:
    """Return the groups for `finalize_model_grads_func`, such that it leaves tied weights to `_ReplicatedGradients`.

    megatron-core's looks for them on the first and the last rank, where a schedule may not have them. Without a group
    it would take that of its parallel state.
    """
    groups = copy.copy(groups)
    groups.embd = groups.pos_embd = _OneRank()
    return groups


@contextmanager
def _plain_hooks(chunk: DistributedDataParallel) -> Iterator[None]:
    """Let the hooks of an overlapping chunk only add gradients up, as without overlap: the others count the weights,
    and fail on one whose gradient is put off."""
    chunk.ddp_config.overlap_grad_reduce = False
    try:
        yield
    finally:
        chunk.ddp_config.overlap_grad_reduce = True


def _finish_gathers(chunks: list[torch.nn.Module]) -> None:
    """Wait for gathers of parameters that `overlap_param_gather` leaves to the hooks of a module's forward. A
    PipelineModel's weights may be sent to another rank, or used, without that forward.
    """
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            for group in chunk.bucket_groups:
                group.finish_param_sync(skip_next_bucket_dispatch=True)


def _start_reductions(chunks: list[torch.nn.Module], force_all_reduce: bool | None) -> None:
    """Start the reductions that the last backward would start with `overlap_grad_reduce`; `finalize_model_grads` waits.

    `grad_sync_func` and `param_sync_func` only say when to start what is started here, once a step, and by the
    forward's hooks, so they are not called.
    """
    for chunk in _overlapping(chunks):
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            group.start_grad_sync(force_all_reduce=force_all_reduce)


def _overlapping(chunks: list[torch.nn.Module]) -> list[Any]:
    return [c for c in chunks if isinstance(c, DistributedDataParallel) and c.ddp_config.overlap_grad_reduce]
