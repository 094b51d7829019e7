"""Times of pieces and of whole units on one rank, on chunks of several lengths, with tokens before them and without.

A piece is timed alone, with a graph of its own. Whole units, run by the executor, say what that leaves out: a further
layer of a unit decides how the times of a layer's pieces are scaled, and what remains is the overhead of an op.

All of it is done in turn, round by round, so that a machine which is slower at times is so for all of it alike.

That is done for sequences of several lengths. Of rows of several chunks or documents only whole units are timed; what a
layer takes there beyond its other pieces, at as many tokens, is attention's.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from helixpipe.costs.measured_chunks import MeasuredChunk, MeasuredChunks
from helixpipe.costs.models import Chunk
from helixpipe.costs.profile_costs import WeightTimes
from helixpipe.lowering.lower import lower
from helixpipe.lowering.project import Action, Instruction, LoweredProgram
from helixpipe.model import Microbatch, UnitContext
from helixpipe.model.device import device
from helixpipe.model.documents import Documents
from helixpipe.model.linear import add_gradient
from helixpipe.profile.machine import needs_wall_clock
from helixpipe.profile.message_times import fit_line
from helixpipe.profile.subject import DTYPES, Task, build_model
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import LAYER_PIECES, LayerKinds, Layers, Piece, Stage, model_pieces, role_of
from helixpipe.program.workload import uniform
from helixpipe.runtime.borrowed_weights import pack_weights
from helixpipe.runtime.executor import Executor, Step
from helixpipe.runtime.recording import Clock
from helixpipe.runtime.transport import SingleRankTransport
from helixpipe.watch.position import Position

SHORT, LONG = 1, 3
"""Layers of the two whole units that are timed."""

MICROBATCHES = 4
"""The microbatches of a row in one chunk; other rows have one."""

WARM_UP = 2

STEP = 0
"""The number of every step that is measured."""

SHORTER, PARTS = 4, 4
"""The ratio of each length to the next shorter one, and the chunks of rows of several chunks."""

LEAST, LEAST_PART = 64, 16
"""Tokens of a sequence and of a chunk, and of a document, that are measured."""


class MicrobatchShape(NamedTuple):
    """The composition of a microbatch: chunks of these lengths, or, if more than 1, `documents` documents of equal
    length.
    """

    chunks: tuple[int, ...]
    documents: int = 1

    @property
    def whole(self) -> bool:
        return len(self.chunks) == self.documents == 1

    @property
    def tokens(self) -> int:
        return sum(self.chunks)


def rows(seq_length: int) -> list[MicrobatchShape]:
    """Return the microbatches to measure: whole sequences from `seq_length` down, the two longest in chunks, and
    documents side by side.
    """
    lengths = [seq_length]
    while lengths[-1] // SHORTER >= LEAST:
        lengths.append(lengths[-1] // SHORTER)
    shapes = [MicrobatchShape((length,)) for length in lengths]
    shapes += [MicrobatchShape((length // PARTS,) * PARTS) for length in lengths[:2] if length // PARTS >= LEAST]
    counts = [(length, 2 * PARTS) for length in lengths[1:]]
    return shapes + [
        MicrobatchShape((length // many * many,), many) for length, many in counts if length // many >= LEAST_PART // 2
    ]


class _Marks(Position):
    """Marks the start of every op; an op lasts until the next begins, so that freeing what it kept is in it."""

    def __init__(self, clock: Clock):
        super().__init__()
        self._clock = clock
        self._stream: Sequence[Instruction] = ()
        self.marks: list[tuple[Op | None, Any]] = []

    def begin(self, lowered: LoweredProgram, pp_rank: int) -> None:
        super().begin(lowered, pp_rank)
        self._stream, self.marks = lowered.streams[pp_rank], []

    def at(self, instruction: int) -> None:
        super().at(instruction)
        op = self._stream[instruction].op if instruction < len(self._stream) else None
        if op is not None and self._stream[instruction].action is Action.RUN:
            self.marks.append((op, self._clock.mark()))

    def end(self) -> None:
        super().end()
        self.marks.append((None, self._clock.mark()))

    def times(self) -> Iterator[tuple[Op, float]]:
        """Yield the seconds of every op of the step that ran last."""
        for (op, start), (_, end) in pairwise(self.marks):
            if op is not None:
                yield op, self._clock.seconds(start, end)


Samples = dict[tuple[str, str], list[float]]
"""Seconds, by what (a piece kind; of a whole unit `short` or `long`, and the chunk's number) and op kind."""


@dataclass
class _MeasuredRun:
    """The measurements of a row with one kind of backward: whole or (split) in two."""

    row: MicrobatchShape
    split: bool
    lowered: dict[str, LoweredProgram]
    executor: Executor
    marks: _Marks
    step: Step
    samples: Samples = field(default_factory=dict)


def _tell(done: int, of: int) -> None:
    """Report this process's progress to the one that has started it."""
    sys.stdout.write(f"measured {done} of {of}\n")
    sys.stdout.flush()


class Measurement:
    """Times on one rank, while the other ranks of `group` do the same, of layers of these kinds of pieces."""

    def __init__(self, task: Task, group: Any, layer: LayerKinds = LAYER_PIECES, part: tuple[int, int] = (0, 1)):
        """Set up a measurement. part: its number and the number of measurements, for reports of progress."""
        self._task, self._group, self._layer, self._part = task, group, layer, part
        wall = needs_wall_clock(task.threads, dist.get_world_size(group))
        self._clock = Clock(device(), time.perf_counter if wall else time.thread_time)
        self._pieces = model_pieces((layer,) * LONG)
        self._model, self._ddp = build_model(task, LONG, self._pieces)
        self._plain = _linear_calls(self._model)
        self._model.weight_gradients()
        self._deferring = _linear_calls(self._model)

    def kernels(self, transport: str) -> str:
        """Return the kernels that the model runs on, as the training program prints them."""
        gradients = torch.promote_types(DTYPES[self._task.dtype], torch.float32)
        return self._model.kernels.line(self._model.config, chunked=False, transport=transport, gradients=gradients)

    def run(self) -> tuple[MeasuredChunk, ...]:
        """Measure each row's chunks, the whole sequence first. Reports its progress."""
        every = rows(self._task.seq_length)
        runs = [self._run_of(row, split) for row in every for split in (False, True)]
        rounds = WARM_UP + self._task.repeats
        for number in range(rounds):
            for place, run in enumerate(runs):
                _tell(
                    self._part[0] * rounds * len(runs) + number * len(runs) + place, self._part[1] * rounds * len(runs)
                )
                dist.barrier(self._group)
                measured = list(self._round(run))
                if number >= WARM_UP:
                    for key, seconds in measured:
                        run.samples.setdefault(key, []).append(seconds)
        joint, split = ([run.samples for run in runs if run.split is which] for which in (False, True))
        samples = [dict(zip("FBIW", (a, a, b, b), strict=True)) for a, b in zip(joint, split, strict=True)]
        whole = [_whole_times(row, of, self._layer) for row, of in zip(every, samples, strict=True) if row.whole]
        known = MeasuredChunks(whole, self._task.model.window)
        others = [
            _chunk_times(row, of, known, self._layer) for row, of in zip(every, samples, strict=True) if not row.whole
        ]
        return (*whole, *(times for each in others for times in each))

    def expert_loads(self) -> tuple[tuple[float, ...], ...]:
        """Return the tokens that each expert got in the last steps, for every layer with experts."""
        loads: list[list[float]] = self._model.routing.loads(STEP).tolist()
        return tuple(tuple(layer) for layer in loads if any(layer))

    def weight_times(self) -> WeightTimes:
        """Measure the packing and adding of weights sent as one flat tensor for a stage, on stages of one and three
        layers.
        """
        points: dict[str, list[tuple[float, float]]] = {"pack": [], "add": []}
        for layers in (SHORT, LONG):
            weights = self._model.weights_of([piece for piece in self._pieces if 0 <= piece.layer < layers])
            sums = [torch.zeros(weight.shape, device=weight.device) for weight in weights]
            samples: dict[str, list[float]] = {"pack": [], "add": []}
            for _ in range(WARM_UP + self._task.repeats):
                dist.barrier(self._group)
                start = self._clock.mark()
                flat = pack_weights(weights)
                middle = self._clock.mark()
                for weight, gradient in zip(weights, sums, strict=True):
                    add_gradient(weight, gradient)
                end = self._clock.mark()
                samples["pack"].append(self._clock.seconds(start, middle))
                samples["add"].append(self._clock.seconds(middle, end))
            nbytes = {"pack": flat.nbytes, "add": sum(gradient.nbytes for gradient in sums)}
            for name, seconds in samples.items():
                points[name].append((nbytes[name], statistics.median(seconds[WARM_UP:])))
        return WeightTimes(fit_line(points["pack"]), fit_line(points["add"]))

    def _run_of(self, row: MicrobatchShape, split: bool) -> _MeasuredRun:
        lowered = {
            name: lower(_program(row, (self._layer,) * number, split))
            for name, number in (("short", SHORT), ("long", LONG))
        }
        marks, (batch, root) = _Marks(self._clock), self._batch(row)
        executor = Executor(0, self._model, SingleRankTransport(), position=marks)
        step = Step(STEP, int, lambda index: batch, lambda index: root, self._task.micro_batch_size, row.tokens)
        return _MeasuredRun(row, split, lowered, executor, marks, step)

    def _round(self, run: _MeasuredRun) -> Iterator[tuple[tuple[str, str], float]]:
        """Everything once."""
        for module, call in (self._deferring if run.split else self._plain).items():
            module.__dict__.pop("_forward_impl", None)
            if call is not None:
                module._forward_impl = call
        self._ddp.zero_grad_buffer()
        if run.row.whole:
            yield from self._time_pieces(run.step.batch(0), run.step.root_gradient(0), run.row.tokens, run.split)
        for name, program in run.lowered.items():
            run.executor.run(program, run.step)
            for op, seconds in run.marks.times():
                yield (f"{name} {op.chunk}", op.kind), seconds

    def _batch(self, row: MicrobatchShape) -> tuple[Microbatch, Tensor]:
        """Return a microbatch, and the gradient of its loss sum."""
        samples, on = self._task.micro_batch_size, device()
        shape = (samples, row.tokens)
        tokens, labels = (torch.randint(0, self._task.model.vocab, shape, device=on) for _ in range(2))
        lengths = [[row.tokens // row.documents] * row.documents] * samples
        documents = Documents(lengths, on) if row.documents > 1 else None
        batch = Microbatch(tokens, labels, torch.ones(shape, device=on), documents=documents)
        return batch, torch.tensor(1.0 / (samples * row.tokens), device=on)

    def _time_pieces(
        self, batch: Microbatch, root: Tensor, length: int, split: bool
    ) -> Iterator[tuple[tuple[str, str], float]]:
        """Time every piece forward, then every piece backward, each in a graph of its own."""
        clock, marks = self._clock, []
        context = UnitContext(step=STEP, microbatch=0, length=length)
        units: list[tuple[Piece, tuple[Tensor, ...], tuple[Tensor, ...]]] = []
        state: tuple[Tensor, ...] = ()
        for piece in self._pieces:
            inputs = tuple(tensor.detach().requires_grad_() for tensor in state)
            start = clock.mark()
            state = self._model.run((piece,), inputs, batch, context)
            marks.append(((piece.kind, "F"), start, clock.mark()))
            units.append((piece, inputs, state))
        gradients: tuple[Tensor, ...] = (root,)
        store = self._model.weight_gradients() if split else None
        for piece, inputs, outputs in reversed(units):
            start = clock.mark()
            with store.keep(piece) if store is not None else nullcontext():
                gradients = _backward(inputs, outputs, gradients)
            marks.append(((piece.kind, "I" if split else "B"), start, clock.mark()))
        del outputs, inputs, state
        while units and store is not None:
            piece, *_ = units.pop()
            start = clock.mark()
            store.compute(piece)
            marks.append(((piece.kind, "W"), start, clock.mark()))
        for key, start, end in marks:
            yield key, clock.seconds(start, end)


class MeasuredLayers(NamedTuple):
    """A measurement of the model's first layer, the times of all layers' pieces, and the tokens of each expert."""

    first: Measurement
    chunks: tuple[MeasuredChunk, ...]
    expert_loads: tuple[tuple[float, ...], ...]


def measured_layers(task: Task, group: Any) -> MeasuredLayers:
    """Measure layers that differ, one after the other."""
    unlike = list(dict.fromkeys(task.model.kinds_of(task.model.layers)))
    first = Measurement(task, group, unlike[0], (0, len(unlike)))
    chunks, loads = first.run(), first.expert_loads()
    for number, layer in enumerate(unlike[1:], 1):
        further = Measurement(task, group, layer, (number, len(unlike)))
        more = further.run()
        loads += further.expert_loads()
        chunks = tuple(
            replace(own, pieces={**other.pieces, **own.pieces}) for own, other in zip(chunks, more, strict=True)
        )
    return MeasuredLayers(first, chunks, loads)


def _linear_calls(model: torch.nn.Module) -> dict[Any, Any]:
    """Return the function that each linear layer calls in place of its class's, or None: with a whole backward, or one
    that defers the weight gradients."""
    linear = (module for module in model.modules() if hasattr(module, "_forward_impl"))
    return {module: module.__dict__.get("_forward_impl") for module in linear}


def _program(row: MicrobatchShape, layers: Layers, split: bool) -> Program:
    """Return the program of a whole model of `layers` on one rank: microbatches of one chunk with two in flight, F0 F1
    B0 F2 B1 F3 B2 B3; of several chunks all forwards and, in reverse, all backwards.
    """
    backward, many = "IW" if split else "B", len(row.chunks)
    if many > 1:
        order = [Op("F", 0, 0, chunk) for chunk in range(many)]
        order += [Op(kind, 0, 0, chunk) for chunk in reversed(range(many)) for kind in backward]
    else:
        order = [Op("F", 0, 0)]
        for microbatch in range(MICROBATCHES):
            if microbatch + 1 < MICROBATCHES:
                order.append(Op("F", 0, microbatch + 1))
            order += [Op(kind, 0, microbatch) for kind in backward]
    workload = uniform(1 if many > 1 else MICROBATCHES, many, row.chunks)
    return Program("profile", (Stage(model_pieces(layers)),), (tuple(order),), workload)


def _backward(
    inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Backward of one piece; a residual that passes through takes its gradient along, at no cost."""
    passed = [next((i for i, tensor in enumerate(inputs) if tensor is output), -1) for output in outputs]
    own = [index for index, source in enumerate(passed) if source < 0]
    Variable._execution_engine.run_backward(
        tuple(outputs[index] for index in own),
        tuple(gradients[index] for index in own),
        False,  # keep_graph
        False,  # create_graph
        (),  # inputs: all leaves
        allow_unreachable=True,
        accumulate_grad=True,
    )
    result = [tensor.grad for tensor in inputs]
    for source, gradient in zip(passed, gradients, strict=True):
        if source >= 0:
            mine = result[source]
            result[source] = gradient if mine is None else mine + gradient
    return tuple(gradient for gradient in result if gradient is not None)


def _whole_times(row: MicrobatchShape, samples: dict[str, Samples], layer: LayerKinds) -> MeasuredChunk:
    """Return the times of a whole sequence. samples: by op kind."""
    scaled = {kind: scale_to_whole_units(samples[kind], kind, layer) for kind in "FIWB"}
    scaled["R"] = scaled["F"]
    pieces = {piece: {kind: times[piece] for kind, (times, _) in scaled.items()} for piece in ("embed", *layer, "head")}
    return MeasuredChunk(row.tokens, 0, pieces, {kind: overhead for kind, (_, overhead) in scaled.items()})


def _chunk_times(
    row: MicrobatchShape, samples: dict[str, Samples], whole: MeasuredChunks, layer: LayerKinds
) -> list[MeasuredChunk]:
    """Return the times of each chunk, for a row of several chunks or of several documents."""
    chunks = []
    (core,) = (piece for piece in layer if role_of(piece) == "attn")
    for number, tokens in enumerate(row.chunks):
        known = whole.times(Chunk(tokens))
        attention = {}
        for kind in "FIWB":
            others = sum(known.pieces[piece][kind] for piece in layer if piece != core)
            attention[kind] = max(_layer(samples[kind], kind, number) - others, 0.0)
        attention["R"] = attention["F"]
        pieces = {**known.pieces, core: attention}
        chunks.append(MeasuredChunk(tokens, sum(row.chunks[:number]), pieces, known.overhead, row.documents))
    return chunks


def _layer(samples: Samples, kind: str, chunk: int) -> float:
    """Return the time that a further layer adds to a whole unit."""
    short, long = (statistics.median(samples[f"{name} {chunk}", kind]) for name in ("short", "long"))
    return (long - short) / (LONG - SHORT)


def scale_to_whole_units(
    samples: Samples, kind: str, layer: LayerKinds = LAYER_PIECES
) -> tuple[dict[str, float], float]:
    """Return (seconds by piece, overhead of an op): pieces of a layer add up to what a further layer costs a whole
    unit.
    """
    alone = {piece: statistics.median(samples[piece, kind]) for piece in ("embed", *layer, "head")}
    further, together = _layer(samples, kind, 0), sum(alone[piece] for piece in layer)
    scale = further / together if further > 0 and together > 0 else 1.0
    scaled = {piece: seconds * (scale if piece in layer else 1.0) for piece, seconds in alone.items()}
    rest = statistics.median(samples["short 0", kind]) - sum(scaled.values())
    return scaled, max(rest - (SHORT - 1) * further, 0.0)
