"""Runs one step of one plan on one rank: a table of buffers, and a handler for each kind of instruction and of op.

Activations and gradients on their way to an op (with the transport's mark where a message takes them away), and what a
unit saved for its backward, lie in one table by the buffer's number in the graph. Keys and values of microbatches that
run in chunks lie in a store, borrowed weights and sums of their gradients with `BorrowedWeights`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from helixpipe.common.alternate import finished
from helixpipe.common.errors import UserError
from helixpipe.lowering.project import Action, Instruction
from helixpipe.model import Microbatch, UnitContext
from helixpipe.model.attention.kv_blocks import KeyValueBlocks, UnitBlocks
from helixpipe.model.attention.kv_store import KeyValueStore, UnitKeyValues
from helixpipe.model.collectives import without_graph
from helixpipe.model.device import device
from helixpipe.model.steps import Steps
from helixpipe.program.stages import Piece
from helixpipe.program.transfer import TRANSFER_KINDS
from helixpipe.runtime.block_transfers import BlockTransfers
from helixpipe.runtime.borrowed_weights import BorrowedWeights
from helixpipe.runtime.head_traffic import DividedHead, HeadTraffic
from helixpipe.runtime.offload import KeepsConstants, Offloader, UnitSaving
from helixpipe.runtime.recording import Clock, Recorder
from helixpipe.runtime.run_ahead import RunAhead
from helixpipe.runtime.segments import SegmentGraph, fill_inputs, gradient, leaves, release_inputs, roots, split
from helixpipe.runtime.step import Incoming, LossSum, Model, PlannedOp, PlanOnRank, RunsInSteps, Step
from helixpipe.runtime.traffic import (
    CrossingMessages,
    MessageHandler,
    WeightMessages,
    copies,
    ends_of_turns,
    weight_collectives,
)
from helixpipe.runtime.transport import Receipt, Transport
from helixpipe.runtime.weights import StageWeights
from helixpipe.watch.position import Position

_run_backward: Any = torch.autograd.Variable._execution_engine.run_backward
"""Called as megatron-core does: without the checks of torch.autograd.backward."""


class ExecutionError(RuntimeError):
    """An instruction failed; the message shows it among its neighbours in the rank's stream."""


class OnRank(Protocol):
    """The objects of a rank that outlast a step, which each step uses. See `Executor`."""

    rank: int
    model: Model
    transport: Transport
    weights: StageWeights
    borrowed: BorrowedWeights
    position: Position
    run_ahead: RunAhead | None
    offloader: Offloader | None
    group: dist.ProcessGroup | None
    keys_values: KeyValueStore | KeyValueBlocks


