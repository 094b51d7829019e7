"""Defines the input and the result of a step, and one rank's view of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from helixpipe.costs.piece_kinds import KINDS
from helixpipe.costs.saved import staying
from helixpipe.lowering.project import Action, Instruction, LoweredProgram
from helixpipe.model import Microbatch, UnitContext
from helixpipe.model.collectives import ForwardBeside
from helixpipe.model.linear import WeightGradients
from helixpipe.model.steps import Steps
from helixpipe.program.graphs import stages_in_graphs
from helixpipe.program.program import Op, Unit
from helixpipe.program.stages import Activations, Piece, Segment, segments
from helixpipe.program.transfer import Transfer
from helixpipe.program.workload import Workload
from helixpipe.runtime.offload import Offloading


class RunsInSteps(Protocol):
    """The interface of a model whose forwards can run beside backwards (`Program.pairs`)."""

    beside: ForwardBeside

    def steps(
        self, pieces: Sequence[Piece], inputs: tuple[Tensor, ...], batch: Microbatch, context: UnitContext
    ) -> Steps: ...


class Model(Protocol):
    """The interface of a model that the executor runs; `helixpipe.model.PipelineModel` is one."""

    payload_dtype: torch.dtype

    def run(
        self, pieces: Sequence[Piece], inputs: tuple[Tensor, ...], batch: Microbatch, context: UnitContext
    ) -> tuple[Tensor, ...]: ...

    def weight_gradients(self) -> WeightGradients: ...

    def payload_shapes(self, after: Piece, micro_batch_size: int, length: int) -> tuple[torch.Size, ...]: ...

    def attention_layers(self, pieces: Sequence[Piece], training: bool) -> Sequence[int]:
        """Return the numbers in the store of keys and values of the layers whose attention runs with the pieces."""
        ...


class StepObserver(Protocol):
    """The interface of an object that is told of a step's messages and loss sums."""

    def begin_step(self) -> None:
        """Begin a step, or begin it anew."""
        ...

    def send(self, message: Transfer, tensors: Sequence[Tensor]) -> None:
        """Take what a message of this rank carries, which is not changed before it has left."""
        ...

    def receive(self, message: Transfer, tensors: Sequence[Tensor]) -> None:
        """Take what a message has brought."""
        ...

    def take_losses(self, losses: Sequence[LossSum]) -> None:
        """Take the loss sums of this rank, at the step's end."""
        ...


@dataclass(frozen=True)
class Step:
    """The input of a step: what differs from one run of a plan to the next.

    iteration: for the random state. microbatch_number: of a microbatch of this pipeline among those of all
    data-parallel ranks. batch: the data of a microbatch by its number in this pipeline; asked for only on ranks that
    hold embed or head. root_gradient: for a microbatch, the gradient of the objective with respect to its loss sum: a
    scalar tensor, such as loss_scale / (tokens of the microbatch * number of microbatches). auxiliary_gradient: for a
    microbatch, what the gradients of its auxiliary losses, each a mean over its tokens, are multiplied by, such as
    loss_scale / number of microbatches; None: 1. Both are asked in the backward. micro_batch_size, seq_length: of this
    step. confirm: asked once, between the step's opening (see `lowering.lower`) and its first
    backward; where it says no, the weights have changed, and the opening is run again. It says the same on all ranks.
    observers: objects that are told of the step's messages and loss sums.
    """

    iteration: int
    microbatch_number: Callable[[int], int]
    batch: Callable[[int], Microbatch]
    root_gradient: Callable[[int], Tensor]
    micro_batch_size: int
    seq_length: int
    training: bool = True
    confirm: Callable[[], bool] | None = None
    auxiliary_gradient: Callable[[int], float | Tensor] | None = None
    observers: Sequence[StepObserver] = ()


class LossSum(NamedTuple):
    """The sum of a chunk's token losses times their loss mask; a float32 scalar, on the rank that ran its head only."""

    microbatch: int
    chunk: int
    value: Tensor


