"""The user's model chunks as the executor's model: a stage is a chunk, run as megatron-core runs it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import check_first_val_step, forward_step
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from helixpipe.drop_in.sequences import ChunkedSequences, is_last
from helixpipe.model import Microbatch, UnitContext
from helixpipe.model.device import device
from helixpipe.model.linear import WeightGradients, defer_weight_gradients
from helixpipe.program.stages import Piece, Stage


@dataclass
class Call:
    """One call of the forward-backward function: its arguments, and the results of its forwards.

    data_iterators: one a chunk. shape: of the hidden states between stages, of whole sequences of seq_length tokens.
    store: what the loss function returned for each microbatch. num_tokens: sum of those that the loss function counted,
    an int32 scalar.
    """

    forward_step_func: Callable[..., Any]
    data_iterators: Sequence[Iterator[Any] | None]
    num_microbatches: int
    shape: torch.Size
    seq_length: int
    cp_size: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    store: list[Any] = field(default_factory=list)
    num_tokens: Tensor = field(default_factory=lambda: torch.zeros([], dtype=torch.int, device=device()))


class Chunks:
    """The chunks on this rank; `call` is set before each run.

    Args:
        chunks: As the user built them, wrapped or not.
        config: Their configuration.
        stages: The program's on this rank, one for each chunk.
        sequences: For sequences that run in chunks; None where each is one op.
        with_mtp: The last pieces of all stages from the one of multi-token prediction on. Such a stage hands on the
            hidden states of each further token after those of the next.
    """

    call: Call

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        config: TransformerConfig,
        stages: Sequence[Stage],
        sequences: ChunkedSequences | None = None,
        with_mtp: Collection[Piece] = (),
    ):
        self.chunks = chunks
        self.sequences = sequences
        self._config = config
        self._with_mtp = with_mtp
        self._chunk_of = {stage.pieces[0]: index for index, stage in enumerate(stages)}
        self._weight_gradients: WeightGradients | None = None
        self.payload_dtype: torch.dtype = config.pipeline_dtype or config.params_dtype

    def run(
        self, pieces: Sequence[Piece], inputs: tuple[Tensor, ...], batch: Microbatch, context: UnitContext
    ) -> tuple[Tensor, ...]:
        """Run a stage's forward: return the hidden states [s, b, h] or, of the last stage, the objective, a scalar."""
        call, index = self.call, self._chunk_of[pieces[0]]
        is_first_microbatch = context.microbatch == 0 and context.chunk == 0
        is_last_stage, is_last_chunk = pieces[-1].kind == "head", is_last(context)
        if self.sequences is not None:
            self.sequences.enter(context)
        output, num_tokens = forward_step(
            call.forward_step_func,
            call.data_iterators[index],
            self.chunks[index],
            call.num_microbatches,
            inputs[0] if inputs else None,
            call.store if is_last_chunk else [],  # until then the loss lacks tokens
            self._config,
            call.cp_size,
            call.collect_non_loss_data,
            is_first_microbatch=check_first_val_step(call.first_val_step, call.forward_only, is_first_microbatch),
            current_microbatch=context.microbatch,
            vp_stage=index if len(self.chunks) > 1 else None,
            is_last_stage=is_last_stage,
        )
        if is_last_chunk:
            call.num_tokens += num_tokens
        output = self._given_on(output, is_last_stage)
        if self.sequences is not None and self._config.recompute_granularity is not None and output.requires_grad:
            self.sequences.again_in_backward(output, context)
        return (output,)

    def _given_on(self, output: Tensor, is_last_stage: bool) -> Tensor:
        """Return what leaves a stage."""
        call = self.call
        if is_last_stage:
            return torch.zeros(()) if call.forward_only else self._objective(output)
        # Float16Module makes what leaves the last chunk of the last rank float32, which may be hidden states here.
        output = output.to(self.payload_dtype)
        if call.forward_only:
            return output
        if not self._config.deallocate_pipeline_outputs:
            output = output.view_as(output)  # the executor leaves the data of views alone
        return _differentiable(output)

    def _objective(self, loss: Tensor) -> Tensor:
        """Return the tensor that backward starts from: the loss, scaled as the optimizer asks."""
        if self._config.grad_scale_func is not None:
            loss = self._config.grad_scale_func(loss)
        return _differentiable(loss.reshape(()))

    def weight_gradients(self) -> WeightGradients:
        """Return the store of the chunks' linear layers; from the first call on they can defer their weight
        gradients.
        """
        if self._weight_gradients is None:
            self._weight_gradients = defer_weight_gradients(torch.nn.ModuleList(self.chunks))
        return self._weight_gradients

    def payload_shapes(self, after: Piece, micro_batch_size: int, length: int) -> tuple[torch.Size, ...]:
        rows, *others = self.call.shape
        if after in self._with_mtp:
            rows *= 1 + self._config.mtp_num_layers
        return (torch.Size((rows * length // self.call.seq_length, *others)),)

    def attention_layers(self, pieces: Sequence[Piece], training: bool) -> Sequence[int]:
        assert self.sequences is not None, "only sequences in chunks have stored keys and values"
        return self.sequences.layers[self._chunk_of[pieces[0]]]


def _differentiable(output: Tensor) -> Tensor:
    """Return the output itself or, if all behind it is frozen, a view that backward can start from and end at."""
    return output if output.requires_grad else output.detach().requires_grad_().view_as(output)
