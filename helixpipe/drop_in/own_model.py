"""Runs one step of `helixpipe.model.PipelineModel`, which runs any schedule, and handles its data and losses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from helixpipe.common.errors import ProgramError, ScheduleError, UserError
from helixpipe.drop_in.checks import unwrapped
from helixpipe.lowering.validate import untrainable
from helixpipe.model import Microbatch, PipelineModel
from helixpipe.model.attention.context_parallel import ContextParallel
from helixpipe.model.device import device
from helixpipe.program.program import Program
from helixpipe.runtime.executor import LossSum, Step


def own_model(chunks: Sequence[torch.nn.Module]) -> PipelineModel | None:
    """Return the PipelineModel inside the wrappers, None for chunks of another kind. Raises UserError for several."""
    own = [chunk for chunk in map(unwrapped, chunks) if isinstance(chunk, PipelineModel)]
    if own and len(chunks) > 1:
        raise UserError(
            f"model has {len(chunks)} chunks, a PipelineModel among them, but one PipelineModel holds all pieces of "
            "its rank: build a single one from ForwardBackward.pieces."
        )
    return own[0] if own else None


def check_own_call(
    config: TransformerConfig, forward_step_func: Any, collect_non_loss_data: bool, lengths: tuple[int | None, int]
) -> None:
    """Check the arguments of a call with a PipelineModel. Raises UserError for those that mean nothing to it. lengths:
    the decoder's and the others' tokens a sequence.
    """
    if forward_step_func is not None:
        raise UserError(
            "forward_step_func is not used with a PipelineModel, which runs pieces and chunks of a sequence and makes "
            "the loss itself: give forward_step_func=None, and a data_iterator of helixpipe.model.Microbatch."
        )
    if collect_non_loss_data:
        raise UserError("collect_non_loss_data is not supported with a PipelineModel: only losses leave it.")
    if lengths[0] not in (None, lengths[1]):
        raise UserError(f"decoder_seq_length must be seq_length, {lengths[1]}, or None, not {lengths[0]}.")
    if config.enable_autocast:
        raise UserError("enable_autocast is not supported with a PipelineModel: build it with the params_dtype to use.")
    if config.num_moe_experts and config.moe_router_enable_expert_bias:
        raise UserError(
            "moe_router_enable_expert_bias is not supported with a PipelineModel in a loop of one's own: "
            "finalize_model_grads would not find what its routers have counted."
        )
    if config.recompute_granularity is not None:
        raise UserError(
            f'recompute_granularity="{config.recompute_granularity}" in the configuration of a PipelineModel does '
            "nothing: give get_forward_backward_func recompute=RecomputeOptions(...)."
        )


def check_own_program(program: Program, rank: int, num_ranks: int, num_microbatches: int, model: PipelineModel) -> None:
    """Check that the model holds the program's pieces on this pipeline rank. Raises UserError."""
    name = program.schedule
    if (program.num_ranks, program.num_microbatches) != (num_ranks, num_microbatches):
        raise ScheduleError(
            f"schedule {name} is a program for {program.num_ranks} ranks and {program.num_microbatches} microbatches, "
            f"but the run has {num_ranks} and {num_microbatches}."
        )
    if (reason := untrainable(program)) is not None:
        raise ProgramError(reason)
    if program.num_layers != model.config.num_layers:
        raise ScheduleError(
            f"schedule {name} is a program for {program.num_layers} layers, but num_layers is "
            f"{model.config.num_layers}."
        )
    if set(model.pieces) != set(program.pieces_of_rank(rank)) or model.copies != program.copies(rank):
        raise UserError(
            f"schedule {name} with {num_microbatches} microbatches places other pieces on pipeline rank {rank} than "
            "the model was built from: build it from ForwardBackward.pieces and copies of the same schedule and "
            "options."
        )
    parameter = next(model.parameters(), None)
    if parameter is not None and parameter.dtype != model.payload_dtype:
        raise UserError(
            f"the model's weights are {parameter.dtype}, but its hidden states {model.payload_dtype}: build it with "
            f"params_dtype={parameter.dtype}."
        )


def check_groups(model: PipelineModel, groups: ProcessGroupCollection) -> None:
    """Check that the step's groups are those the model was built with, which it runs in. Raises UserError."""
    for name, own in (("tp", model.tp_group), ("cp", model.context.group)):
        given = getattr(groups, name)
        if _ranks(own) != _ranks(given):
            raise UserError(
                f"pg_collection.{name} has the ranks {_ranks(given)}, but the PipelineModel was built with "
                f"{_ranks(own)}: give both the same pg_collection."
            )


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)


def check_lengths(program: Program, seq_length: int, model: PipelineModel) -> None:
    """Check that every microbatch is a sequence of that length, cut as ranks can share it. Raises ProgramError."""
    config, context = model.config, model.context
    parts = context.size * (2 if context.rings else 1)
    if config.sequence_parallel:
        parts *= config.tensor_model_parallel_size
    workload = program.workload.of_sequences(seq_length)
    for lengths in sorted({workload.tokens(microbatch) for microbatch in range(len(workload))}):
        if not any(length % parts for length in lengths):
            continue
        raise ProgramError(
            f"every chunk's tokens must be a multiple of {parts}, the parts that ranks share it in (sequence_parallel, "
            f"pg_collection.cp), but they are {lengths}: give other chunks or chunk_lengths."
        )