class PlannedOp(NamedTuple):
    """An op with all that is known of it before the step, looked up once.

    pieces: of its stage. segments: its unit's. offset, length: the rows of its microbatch that are its chunk's.
    row_length: of the microbatch, None where all of it is in this chunk. takes, gives, saved: numbers of buffers (see
    `Graph`). leaves: whether a message carries away what it gives. first: whether its stage is the model's first. last:
    whether it gives the loss sum. borrowed: whether it runs with a copy of its stage's weights. completes: whether
    nothing adds to the gradients of its stage's weights, which are here, after it. keeps, scatters: see
    `StageWeights.release`. offloading: of an F, what of its unit leaves the device. drops: of blocks of keys and
    values, the first rows of those that nobody needs after it. paired: whether the backward after it runs beside it.
    in_graphs: whether its pieces may be replayed from graphs: with the rank's own whole weights, of which a backward
    makes all gradients, and all that it saves on the device.
    makes_blocks: the layer of the next stage's attention,
    if an F makes its block, or sums of that one's gradients come from other ranks; else -1.
    """

    op: Op
    unit: Unit
    pieces: tuple[Piece, ...]
    segments: tuple[Segment, ...]
    offset: int
    length: int
    row_length: int | None
    takes: int
    gives: int
    saved: int
    leaves: bool
    first: bool
    last: bool
    borrowed: bool
    completes: bool
    keeps: bool = False
    scatters: bool = False
    offloading: Offloading | None = None
    drops: tuple[int, ...] = ()
    makes_blocks: int = -1
    paired: bool = False
    in_graphs: bool = False


class Incoming(NamedTuple):
    """The receive of a message that belongs to a unit: one tensor of each shape."""

    transfer: Transfer
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype


Subject = PlannedOp | Incoming | Instruction
"""The argument of an instruction's handler: for RUN and most RECVs what is known of them, else the instruction."""


