"""The executor: a loop over one rank's instructions with a table from kind to handler. It knows no schedule.

It keeps five things. `keys_values`: of sequences that run in chunks. `stash`: what a unit's backward needs, from its F
to the FREE after its backward. `inbox`: tensors that have arrived for an op, from another rank or from this one.
`outbox`: tensors that an op produced for another rank, and the transport's mark at that time, until sent. `copies`:
weights of stages that are shipped here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from helixpipe.common.errors import UserError
from helixpipe.lowering.lower import Action, Instruction, LoweredProgram
from helixpipe.model import Microbatch, UnitContext
from helixpipe.model.device import device
from helixpipe.model.kv_store import KeyValueStore, UnitKeyValues
from helixpipe.model.linear import WeightGradients
from helixpipe.program.message import Message
from helixpipe.program.program import Op, Piece, Segment, Unit, chunk_lengths
from helixpipe.runtime.borrowed_weights import ModelWithWeights, WeightCopies
from helixpipe.runtime.recording import Clock, Record, Recorder
from helixpipe.runtime.transport import Receipt, Transport
from helixpipe.watch.position import Position

_run_backward: Any = torch.autograd.Variable._execution_engine.run_backward
"""As megatron-core calls it too: without the checks of torch.autograd.backward."""


class Model(Protocol):
    """What the executor runs; `helixpipe.model.PipelineModel` is one."""

    payload_dtype: torch.dtype

    def run(
        self, pieces: Sequence[Piece], inputs: tuple[Tensor, ...], batch: Microbatch, context: UnitContext
    ) -> tuple[Tensor, ...]: ...

    def weight_gradients(self) -> WeightGradients: ...

    def payload_shapes(self, after: Piece, micro_batch_size: int, length: int) -> tuple[torch.Size, ...]: ...


@dataclass(frozen=True)
class Step:
    """What differs from one run of a program to the next.

    iteration: for the random state. microbatch_number: of a microbatch of this pipeline among those of all
    data-parallel ranks. batch: the data of a microbatch by its number in this pipeline; asked for only on ranks that
    hold embed or head. root_gradient: for a microbatch, the gradient of the objective with respect to its loss sum: a
    scalar tensor, such as loss_scale / (tokens of the microbatch * number of microbatches). micro_batch_size,
    seq_length: of this step. confirm: asked once, between the step's opening (see `lowering.lower`) and its first
    backward; where it says no, the weights have changed, and the opening is run again. It says the same on all ranks.
    complete: told of the pieces of a stage when this rank has run its last backward of them.
    """

    iteration: int
    microbatch_number: Callable[[int], int]
    batch: Callable[[int], Microbatch]
    root_gradient: Callable[[int], Tensor]
    micro_batch_size: int
    seq_length: int
    training: bool = True
    confirm: Callable[[], bool] | None = None
    complete: Callable[[tuple[Piece, ...]], None] = lambda pieces: None


class LossSum(NamedTuple):
    """The sum of a chunk's token losses times their loss mask; a float32 scalar, on the rank that ran its head only."""

    microbatch: int
    chunk: int
    value: Tensor


@dataclass
class _Graph:
    """One segment of a unit, between its F and its backward: what autograd ends at and starts from.

    roots: for each output the edge its gradient enters by, or the number of the input that it is (a residual passing
    by); None while the segment is to be made again.
    """

    segment: Segment
    inputs: tuple[Tensor, ...]
    roots: tuple[GradientEdge | int, ...] | None


class ExecutionError(RuntimeError):
    """An instruction failed; the message shows it among its neighbours in the rank's stream."""