@dataclass
class OwnCall:
    """One call of the forward-backward function with a PipelineModel.

    shape: of each microbatch, [b, s]. batches: this rank's; none without the embedding and the head. tokens: the sum of
    each microbatch's loss mask. store: the values returned, of the microbatches `finished`. num_tokens: their sum of
    tokens, a float64 scalar; context-parallel ranks, which have the same microbatches, count equal shares.
    """

    config: TransformerConfig
    context: ContextParallel
    shape: tuple[int, int]
    batches: list[Microbatch]
    tokens: list[Tensor]
    num_microbatches: int
    store: list[Any]
    num_tokens: Tensor
    finished: list[int] = field(default_factory=list)

    def root_gradient(self, index: int) -> Tensor:
        """Return the gradient of the microbatch's objective with respect to its loss sum: a float32 scalar."""
        gradient = torch.ones((), device=device())
        if not self.config.calculate_per_token_loss:
            # times the ranks that share it: DistributedDataParallel takes the mean of them, of gradients that are parts
            gradient = gradient * self.context.size / (self._divisor(index) * self.num_microbatches)
        if self.config.grad_scale_func is not None:
            gradient = self.config.grad_scale_func(gradient)
        return gradient.reshape(()).float()

    def auxiliary_gradient(self, index: int) -> Tensor:
        """Return what the gradients of the microbatch's auxiliary losses are multiplied by, alike."""
        gradient = torch.ones((), device=device())
        if self.config.calculate_per_token_loss:
            gradient = gradient * math.prod(self.shape)  # ranks without data have no microbatch to count
        else:
            gradient = gradient * self.context.size / self.num_microbatches
        return gradient if self.config.grad_scale_func is None else self.config.grad_scale_func(gradient)

    def finish(self, losses: Sequence[LossSum]) -> None:
        """Take up what the executor returned: the loss of each microbatch, summed over its chunks in their order."""
        sums: dict[int, Tensor] = {}
        for loss in sorted(losses, key=lambda loss: (loss.microbatch, loss.chunk)):
            sums[loss.microbatch] = sums[loss.microbatch] + loss.value if loss.microbatch in sums else loss.value
        for index, total in self._of_all_rows(sums).items():
            per_token = self.config.calculate_per_token_loss
            self.store.append({"lm loss": total if per_token else total / self._divisor(index)})
            self.finished.append(index)
            self.num_tokens += self.tokens[index] / self.context.size

    def _of_all_rows(self, sums: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return the loss sums over all context-parallel ranks, from those of this rank's rows. Collective over these
        ranks.
        """
        if self.context.size == 1 or not sums:
            return sums
        totals = torch.stack(list(sums.values()))
        dist.all_reduce(totals, group=self.context.group)
        return dict(zip(sums, totals, strict=True))

    def _divisor(self, index: int) -> Tensor:
        """Return the microbatch's tokens, at least 1: one without tokens that count has the loss 0, not 0/0."""
        tokens = self.tokens[index]
        return torch.where(tokens > 0, tokens, torch.ones_like(tokens))


def read(
    model: PipelineModel,
    config: TransformerConfig,
    iterator: Iterator[Any] | None,
    num_microbatches: int,
    shape: tuple[int, int],
) -> OwnCall:
    """Take the microbatches of a step from the iterator, on ranks that need them. shape: [b, s]. Raises UserError."""
    batches: list[Microbatch] = []
    if any(piece.role in ("embed", "head") for piece in model.pieces):
        if iterator is None:
            raise UserError("data_iterator is None on a rank that holds the embedding or the head, which need data.")
        for _ in range(num_microbatches):
            batch = next(iterator)
            if not isinstance(batch, Microbatch):
                raise UserError(
                    f"data_iterator must yield helixpipe.model.Microbatch with a PipelineModel, not "
                    f"{type(batch).__name__}."
                )
            if tuple(batch.tokens.shape) != shape:
                raise UserError(
                    f"data_iterator gives tokens of shape {tuple(batch.tokens.shape)}, but micro_batch_size and "
                    f"seq_length are {shape}."
                )
            for name, flag in (("documents", "--reset-attention-mask"), ("real", "--sft")):
                if getattr(batch, name) is not None:
                    raise UserError(
                        f"Microbatch.{name} is not taken here, as ranks between the first and the last would not know "
                        f"of it: train with pretrain_gpt.py {flag}."
                    )
            batches.append(batch)
    zero = torch.zeros((), dtype=torch.float64, device=device())
    tokens = [batch.loss_mask.sum() for batch in batches]
    return OwnCall(config, model.context, shape, batches, tokens, num_microbatches, [], zero)


def own_step(call: OwnCall, iteration: int, data_group: dist.ProcessGroup, training: bool) -> Step:
    empty = torch.empty(0, device=device())
    nothing = Microbatch(empty, empty, empty)
    return Step(
        iteration=iteration,
        # as Megatron-LM's sampler deals them out, so that dropout differs between data-parallel ranks
        microbatch_number=lambda index: index * data_group.size() + data_group.rank(),
        batch=call.batches.__getitem__ if call.batches else lambda index: nothing,
        root_gradient=call.root_gradient,
        micro_batch_size=call.shape[0],
        seq_length=call.shape[1],
        training=training,
        auxiliary_gradient=call.auxiliary_gradient if call.config.num_moe_experts else None,
    )


def gather_losses(call: OwnCall, group: dist.ProcessGroup) -> None:
    """Give every rank of a pipeline whose head is on several of them all losses, by microbatch, and all tokens."""
    own = [(index, loss["lm loss"].item()) for index, loss in zip(call.finished, call.store, strict=True)]
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, (own, call.num_tokens.item()), group=group)
    losses = sorted(loss for part, _ in parts for loss in part)
    call.store = [{"lm loss": torch.tensor(loss, device=device())} for _, loss in losses]
    call.num_tokens.fill_(sum(tokens for _, tokens in parts))