class PlanOnRank:
    """A lowered program as one rank runs it, step after step: what follows from it and from a step's sizes.

    stream: the rank's instructions. leaving: the buffers that messages take away. last: of each stage whose weights are
    here, the op after which nothing adds to their gradients.
    """

    def __init__(self, lowered: LoweredProgram, rank: int):
        self.lowered, self.program, self.graph, self.rank = lowered, lowered.program, lowered.graph, rank
        self.stream = lowered.streams[rank]
        self.leaving = frozenset(
            number for each in self.graph.messages for number in self.graph.reads[self.graph.task(each)]
        )
        own = [op for op in self.program.ranks[rank] if self.program.stages[op.stage].owner is None]
        self.last = frozenset({op.stage: op for op in own if op.kind in "BW"}.values())
        self._borrowed = frozenset(self.program.copied_stages(rank))
        self._in_graphs = stages_in_graphs(self.program, rank)
        self._subjects: dict[tuple[int, int], list[tuple[Action, Subject]]] = {}
        self._shapes: dict[tuple[Piece, int, int], tuple[torch.Size, ...]] = {}
        self._segments: dict[tuple[int, Activations], tuple[Segment, ...]] = {}
        self._workloads: dict[int, Workload] = {}

    @cached_property
    def defers_weights(self) -> set[int]:
        """The stages of this rank with a split backward."""
        return {op.stage for op in self.program.ranks[self.rank] if op.kind == "W"}

    def subjects(self, model: Model, step: Step) -> list[tuple[Action, Subject]]:
        """Return the stream in the sizes of a step: each instruction's action, and its handler's argument."""
        sizes = step.micro_batch_size, step.seq_length
        if sizes not in self._subjects:
            self._subjects[sizes] = [(each.action, self._subject(each, model, step)) for each in self.stream]
        return self._subjects[sizes]

    def _subject(self, instruction: Instruction, model: Model, step: Step) -> Subject:
        action, op, transfer, task = instruction
        if action is Action.RUN and op is not None:
            return self._planned(op, task, step.seq_length)
        if action is Action.RECV and transfer is not None and not transfer.of_stage:
            return Incoming(transfer, *self._payload(transfer, model, step))
        return instruction

    def _planned(self, op: Op, task: int, seq_length: int) -> PlannedOp:
        graph, tokens = self.graph, self._workload(seq_length).tokens(op.microbatch)
        return PlannedOp(
            op=op,
            unit=op.unit,
            pieces=self.program.stages[op.stage].pieces,
            segments=self.segments(op.unit),
            offset=sum(tokens[: op.chunk]),
            length=tokens[op.chunk],
            row_length=sum(tokens) if len(tokens) > 1 else None,
            takes=graph.takes[task],
            gives=graph.gives[task],
            saved=graph.saved[task],
            leaves=graph.gives[task] in self.leaving,
            first=op.stage == 0,
            last=op.stage == self.program.chain - 1 == len(self.program.stages) - 1,
            borrowed=op.stage in self._borrowed,
            completes=op in self.last,
            keeps=self.program.sharded > 1 and "gathered" not in self._kinds(graph.frees[task]),
            scatters="made_gradients" in self._kinds(graph.writes[task]),
            offloading=self._offloading(op),
            drops=tuple(
                sum(tokens[: buffer.chunk])
                for buffer in map(graph.buffers.__getitem__, graph.frees[task])
                if buffer.kind == "keys_values" and buffer.chunk >= 0
            ),
            makes_blocks=self._makes_blocks(op, task),
            paired=op in self.program.pairs,
            in_graphs=op.stage in self._in_graphs and not self.program.activations_of(op.unit).offload,
        )

    def _makes_blocks(self, op: Op, task: int) -> int:
        for number in self.graph.writes[task] if op.kind == "F" else self.graph.frees[task]:
            buffer = self.graph.buffers[number]
            if buffer.kind in ("keys_values", "kv_gradients") and buffer.stage == op.stage + 1:
                return self.program.stages[buffer.stage].pieces[0].layer
        return -1

    def _kinds(self, buffers: Sequence[int]) -> list[str]:
        return [self.graph.buffers[number].kind for number in buffers]

    def _offloading(self, op: Op) -> Offloading | None:
        program, stage = self.program, self.program.stages[op.stage]
        offload = program.activations_of(op.unit).offload
        if op.kind != "F" or not offload or program.forward_only:
            return None
        run_of = {piece: number for number, (run, _) in enumerate(offload) for piece in run}
        groups = []
        for segment in self.segments(op.unit):
            first = run_of.get(segment.pieces[0], -1)
            alike = groupby(segment.pieces, lambda piece: run_of.get(piece, -1))
            runs = ((first, segment.pieces),) if segment.recomputed else ((run, tuple(part)) for run, part in alike)
            groups.append(tuple(runs))
        before = program.stages[op.stage - 1].pieces[-1] if op.stage else None
        first_piece, shared = stage.pieces[0], staying(before, None)
        names = enumerate(KINDS[first_piece.kind].inputs)
        stays = tuple(number for number, name in names if (name, first_piece.layer) in shared)
        return Offloading(tuple(groups), tuple(share for _, share in offload), stays, program.min_offloaded_bytes)

    @cached_property
    def copies(self) -> bool:
        """Whether this rank copies activations to its host."""
        return any(copy.source == self.rank for copy in self.graph.copies)

    def segments(self, unit: Unit) -> tuple[Segment, ...]:
        """Return the segments of the unit's stage, which depend on how the unit's activations are kept."""
        activations = self.program.activations_of(unit)
        key = unit.stage, activations
        if key not in self._segments:
            self._segments[key] = segments(self.program.stages[unit.stage].pieces, activations)
        return self._segments[key]

    def _payload(self, message: Transfer, model: Model, step: Step) -> tuple[tuple[torch.Size, ...], torch.dtype]:
        """Return the shapes and type of an activation or gradient. A gradient has the shapes of the activation that
        crossed the cut after the consumer's stage.
        """
        unit = message.unit
        length = self._workload(step.seq_length).tokens(unit.microbatch)[unit.chunk]
        if message.kind in ("keys_values", "kv_gradients"):
            layers = model.attention_layers(self.program.stages[unit.stage].pieces, step.training)
            _, key, value, _ = model.payload_shapes(Piece("qkv", layers[0]), step.micro_batch_size, length)
            return (key, value) * len(layers), model.payload_dtype
        after = self.program.stages[unit.stage - (message.kind == "activation")].pieces[-1]
        place = after, step.micro_batch_size, length
        if place not in self._shapes:
            self._shapes[place] = model.payload_shapes(*place)
        return self._shapes[place], model.payload_dtype

    def place(self, unit: Unit, seq_length: int) -> tuple[int, int]:
        """Return the first token of a unit's chunk in its microbatch, and how many tokens it has."""
        return self.first_row(unit, seq_length), self._workload(seq_length).tokens(unit.microbatch)[unit.chunk]

    def first_row(self, unit: Unit, seq_length: int) -> int:
        """Return the first row of a unit's chunk in its microbatch."""
        return sum(self._workload(seq_length).tokens(unit.microbatch)[: unit.chunk])

    def where(self, index: int) -> str:
        """Return a text with the failing instruction among its neighbours."""
        lines = [f"in the stream of pipeline rank {self.rank} (schedule {self.program.schedule}):"]
        for i in range(max(index - 3, 0), min(index + 4, len(self.stream))):
            lines.append(f"  {'-->' if i == index else '   '} {i:5d}  {self.stream[i]}")
        return "\n".join(lines)

    def _workload(self, seq_length: int) -> Workload:
        if seq_length not in self._workloads:
            self._workloads[seq_length] = self.program.workload.in_tokens(seq_length)
        return self._workloads[seq_length]
