"""Runs one step of a user's own training loop: megatron-core's calling convention around the executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_tensor_shapes
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_model_config
from torch.utils._pytree import tree_map_only

from helixpipe.common.errors import ScheduleError, UserError
from helixpipe.costs.by_hand import unit_costs
from helixpipe.drop_in.checks import (
    check_chunks,
    check_config,
    check_deferral,
    check_program,
    ranks_of_head,
    stages_of,
    stages_with_mtp,
)
from helixpipe.drop_in.chunks import Call, Chunks
from helixpipe.drop_in.own_model import (
    OwnCall,
    check_groups,
    check_lengths,
    check_own_call,
    check_own_program,
    gather_losses,
    own_model,
    own_step,
    read,
)
from helixpipe.drop_in.sequences import ChunkedSequences, check_models, check_sequences
from helixpipe.drop_in.weights import LoopWeights
from helixpipe.model import Microbatch, PipelineModel, layers_of
from helixpipe.model.device import device
from helixpipe.planning.plan import Plan, Plans
from helixpipe.program.program import Program, of_layers, with_head
from helixpipe.program.stages import HEAD_MTP, LayerKinds, Layers, Piece, Stage, layer_kinds
from helixpipe.runtime.executor import Executor, LossSum, Step
from helixpipe.runtime.transport import Transport, make_transport

_GROUPS = ["tp", "cp", "pp", "embd", "pos_embd", "dp_cp"]
"""Process groups that a step or `finalize_model_grads_func` needs."""


Pieces = tuple[Piece, ...]


_Size = tuple[int, int, int, tuple[LayerKinds, ...] | None, str]
"""Ranks, microbatches, chunks of the model on a rank, and the kinds of a PipelineModel's layers and of its head."""


class MakeProgram(Protocol):
    """The program for a pipeline of so many ranks, a step of so many microbatches and so many model chunks a rank.

    layers: of a PipelineModel, which can be cut anywhere; None for chunks of another model, of whole layers each. head:
    the kind of its head.
    """

    def __call__(
        self, ranks: int, microbatches: int, chunks: int, layers: int | None = None, head: str = "head"
    ) -> Program: ...