class Executor:
    """Runs a lowered program on one rank.

    rank: pipeline rank. model: holds the weights of this rank's pieces. fp32_kv_gradients: sum the gradients of keys
    and values over chunks in float32. position: where to publish which instruction comes next. `keys_values` is the
    store of the step that ran last.
    """

    def __init__(
        self, lowered: LoweredProgram, rank: int, model: Model, transport: Transport, fp32_kv_gradients: bool = False,
        position: Position | None = None,
    ):  # fmt: skip
        self.lowered = lowered
        self.rank = rank
        self.model = model
        self.transport = transport
        self._stream = lowered.streams[rank]
        self._actions: dict[Action, Callable[[Instruction], None]] = {
            Action.RECV: self._receive,
            Action.WAIT: self._wait,
            Action.RUN: self._run,
            Action.SEND: self._send,
            Action.FREE: self._free,
        }
        self._ops: dict[str, Callable[[Op], None]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._input_backward,
            "W": self._weight_backward,
            "R": self._recompute,
        }
        self._copies = WeightCopies(lowered.graph, rank, cast(ModelWithWeights, model))
        if any(op.kind == "W" for op in lowered.program.ranks[rank]):
            for each in {op.stage: self._model(op) for op in lowered.program.ranks[rank]}.values():
                each.weight_gradients()  # before the first forward
        self._local_consumer = self._consumers_on_this_rank()
        self._fp32_kv_gradients = fp32_kv_gradients
        self._position = position or Position()
        self._payloads: dict[tuple[int, int, int], tuple[tuple[torch.Size, ...], torch.dtype]] = {}
        self._last = set({op.stage: op for op in lowered.program.ranks[rank] if op.kind in "BW"}.values())

    def run(self, step: Step, record: bool = False) -> tuple[list[LossSum], Record]:
        """Run the program once. Gradients are added to the parameters'. Returns the loss sums of the microbatches
        whose head is here, and this rank's times when `record` (else an empty record)."""
        self._step = step
        self._lengths = chunk_lengths(self.lowered.program, step.seq_length)
        opening = self.lowered.openings[self.rank]
        with torch.no_grad() if self.lowered.program.forward_only else nullcontext():
            self._begin(record)
            self._execute(range(opening))
            if step.confirm is not None:
                right = step.confirm()
                self._position.begin(self.lowered, self.rank)
                if not right:
                    for receipt in self._receipts.values():
                        receipt.wait()  # sent in the opening, for an op after it
                    self.transport.finish()  # messages will have the same numbers again
                    self._begin(record)
                    self._execute(range(opening))
            self._execute(range(opening, len(self._stream)))
        self._position.at(len(self._stream))
        self.transport.finish()
        self._position.end()
        del self._step  # whoever made it may hold this executor
        return self._losses, self._recorder.read() if self._recorder is not None else Record()

    def _begin(self, record: bool) -> None:
        self.keys_values = KeyValueStore(self._fp32_kv_gradients)
        self._stash: dict[Unit, list[_Graph]] = {}
        self._inbox: dict[Op, tuple[Tensor, ...]] = {}
        self._outbox: dict[Op, tuple[tuple[Tensor, ...], Any]] = {}
        self._receipts: dict[int, Receipt] = {}
        self._losses: list[LossSum] = []
        self._copies.begin()
        self._recorder = Recorder(Clock(device())) if record else None
        self._position.begin(self.lowered, self.rank)

    def _execute(self, places: range) -> None:
        for index in places:
            self._position.at(index)
            instruction = self._stream[index]
            try:
                self._actions[instruction.action](instruction)
            except UserError:
                raise
            except Exception as error:
                raise ExecutionError(f"{type(error).__name__}: {error}\n{self._where(index)}") from error

    # ------------------------------------------------------------------------------------------------- instructions

    def _receive(self, instruction: Instruction) -> None:
        message = _message(instruction)
        key = message.number, self._step.micro_batch_size, self._step.seq_length
        if key not in self._payloads:
            self._payloads[key] = self._payload(message)
        shapes, dtype = self._payloads[key]
        self._receipts[message.number] = self.transport.receive(shapes, dtype, message.source, message.number)

    def _wait(self, instruction: Instruction) -> None:
        message = _message(instruction)
        if message.kind == "weights":  # its receipt stays: it may be passed on
            self._copies.put(message, self._receipts[message.number].wait()[0])
        else:
            tensors = self._receipts.pop(message.number).wait()
            if message.kind == "weight_gradients":
                self._copies.add(message, tensors[0])
            else:
                self._inbox[message.consumer] = tensors
        if self._recorder is not None:
            self._recorder.arrived(message)

    def _run(self, instruction: Instruction) -> None:
        op = _op(instruction)
        start = self._recorder.mark() if self._recorder is not None else None
        if op.stage in self._copies.stages:
            self._copies.prepare(op)
        profiled = torch._C._autograd._profiler_enabled()  # a range costs more than the rest of this
        with torch.autograd.profiler.record_function(f"PP:{op}") if profiled else nullcontext():
            self._ops[op.kind](op)
        if self._recorder is not None:
            self._recorder.ran(op, start)
        if op in self._last:
            self._step.complete(self.lowered.program.stages[op.stage].pieces)

    def _send(self, instruction: Instruction) -> None:
        message = _message(instruction)
        if self._recorder is not None:
            self._recorder.sent(message)
        if message.kind == "weights" and message.follows >= 0:
            self.transport.pass_on(self._receipts[message.follows], message.target, message.number)
            return
        since = None
        if message.kind == "weights":
            tensors: tuple[Tensor, ...] = (self._copies.pack(message.producer.stage),)
        elif message.kind == "weight_gradients":
            tensors = (self._copies.take_sum(message),)
        else:
            tensors, since = self._outbox.pop(message.producer)
        self.transport.send(tensors, message.target, message.number, since)

    def _free(self, instruction: Instruction) -> None:
        op = instruction.op
        if op is None:
            message = _message(instruction)
            self._copies.drop(message)
            del self._receipts[message.number]
        else:
            del self._stash[op.unit]

    # ---------------------------------------------------------------------------------------------------------- ops

    def _forward(self, op: Op) -> None:
        stage = self.lowered.program.stages[op.stage]
        state = self._inbox.pop(op, ())
        if self.lowered.program.forward_only:
            outputs = self._run_pieces(op, stage.pieces, state)
            self._keys_values(op).release()
        else:
            graphs = self._stash[op.unit] = []
            for segment in stage.segments:
                inputs = _leaves(state)
                with torch.no_grad() if segment.recomputed else nullcontext():
                    outputs = self._run_pieces(op, segment.pieces, inputs)
                graphs.append(_Graph(segment, inputs, None if segment.recomputed else _roots(inputs, outputs)))
                state = outputs
        if op.stage == len(self.lowered.program.stages) - 1:
            self._losses.append(LossSum(op.microbatch, op.chunk, outputs[0].detach()))
        else:
            self._deliver(op, tuple(tensor.detach() for tensor in outputs))
        if not self.lowered.program.forward_only:
            for graph in graphs:
                _let_go(graph)

    def _backward(self, op: Op) -> None:
        """Segment by segment from the last; one that is recomputed and has had no R is made again first."""
        graphs = self._stash[op.unit]
        if op.stage == len(self.lowered.program.stages) - 1:
            gradients: tuple[Tensor, ...] = (self._step.root_gradient(op.microbatch),)
        else:
            gradients = self._inbox.pop(op)
        while graphs:
            graph = graphs.pop()
            if graph.segment.inputs_again and graphs[-1].roots is None:
                self._make_again(op, graphs[-1], graph)
            if graph.roots is None:
                self._make_again(op, graph)
            gradients = self._through(op, graph, gradients)
        if op.stage > 0:
            self._deliver(op, gradients)

    def _through(self, op: Op, graph: _Graph, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """From the gradients of a segment's outputs to those of its inputs."""
        assert graph.roots is not None
        layers = self._chunked_layers(graph)
        roots, later = self._keys_values(op).roots(layers) if layers else ((), ())
        edges: list[Any] = [*roots]
        given, passed = [*later], {}
        for root, gradient in zip(graph.roots, gradients, strict=True):
            if isinstance(root, int):
                passed[root] = gradient
            else:
                edges.append(root)
                given.append(gradient)
        _run_backward(tuple(edges), tuple(given), False, False, (), allow_unreachable=True, accumulate_grad=True)
        if layers:
            self._keys_values(op).finish(layers)
        return tuple(_gradient(tensor, passed.get(index)) for index, tensor in enumerate(graph.inputs))

    def _input_backward(self, op: Op) -> None:
        """B without the weight gradients of linear layers, which wait for W with what they need."""
        with self._model(op).weight_gradients().keep(op.unit):
            self._backward(op)

    def _weight_backward(self, op: Op) -> None:
        self._model(op).weight_gradients().compute(op.unit)

    def _recompute(self, op: Op) -> None:
        """What the stage recomputes, now with its graph; the random state depends on the unit, so dropout repeats."""
        graphs = self._stash[op.unit]
        for graph, following in zip(graphs, (*graphs[1:], None), strict=True):
            if graph.roots is None:
                self._make_again(op, graph, following)

    def _make_again(self, op: Op, graph: _Graph, following: _Graph | None = None) -> None:
        """Run a recomputed segment's forward, now with its graph, and fill the inputs of the one after it, if that
        waits for them."""
        outputs = self._run_pieces(op, graph.segment.pieces, graph.inputs)
        graph.roots = _roots(graph.inputs, outputs)
        if following is not None and following.segment.inputs_again:
            _fill(following.inputs, outputs)

    def _run_pieces(self, op: Op, pieces: tuple[Piece, ...], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self._model(op).run(pieces, inputs, self._step.batch(op.microbatch), self._context(op))

    def _deliver(self, op: Op, tensors: tuple[Tensor, ...]) -> None:
        consumer = self._local_consumer.get(op)
        if consumer is None:
            self._outbox[op] = tensors, self.transport.mark()
        else:
            self._inbox[consumer] = tensors

    # ------------------------------------------------------------------------------------------------------ details

    def _model(self, op: Op) -> Model:
        """What holds the op's weights."""
        return cast(Model, self._copies.shell) if op.stage in self._copies.stages else self.model

    def _context(self, op: Op) -> UnitContext:
        return UnitContext(
            step=self._step.iteration,
            microbatch=self._step.microbatch_number(op.microbatch),
            chunk=op.chunk,
            offset=sum(self._lengths[: op.chunk]),
            length=self._lengths[op.chunk],
            training=self._step.training,
            keys_values=self._keys_values(op) if len(self._lengths) > 1 else None,
        )

    def _keys_values(self, op: Op) -> UnitKeyValues:
        offset = sum(self._lengths[: op.chunk])
        return self.keys_values.unit(op.microbatch, offset, self._lengths[op.chunk], self._step.seq_length)

    def _chunked_layers(self, graph: _Graph) -> list[int]:
        """The layers whose keys and values the graph takes from the store."""
        pieces = graph.segment.pieces if len(self._lengths) > 1 else ()
        return [piece.layer for piece in pieces if piece.kind == "attn"]

    def _payload(self, message: Message) -> tuple[tuple[torch.Size, ...], torch.dtype]:
        """Shapes and type of what a message carries. A gradient has the shapes of what it is the gradient of: what
        crossed the cut after the consumer's stage."""
        if message.ships:
            size, dtype = self._copies.payload(message)
            return (size,), dtype
        stage = message.producer.stage if message.kind == "activation" else message.consumer.stage
        after = self.lowered.program.stages[stage].pieces[-1]
        length = self._lengths[message.producer.chunk]
        return self.model.payload_shapes(after, self._step.micro_batch_size, length), self.model.payload_dtype

    def _consumers_on_this_rank(self) -> dict[Op, Op]:
        """For each op of this rank whose tensors another op of this rank takes over: that op."""
        graph = self.lowered.graph
        consumers = {}
        for task in graph.rank_tasks[self.rank]:
            for successor in graph.successors[task]:
                if not graph.is_message(successor) and graph.ops[successor].stage != graph.ops[task].stage:
                    consumers[graph.ops[task]] = graph.ops[successor]
        return consumers

    def _where(self, index: int) -> str:
        """The failing instruction among its neighbours."""
        lines = [f"in the stream of pipeline rank {self.rank} (schedule {self.lowered.program.schedule}):"]
        for i in range(max(index - 3, 0), min(index + 4, len(self._stream))):
            lines.append(f"  {'-->' if i == index else '   '} {i:5d}  {self._stream[i]}")
        return "\n".join(lines)


def _gradient(tensor: Tensor, passed: Tensor | None) -> Tensor:
    """What autograd found, and what passed by it."""
    gradient, tensor.grad = tensor.grad, None
    if gradient is None:
        return passed if passed is not None else torch.zeros_like(tensor)
    return gradient if passed is None else gradient + passed


def _leaves(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The inputs of a graph of their own. A view of something larger is copied, so that the rest of that can go."""
    return tuple(
        (tensor.detach().clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor.detach())
        .requires_grad_()
        for tensor in tensors
    )  # fmt: skip


def _roots(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> tuple[GradientEdge | int, ...]:
    """Edges, not tensors: a backward needs no output's data, which can go once it has been sent."""
    numbers = {id(tensor): index for index, tensor in enumerate(inputs)}
    return tuple(numbers[id(each)] if id(each) in numbers else get_gradient_edge(each) for each in outputs)


def _let_go(graph: _Graph) -> None:
    """After F, drop the inputs' data that the backward does not need, or gets again."""
    segment = graph.segment
    if segment.passes_residual:
        residual = graph.inputs[-1]
        residual.data = residual.new_empty(1).expand(residual.shape)  # autograd asks for the shape
        residual.untyped_storage().resize_(0)
    if segment.inputs_again:
        for tensor in graph.inputs[:-1]:
            if tensor.untyped_storage().nbytes() == tensor.nbytes:  # not a chunk's rows in the store
                tensor.untyped_storage().resize_(0)  # what autograd saved of it are views of this storage


def _fill(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
    """Give inputs their data back, all but the residual's, which is not needed."""
    for tensor, output in zip(inputs[:-1], outputs[:-1], strict=True):
        if tensor.untyped_storage().nbytes() == 0:
            tensor.untyped_storage().resize_(tensor.nbytes)
            tensor.data.copy_(output.detach())  # .data: autograd's version of what it saved stays


def _op(instruction: Instruction) -> Op:
    assert instruction.op is not None
    return instruction.op


def _message(instruction: Instruction) -> Message:
    assert instruction.message is not None
    return instruction.message