class StepRun:
    """One step of one plan. buffers: by number in the graph. receipts: of posted receives, by message."""

    def __init__(self, executor: OnRank, plan: PlanOnRank, step: Step, record: bool):
        self.executor, self.plan, self.step = executor, plan, step
        self.transport, self.borrowed, self.graph = executor.transport, executor.borrowed, plan.graph
        self.run_ahead = executor.run_ahead
        self.buffers: dict[int, Any] = {}
        self.receipts: dict[int, Receipt] = {}
        self.losses: list[LossSum] = []
        self.observers = step.observers
        for each in self.observers:
            each.begin_step()
        self.blocks = BlockTransfers(executor.keys_values, plan, step, executor.model)
        self.recorder = Recorder(Clock(device())) if record else None
        self._opened: tuple[PlannedOp, Any] | None = None  # the first of a pair, with the mark of its start
        self._actions: dict[Action, Callable[[Any], None]] = {
            Action.RUN: self._run,
            Action.SEND: self._send,
            Action.RECV: self._receive,
            Action.START: self._start,
            Action.WAIT: self._wait,
            Action.FREE: self._free,
        }
        crossing, weights = CrossingMessages(self.buffers, self.graph), WeightMessages(self.borrowed)
        self._messages: dict[str, MessageHandler] = {
            **dict.fromkeys(("activation", "gradient"), crossing),
            **dict.fromkeys(("keys_values", "kv_gradients"), self.blocks),
            **dict.fromkeys(("weights", "weight_gradients"), weights),
        }
        stages = plan.program.stages
        self._started = dict(weight_collectives(executor.weights, lambda stage: stages[stage].pieces))
        self.head = None
        if plan.program.chain < len(stages):
            model = cast(DividedHead, executor.model)
            assert executor.group is not None, "the parts of a head need the group of the pipeline's ranks"
            self.head = HeadTraffic(executor.rank, executor.group, model, plan, step, self.buffers, self.losses.append)
            self._started |= self.head.handlers()
        if plan.program.turns:
            assert executor.group is not None, "turns need the group of the pipeline's ranks"
            self._started |= ends_of_turns(executor.group)
        if plan.copies:
            assert executor.offloader is not None
            self._started |= copies(executor.offloader, self.graph, self.recorder)
        self._ops: dict[str, Callable[[PlannedOp], None]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._input_backward,
            "W": self._weight_backward,
            "R": self._recompute,
        }

    def execute(self, places: range) -> None:
        subjects, actions = self.plan.subjects(self.executor.model, self.step), self._actions
        position, ahead = self.executor.position, self.run_ahead
        at, part = position.at, position.run
        for index in places:
            at(index)
            action, subject = subjects[index]
            try:
                if ahead is not None and action is Action.RUN:
                    ahead.wait()
                actions[action](subject)
                if ahead is not None and (action is Action.RUN or action is Action.WAIT):
                    ahead.leave(part, index, is_op=action is Action.RUN)
            except UserError:
                raise
            except Exception as error:
                raise ExecutionError(f"{type(error).__name__}: {error}\n{self.plan.where(index)}") from error

    def give_up(self) -> None:
        """Forget a step after its opening, when all that was sent in it has come."""
        for receipt in self.receipts.values():
            receipt.wait()  # sent in the opening, for an op after it
        if self.head is not None:
            self.head.give_up()
        if self.executor.offloader is not None:
            self.executor.offloader.give_up()
        self.transport.finish()

    # ------------------------------------------------------------------------------------------------- instructions

    def _receive(self, subject: Incoming | Instruction) -> None:
        message, incoming = subject.transfer, subject if isinstance(subject, Incoming) else None
        assert message is not None
        shapes, dtype = self._messages[message.kind].expected(message, incoming)
        if self.recorder is not None:
            self.recorder.posted(message)
        self.receipts[message.number] = self.transport.receive(shapes, dtype, message.source, message.number)

    def _send(self, instruction: Instruction) -> None:
        message = instruction.transfer
        assert message is not None
        if self.recorder is not None:
            self.recorder.sent(message)
        if message.follows >= 0 and TRANSFER_KINDS[message.kind].passed_on:
            self.transport.pass_on(self.receipts[message.follows], message.target, message.number)
        else:
            tensors, since = self._messages[message.kind].carried(message)
            for each in self.observers:
                each.send(message, tensors)
            self.transport.send(tensors, message.target, message.number, since)

    def _start(self, instruction: Instruction) -> None:
        assert instruction.transfer is not None
        self._started[instruction.transfer.kind].start(instruction.transfer)

    def _wait(self, instruction: Instruction) -> None:
        transfer = instruction.transfer
        assert transfer is not None
        if transfer.kind in self._started:
            self._started[transfer.kind].wait(transfer)
            return
        receipt = self.receipts[transfer.number]
        if not TRANSFER_KINDS[transfer.kind].passed_on:
            del self.receipts[transfer.number]
        start = self.recorder.mark() if self.recorder is not None else None
        tensors = receipt.wait()
        for each in self.observers:
            each.receive(transfer, tensors)
        self._messages[transfer.kind].take_in(transfer, tensors)
        if self.recorder is not None:
            self.recorder.arrived(transfer, start)

    def _free(self, instruction: Instruction) -> None:
        if instruction.transfer is not None:
            self.borrowed.drop(instruction.transfer)
            del self.receipts[instruction.transfer.number]
        else:
            for number in self.graph.frees[instruction.task]:
                self.buffers.pop(number, None)

    def _run(self, op: PlannedOp) -> None:
        recorder, weights = self.recorder, self.executor.weights
        start = recorder.mark() if recorder is not None else None
        if op.borrowed:
            self.borrowed.prepare(op.op)
        else:
            weights.gather(op.pieces, op.op.kind)
        if op.paired:
            self._opened = op, start
            self._model_in_steps.beside.begin(self._forward_steps(op))
            return
        if torch._C._autograd._profiler_enabled():  # a range costs more than the rest of this
            with torch.autograd.profiler.record_function(f"PP:{op.op}"):
                self._ops[op.op.kind](op)
        else:
            self._ops[op.op.kind](op)
        if self._opened is not None:
            (first, start), self._opened = self._opened, None
            self._model_in_steps.beside.finish()
            weights.release(first.pieces, first.op.kind, first.keeps, first.scatters)
            if recorder is not None:
                start = recorder.ran_beside(first.op, start)
        if not op.borrowed:
            weights.release(op.pieces, op.op.kind, op.keeps, op.scatters)
        if recorder is not None:
            recorder.ran(op.op, start)
        if op.completes:
            weights.complete(op.pieces)

    @property
    def _model_in_steps(self) -> RunsInSteps:
        return cast(RunsInSteps, self.executor.model)

    # ---------------------------------------------------------------------------------------------------------- ops

    def _forward(self, op: PlannedOp) -> None:
        finished(self._forward_steps(op))

    def _forward_steps(self, op: PlannedOp) -> Generator[None, None, None]:
        """Run a forward, in the model's steps if it is the first of a pair."""
        state = self.buffers.pop(op.takes, ())
        if self.plan.program.forward_only:
            outputs = self._run_pieces(op, op.pieces, state)
            if (keys_values := self._keys_values(op)) is not None:
                keys_values.release()
            self.blocks.make(op, outputs)
            self._give(op, outputs)
            self.blocks.drop(op)
            return
        graphs: list[SegmentGraph] = []
        saving = UnitSaving(op.offloading) if op.offloading is not None else None
        for segment in op.segments:
            inputs = leaves(state)
            graph = SegmentGraph(segment, inputs, None)
            if saving is not None:
                outputs = self._run_saving(op, saving, graph, len(graphs))
            elif segment.recomputed:
                outputs = yield from without_graph(self._steps(op, segment.pieces, inputs))
            else:
                outputs = yield from self._steps(op, segment.pieces, inputs)
            if not segment.recomputed:
                graph.roots = roots(inputs, outputs)
            graphs.append(graph)
            state = outputs
        self.blocks.make(op, outputs)
        self._give(op, outputs)
        given = [tensor.detach() for tensor in outputs] if saving is not None else []  # one may be a residual that goes
        for each in graphs:
            release_inputs(each)
        self.buffers[op.saved] = graphs
        if saving is not None and self.executor.offloader is not None:
            self.executor.offloader.leave(op.unit, saving, graphs, (*given, *self._kept(op)))

    def _run_saving(self, op: PlannedOp, saving: UnitSaving, graph: SegmentGraph, number: int) -> tuple[Tensor, ...]:
        """Run a segment's forward, and record what autograd saves in it."""
        saving.take_inputs(number, graph)
        state = graph.inputs
        if graph.segment.recomputed:
            with torch.no_grad():
                return self._run_pieces(op, graph.segment.pieces, state)
        for run, pieces in saving.offloading.groups[number]:
            with saving.by(run):
                state = self._run_pieces(op, pieces, state)
        return state

    def _kept(self, op: PlannedOp) -> Iterator[Tensor]:
        """Yield the tensors that are on the device in any case, whichever unit saves them."""
        batch = self.step.batch(op.op.microbatch)
        if isinstance(batch, Microbatch):
            yield from batch.tensors()
        yield from self.executor.keys_values.tensors()
        model = self._model(op)
        if isinstance(model, KeepsConstants):
            yield from model.constants()

    def _give(self, op: PlannedOp, outputs: tuple[Tensor, ...]) -> None:
        """Deliver the outputs of F: the loss sum of the last stage, or what crosses the cut."""
        if op.last:
            self.losses.append(LossSum(op.op.microbatch, op.op.chunk, outputs[0].detach()))
        else:
            self._deliver(op, tuple([tensor.detach() for tensor in outputs]))

    def _backward(self, op: PlannedOp) -> None:
        """Segment by segment from the last; one that is recomputed and has had no R is recomputed first."""
        graphs: list[SegmentGraph] = self.buffers[op.saved]
        gradients: tuple[Tensor, ...]
        gradients = (self.step.root_gradient(op.op.microbatch),) if op.last else self.buffers.pop(op.takes)
        gradients = self.blocks.with_others(op, gradients)
        while graphs:
            graph = graphs.pop()
            if graph.segment.inputs_again and graphs[-1].roots is None:
                self._recompute_segment(op, graphs[-1], graph)
            if graph.roots is None:
                self._recompute_segment(op, graph)
            gradients = self._through(op, graph, gradients)
        if not op.first:
            self._deliver(op, gradients)
        self.blocks.drop(op)

    def _through(self, op: PlannedOp, graph: SegmentGraph, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run a segment's backward: from the gradients of its outputs to those of its inputs."""
        assert graph.roots is not None
        edges, given, passed = split(graph.roots, gradients)
        keys_values = self._keys_values(op)
        if keys_values is not None:
            layers = self._model(op).attention_layers(graph.segment.pieces, training=True)
            keys_values.begin_backward(layers)
        _run_backward(edges, given, False, False, (), allow_unreachable=True, accumulate_grad=True)
        if keys_values is not None:
            keys_values.finish(layers)
        return tuple([gradient(tensor, passed.get(index)) for index, tensor in enumerate(graph.inputs)])

    def _input_backward(self, op: PlannedOp) -> None:
        """Run B without the weight gradients of linear layers, which wait for W with what they need."""
        with self._model(op).weight_gradients().keep(op.unit):
            self._backward(op)
            if op.borrowed:
                self.borrowed.leave_to_w(op.op)
            else:
                self.executor.weights.leave_to_w(op.pieces)
        del self.buffers[op.saved]

    def _weight_backward(self, op: PlannedOp) -> None:
        self._model(op).weight_gradients().compute(op.unit)

    def _recompute(self, op: PlannedOp) -> None:
        """Recompute the unit, now with its graph; the random state depends on the unit, so dropout repeats."""
        graphs: list[SegmentGraph] = self.buffers[op.saved]
        for graph, following in zip(graphs, (*graphs[1:], None), strict=True):
            if graph.roots is None:
                self._recompute_segment(op, graph, following)

    def _recompute_segment(self, op: PlannedOp, graph: SegmentGraph, following: SegmentGraph | None = None) -> None:
        """Run a segment's forward again, now with its graph, and fill the inputs of the one after it, if that waits
        for them."""
        outputs = self._run_pieces(op, graph.segment.pieces, graph.inputs)
        graph.roots = roots(graph.inputs, outputs)
        if following is not None and following.segment.inputs_again:
            fill_inputs(following.inputs, outputs)

    # ------------------------------------------------------------------------------------------------------ details

    def _run_pieces(self, op: PlannedOp, pieces: tuple[Piece, ...], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self._model(op).run(pieces, inputs, self.step.batch(op.op.microbatch), self._context(op))

    def _steps(self, op: PlannedOp, pieces: tuple[Piece, ...], inputs: tuple[Tensor, ...]) -> Steps:
        if not op.paired:
            return self._run_pieces(op, pieces, inputs)
        batch = self.step.batch(op.op.microbatch)
        return (yield from self._model_in_steps.steps(pieces, inputs, batch, self._context(op)))

    def _context(self, op: PlannedOp) -> UnitContext:
        step, microbatch = self.step, op.op.microbatch
        number, keys_values = step.microbatch_number(microbatch), self._keys_values(op)
        unit = UnitContext(
            *(step.iteration, number, op.op.chunk, op.offset, op.length, step.training, keys_values, op.row_length),
            number=microbatch,
            in_graphs=op.in_graphs,
        )
        if step.auxiliary_gradient is None:
            return unit
        return unit._replace(auxiliary_gradient=partial(step.auxiliary_gradient, microbatch))

    def _deliver(self, op: PlannedOp, tensors: tuple[Tensor, ...]) -> None:
        self.buffers[op.gives] = (tensors, self.transport.mark()) if op.leaves else tensors

    def _model(self, op: PlannedOp) -> Model:
        """Return the model that holds the weights of the op's stage here."""
        return cast(Model, self.borrowed.shell) if op.borrowed else self.executor.model

    def _keys_values(self, op: PlannedOp) -> UnitKeyValues | UnitBlocks | None:
        """Return the keys and values of the op's microbatch, if that runs in several chunks."""
        if op.row_length is None:
            return None
        return self.executor.keys_values.unit(op.op.microbatch, op.offset, op.length, op.row_length)