class ForwardBackward:
    """A `forward_backward_func`: same arguments, same results as megatron-core's, the order of ops from a program.

    Programs are lowered when a number of microbatches first occurs; communicators are made in the first call, in which
    all ranks of the job must therefore take part, as in `close`, which releases them.

    iteration: of a PipelineModel, the number of the next training step, which its dropout depends on; it counts up by
        itself, and is to be set where training resumes.
    """

    def __init__(self, make_program: MakeProgram, kv_grad_fp32: bool = False):
        def planned(call: _Size) -> Program:
            ranks, microbatches, chunks, layers, head = call
            if layers is None:
                return make_program(ranks, microbatches, chunks)
            return with_head(of_layers(make_program(ranks, microbatches, chunks, len(layers), head), layers), head)

        self._plans: Plans[_Size] = Plans(planned, unit_costs())
        self.iteration = 0
        self._kv_grad_fp32 = kv_grad_fp32
        self._own: PipelineModel | None = None
        self._weights: LoopWeights | None = None
        self._group: dist.ProcessGroup | None = None
        self._transport: Transport | None = None
        self._chunks: Chunks | None = None
        self._stages: tuple[Stage, ...] = ()
        self._ready: dict[int, Plan] = {}
        self._runner: Executor | None = None

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any] | None,
        data_iterator: Iterator[Any] | list[Iterator[Any] | None] | None,
        model: torch.nn.Module | list[torch.nn.Module],
        num_microbatches: int,
        seq_length: int | None,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: P2PCommunicator | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Run one step; see megatron-core's `get_forward_backward_func` for what the arguments are.

        model: the chunks on this rank, in model order. data_iterator: one for each chunk, or the only one. With one
        PipelineModel (of `pieces`) forward_step_func is None and data_iterator yields `helixpipe.model.Microbatch`
        where the embedding or the head is; a loss is the mean over a microbatch's tokens, or their sum with
        `calculate_per_token_loss`, as {"lm loss": scalar}. p2p_communicator is not used: messages travel on
        `pg_collection.pp` by the transport of helixpipe.
        Returns what the loss function returned of each microbatch on the rank that holds the head and, under a
        schedule that has it elsewhere, on the last rank; an empty list on the others. Under a schedule with the head on
        several ranks every rank of the pipeline has all losses.
        Raises UserError or ScheduleError, one sentence, for what cannot be run.
        """
        chunks = model if isinstance(model, list) else [model]
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        _check_arguments(chunks, iterators, adjust_tensor_shapes_fn, collect_non_loss_data and not forward_only)
        _check_both_or_neither(p2p_communicator, pg_collection)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(_GROUPS)
        config = get_model_config(chunks[0])
        executor, plan = self._executor(chunks, config, groups.pp, num_microbatches)
        one_op = self._own is None and len(plan.program.stages) == plan.program.num_chunks == 1
        if seq_length is None and not one_op:
            raise UserError("seq_length is None, which only a model in one stage allows, without chunks.")
        call: Call | OwnCall
        if self._own is not None:
            assert seq_length is not None
            check_own_call(config, forward_step_func, collect_non_loss_data, (decoder_seq_length, seq_length))
            check_groups(self._own, groups)
            check_lengths(plan.program, seq_length, self._own)
            call = read(self._own, config, iterators[0], num_microbatches, (micro_batch_size, seq_length))
            step = own_step(call, self.iteration, groups.dp_cp, training=not forward_only)
            self.iteration += not forward_only
        else:
            if forward_step_func is None:
                raise UserError("forward_step_func is None, which only a PipelineModel allows.")
            # Like megatron-core, whose interleaved schedule looks at seq_length alone.
            tokens = seq_length if decoder_seq_length is None or len(chunks) > 1 else decoder_seq_length
            lengths = decoder_seq_length, seq_length or 1
            assert self._chunks is not None
            iterators = self._readers(plan.program, config, lengths, iterators)
            call = self._chunks.call = Call(
                forward_step_func,
                iterators,
                num_microbatches,
                torch.Size(()) if tokens is None else _shape(micro_batch_size, tokens, config, groups),
                tokens or 1,
                groups.cp.size(),
                forward_only,
                collect_non_loss_data,
                first_val_step,
            )
            step = _step(tokens or 1, micro_batch_size, training=not forward_only)
        if (timers := config.timers) is not None:
            timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        assert self._weights is not None
        with self._weights.step(chunks, config), self._whole_sequences_after():
            losses, _ = executor.run((plan.evaluation if forward_only else plan).lowered, step)
        _share_losses(call, losses, ranks_of_head(plan.program), groups.pp)
        if not forward_only:
            self._weights.reduce(chunks, config, call.num_tokens, groups, force_all_reduce)
        if timers is not None:
            timers("forward-backward").stop()
        return call.store

    def program(
        self,
        ranks: int,
        microbatches: int,
        chunks: int,
        layers: Layers | None = None,
        further_tokens: int | None = None,
    ) -> Program:
        """Return the program as `MakeProgram` does; each is made once. further_tokens: see `pieces`."""
        kinds, head = None if layers is None else layer_kinds(layers), HEAD_MTP if further_tokens else "head"
        return self._plans.program((ranks, microbatches, chunks, kinds, head))

    def pieces(
        self,
        num_layers: Layers,
        num_microbatches: int,
        pp_group: dist.ProcessGroup | None = None,
        further_tokens: int | None = None,
    ) -> Pieces:
        """Return the pieces that the schedule places on this pipeline rank, from which its PipelineModel is built.

        num_layers: of the whole model; where some attend to a window or have no RoPE, `helixpipe.model.layers_of` of
        its configuration. num_microbatches: of any step, since a model can only run steps of sizes for
        which the schedule places it alike. pp_group: the pipeline; None takes megatron-core's parallel state.
        further_tokens: that the head predicts as well, the configuration's `mtp_num_layers`.
        """
        group = pp_group or ProcessGroupCollection.use_mpu_process_groups(["pp"]).pp
        program = self.program(group.size(), num_microbatches, 1, num_layers, further_tokens)
        return program.pieces_of_rank(group.rank())

    def copies(
        self,
        num_layers: Layers,
        num_microbatches: int,
        pp_group: dist.ProcessGroup | None = None,
        further_tokens: int | None = None,
    ) -> dict[Piece, int]:
        """Return the `pieces` that other ranks hold as well, for the PipelineModel's `copies`; same arguments."""
        group = pp_group or ProcessGroupCollection.use_mpu_process_groups(["pp"]).pp
        return self.program(group.size(), num_microbatches, 1, num_layers, further_tokens).copies(group.rank())

    def close(self) -> None:
        """Release communicators and the model; a later call makes them anew."""
        if self._transport is not None:
            self._transport.close()
        self._transport = self._group = None
        self._forget_model()

    def _readers(
        self,
        program: Program,
        config: TransformerConfig,
        lengths: tuple[int | None, int],
        iterators: list[Iterator[Any] | None],
    ) -> list[Iterator[Any] | None]:
        """Return the iterators for the user's forward step. lengths: as of `check_sequences`."""
        assert self._chunks is not None
        if (sequences := self._chunks.sequences) is None:
            return iterators
        check_sequences(program, config, lengths)
        return [sequences.reader(iterator) for iterator in iterators]

    @contextmanager
    def _whole_sequences_after(self) -> Iterator[None]:
        """Let the user's model run whole sequences again after a step of sequences in chunks."""
        try:
            yield
        finally:
            if self._chunks is not None and self._chunks.sequences is not None:
                self._chunks.sequences.leave()

    def _forget_model(self) -> None:
        if self._runner is not None:
            self._runner.close()
        if self._chunks is not None and self._chunks.sequences is not None:
            self._chunks.sequences.close()
        self._chunks = self._own = self._weights = None
        self._ready.clear()
        self._runner = None

    def _executor(
        self,
        chunks: list[torch.nn.Module],
        config: TransformerConfig,
        group: dist.ProcessGroup,
        num_microbatches: int,
    ) -> tuple[Executor, Plan]:
        """Return the executor, and the plan of a step of this size, made at its first use."""
        own = own_model(chunks)
        if self._group is not group:
            self.close()
        elif self._own is not own or (self._chunks is not None and not _same(self._chunks.chunks, chunks)):
            self._forget_model()
        if num_microbatches not in self._ready:
            check_config(config)
            kinds = None if own is None else layers_of(config)
            head = HEAD_MTP if kinds is not None and config.mtp_num_layers else "head"
            call = group.size(), num_microbatches, len(chunks), kinds, head
            program = self._plans.program(call)
            if own is None:
                check_program(program, group.size(), num_microbatches)
                check_chunks(program, group.rank(), chunks)
                check_deferral(program, chunks, config)
            else:
                check_own_program(program, group.rank(), group.size(), num_microbatches, own)
            plan = self._plans.plan(call)
            if self._transport is None:
                channels = {(message.source, message.target) for message in plan.graph.messages}
                self._group, self._transport = group, make_transport(group, device(), channels)
            model = self._attach(chunks, own, config, program, group)
            self._ready[num_microbatches] = plan
            if self._runner is None:
                self._runner = Executor(group.rank(), model, self._transport, self._kv_grad_fp32, weights=self._weights)
        assert self._runner is not None
        return self._runner, self._ready[num_microbatches]

    def _attach(
        self,
        chunks: list[torch.nn.Module],
        own: PipelineModel | None,
        config: TransformerConfig,
        program: Program,
        group: dist.ProcessGroup,
    ) -> Chunks | PipelineModel:
        """Return the model for the executor, the same for every size of step."""
        if own is not None:
            if self._own is None:
                self._own, self._weights = own, LoopWeights(own, program, group)
            return own
        stages = tuple(program.stages[stage] for stage in stages_of(program, group.rank()))
        if self._chunks is None:
            sequences = None
            if program.num_chunks > 1:
                check_models(chunks, config)
                sequences = ChunkedSequences(chunks, config)
            with_mtp = {stage.pieces[-1] for stage in stages_with_mtp(program, config)}
            self._chunks, self._stages = Chunks(list(chunks), config, stages, sequences, with_mtp), stages
            self._weights = LoopWeights(None, program, group)
        elif stages != self._stages:
            raise ScheduleError(
                f"schedule {program.schedule} places the model differently for {program.num_microbatches} microbatches "
                "than before, so their number cannot change under it."
            )
        return self._chunks


def _share_losses(call: Call | OwnCall, losses: list[LossSum], heads: Sequence[int], group: dist.ProcessGroup) -> None:
    """Give losses to the ranks that are to have them. losses: this rank's. heads: the pipeline ranks that run the
    head."""
    if isinstance(call, OwnCall):
        call.finish(losses)
    if isinstance(call, OwnCall) and len(heads) > 1:
        gather_losses(call, group)
    else:
        _share_with_last_rank(call, heads[0], group)


def _check_arguments(
    chunks: Sequence[torch.nn.Module], iterators: Sequence[Any], adjust_tensor_shapes_fn: Any, no_loss: bool | None
) -> None:
    """Check that the arguments fit each other. Raises UserError or ScheduleError.

    no_loss: whether a backward would have nothing to start from.
    """
    if len(iterators) != len(chunks):
        have = f"{len(chunks)} chunk" + "s" * (len(chunks) > 1)
        raise ScheduleError(f"model has {have}, but data_iterator is a list of {len(iterators)}: give one for each.")
    if adjust_tensor_shapes_fn is not None:
        raise UserError("adjust_tensor_shapes_fn is not supported: every stage hands on hidden states of one shape.")
    if no_loss:
        raise UserError("collect_non_loss_data leaves no loss to start a backward from: it needs forward_only=True.")


def _check_both_or_neither(communicator: P2PCommunicator | None, groups: ProcessGroupCollection | None) -> None:
    alone = communicator is None and groups is not None and groups.pp.size() == 1
    if not alone and (communicator is None) != (groups is None):
        raise UserError("give both of p2p_communicator and pg_collection, or neither, as megatron-core asks.")


def _shape(micro_batch_size: int, tokens: int, config: TransformerConfig, groups: ProcessGroupCollection) -> torch.Size:
    """Return the shape of hidden states between stages. tokens: of a sequence."""
    shapes = get_tensor_shapes(
        seq_length=tokens,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=tokens,
        config=config,
        tp_group=groups.tp,
        cp_group=groups.cp,
    )
    return torch.Size(shapes[0])


def _same(some: Sequence[torch.nn.Module], others: Sequence[torch.nn.Module]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


def _step(seq_length: int, micro_batch_size: int, training: bool) -> Step:
    return Step(
        iteration=0,
        microbatch_number=lambda index: index,
        batch=lambda index: cast(Microbatch, None),  # the user's forward_step_func takes data from its iterator
        root_gradient=lambda index: torch.ones((), device=device()),  # the objective is scaled already
        micro_batch_size=micro_batch_size,
        seq_length=seq_length,
        training=training,
    )


def _share_with_last_rank(call: Call | OwnCall, head: int, group: dist.ProcessGroup) -> None:
    """Send losses and the number of tokens to the last rank, where users' scripts and `finalize_model_grads` look for
    them.

    Does nothing under schedules that have the head there. Tensors travel through host memory.
    """
    last = group.size() - 1
    if head == last or group.rank() not in (head, last):
        return
    other = dist.get_global_rank(group, last if group.rank() == head else head)
    if group.rank() == head:
        store = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), call.store)
        dist.send_object_list([store, call.num_tokens.item()], other, group=group)
    else:
        received: list[Any] = [None, None]
        dist.recv_object_list(received, other, group=group)
        call.store = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device()), received[0])
        call.num_tokens.fill_(received[1])
