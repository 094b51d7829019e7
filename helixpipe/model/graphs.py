"""CUDA graphs of the pieces whose kernels depend on a chunk's length alone, so that the host issues them with one call.

`norm`, `qkv`, `proj` and `mlp` are captured in runs, as they lie between two core attentions; attention, whose keys and
values have other addresses in each microbatch, and what communicates, draws random numbers or chooses shapes by data
(`why_not`) run as ever. A run is known by its pieces, the first token of its chunk (which its rotations depend on), and
the shapes and type of its inputs. It runs eagerly until it has been seen `OFTEN` times and, measured then, the device
has waited for the host.

Several units are in flight at once, and what a captured forward saves lies in the graph's own memory. So a run has
a slot for each unit in flight: a forward and a backward with memory of their own, taken by a forward, given back by the
backward of the same unit, and captured when none is free. As many are made as are ever in flight, which is what the
same units would have kept. Inputs are copied into a slot, since the graph has their addresses.

Memory. Graphs that are replayed in whatever order must not share what one of them leaves until another has run. What
a forward leaves (what it saves, its outputs) is needed until its backward, so each forward has a pool. What a backward
leaves is copied before the next one is replayed: by the run before it as the gradients of its outputs, or here, where
the gradient leaves the unit; so all backwards share one pool, and memory for what they take and leave. What a
unit gives is copied, too: a message may still read it when the slot is taken again. Gradients of weights are added to
`main_grad` by the captured kernels; hooks of parameters do not see them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from helixpipe.costs.models import OFF
from helixpipe.model.device import device
from helixpipe.model.linear import add_gradient
from helixpipe.model.options import GPTOptions, State
from helixpipe.program.graphs import runs
from helixpipe.program.stages import Piece

OFTEN = 4
"""How many times a run is seen before it is measured and captured: what comes once or twice is not worth its graphs."""

STEPS_KEPT = 16
"""Steps after which a run that has not come again is forgotten, as after a switch to another plan."""

MOST_RUNS = 1024
"""Runs that are looked at: those of 32 layers in as many chunks. Further ones stay eager."""

RunPieces = Callable[[Sequence[Piece], State], State]
Result = TypeVar("Result")


class Engine(Protocol):
    """What captures and replays: CUDA's, or in tests a recorder on the CPU."""

    def pool(self) -> Any:
        """Return memory for graphs."""
        ...

    def capture(self, function: Callable[[], Result], pool: Any) -> tuple[Callable[[], None], Result]:
        """Return a replay of what `function` enqueues, and what it returns, whose values come with each replay."""
        ...

    def timed(self, function: Callable[[], Result]) -> tuple[Result, Callable[[], bool | None]]:
        """Run a function; what is returned beside its result says later whether the host took at least as long as the
        device, None: not known yet."""
        ...


class CudaEngine:
    """CUDA graphs by torch. All are captured on one stream and replayed on the current one."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], Result], pool: Any) -> tuple[Callable[[], None], Result]:
        graph = torch.cuda.CUDAGraph()
        # Only of this thread: others, which watch messages, may go on asking the driver.
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            result = function()
        return graph.replay, result

    def timed(self, function: Callable[[], Result]) -> tuple[Result, Callable[[], bool | None]]:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start = time.perf_counter()  # around both records: a device without time of its own never takes longer
        first.record()
        result = function()
        last.record()
        milliseconds = 1000.0 * (time.perf_counter() - start)

        def held_up_by_host() -> bool | None:
            """Where the device waits for each kernel, both take equally long."""
            return first.elapsed_time(last) <= 1.1 * milliseconds if last.query() else None

        return result, held_up_by_host


class _GraphSlot:
    """A run's graphs and memory for one unit in flight.

    reads: how many of the inputs are read. outputs: where a replayed forward leaves them, but for those that are
    inputs; passing: of each output the number of the input that it is, or None. gradients, input_gradients: where its
    backward finds those of the outputs and leaves those of the inputs.
    """

    def __init__(self, graphs: Graphs, run: Callable[[State], State], state: State, weights: Sequence[Any], reads: int):
        engine, self._reads = graphs.engine, reads
        self.inputs = tuple(
            torch.empty_like(each, memory_format=torch.contiguous_format)
            if number < reads
            else each.new_empty(1).expand(each.shape)
            for number, each in enumerate(state)
        )
        for each in self.inputs:
            each.requires_grad_()
        self._forward, made = engine.capture(lambda: run(self.inputs), engine.pool())
        numbers = {id(each): number for number, each in enumerate(self.inputs)}
        self.passing = tuple(numbers.get(id(each)) for each in made)
        self.outputs = made
        self.gradients = tuple(graphs.memory("output", number, each) for number, each in enumerate(made))

        self.input_gradients = tuple(graphs.memory("input", number, each) for number, each in enumerate(self.inputs))

        def backward() -> None:
            leaves = [*self.inputs, *weights]
            found: Any = torch.autograd.grad(made, leaves, self.gradients, retain_graph=True, allow_unused=True)
            for own, gradient in zip(self.input_gradients, found, strict=False):
                own.copy_(gradient)
            for weight, gradient in zip(weights, found[len(self.inputs) :], strict=True):
                if gradient is not None and not getattr(weight, "grad_added_to_main_grad", False):
                    add_gradient(weight, gradient)

        self._backward, _ = engine.capture(backward, graphs.backward_pool)

    def forward(self, state: State, copied: bool) -> State:
        """Replay the forward for a unit's inputs; an output that is an input is the tensor given. copied: whether the
        others are copied out of the slot."""
        for own, given in zip(self.inputs[: self._reads], state, strict=False):
            own.data.copy_(given)
        self._forward()
        return tuple(
            state[number] if number is not None else each.detach().clone() if copied else each.detach()
            for number, each in zip(self.passing, self.outputs, strict=True)
        )

    def backward(self, gradients: Sequence[Tensor]) -> State:
        for own, given in zip(self.gradients, gradients, strict=True):
            own.copy_(given)
        self._backward()
        return self.input_gradients


class _Replayed(torch.autograd.Function):
    """A run of a unit by the graphs of a slot. An input that is an output as well gets that one's gradient here: none
    may wait in autograd while another backward is replayed."""

    @staticmethod
    def forward(ctx: Any, slot: _GraphSlot, free: list[_GraphSlot], ends: bool, *state: Tensor) -> State:
        ctx.slot, ctx.free, ctx.leaving = slot, free, [each.is_leaf for each in state]
        return slot.forward(state, copied=ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        own = ctx.slot.backward(gradients)
        ctx.free.append(ctx.slot)
        given = (each.clone() if leaves else each.detach() for each, leaves in zip(own, ctx.leaving, strict=True))
        return None, None, None, *given


@dataclass
class _CapturedRun:
    """What is known of a run. first: the step it was seen in first, in which nothing is captured: kernels of its
    backward have been loaded then. last: the last one. held_up: the answer of `Engine.timed`, once it has been timed;
    captured: whether it is, None: not decided yet. weights: of its pieces, addresses: of their data and gradients."""

    first: int
    last: int = 0
    seen: int = 0
    held_up: Callable[[], bool | None] | None = None
    captured: bool | None = None
    weights: Sequence[Any] = ()
    addresses: list[int] = field(default_factory=list)
    slots: list[_GraphSlot] = field(default_factory=list)
    free: list[_GraphSlot] = field(default_factory=list)


class Graphs:
    """The graphs of a model on one rank. weights_of: its weights of some pieces. often: see `OFTEN`. earlier: steps
    that a run is seen in before it is captured."""

    def __init__(
        self,
        engine: Engine,
        weights_of: Callable[[Sequence[Piece]], Sequence[Any]],
        often: int = OFTEN,
        earlier: int = 1,
    ):
        self.engine, self._weights_of, self._often, self._earlier = engine, weights_of, often, earlier
        self.backward_pool = engine.pool()
        self._runs: dict[tuple[Any, ...], _CapturedRun] = {}
        self._gradients: dict[tuple[Any, ...], Tensor] = {}
        self._step = 0

    def begin(self) -> None:
        """Begin a step: no unit is in flight. Graphs of weights that have moved, and of runs that come no more, are
        forgotten."""
        self._step += 1
        for key, run in list(self._runs.items()):
            moved = run.slots and _addresses(run.weights) != run.addresses
            if moved or self._step - run.last > STEPS_KEPT:
                del self._runs[key]
            run.free = list(run.slots)

    @property
    def slots(self) -> int:
        """Units for which there are graphs, run by run."""
        return sum(len(run.slots) for run in self._runs.values())

    def run(self, pieces: Sequence[Piece], state: State, offset: int, run: RunPieces) -> State:
        """Run pieces of layers on a chunk that begins at token `offset`. run: runs some of them as they are."""
        if not torch.is_grad_enabled():  # an evaluation, or what is recomputed
            return run(pieces, state)
        for captured, own in runs(pieces):
            ends = own[-1] == pieces[-1]
            state = self._run(own, state, offset, partial(run, own), ends) if captured else run(own, state)
        return state

    def _run(
        self, pieces: tuple[Piece, ...], state: State, offset: int, eagerly: Callable[[State], State], ends: bool
    ) -> State:
        """Run what is captured together. ends: whether others get what it gives."""
        if not any(each.requires_grad for each in state):  # autograd would not come back here for the weights
            return eagerly(state)
        key = pieces, offset, tuple((each.shape, each.dtype) for each in state)
        known = self._runs.get(key)
        if known is None:
            if len(self._runs) >= MOST_RUNS:
                return eagerly(state)
            known = self._runs[key] = _CapturedRun(self._step)
        known.last = self._step
        if known.captured is None:
            known.seen += 1
            if known.held_up is None:
                if known.seen < self._often or self._step < known.first + self._earlier:
                    return eagerly(state)
                result, known.held_up = self.engine.timed(lambda: eagerly(state))
                return result
            known.captured = known.held_up()
            if known.captured:
                known.weights = [each for each in self._weights_of(pieces) if each.requires_grad]
                known.captured = all(getattr(each, "main_grad", None) is not None for each in known.weights)
                known.addresses = _addresses(known.weights) if known.captured else []
        if not known.captured:
            return eagerly(state)
        if not known.free:
            # A residual passes by `qkv` unread: what is recomputed may be given one whose memory has gone.
            reads = len(state) - (pieces[0].role == "qkv")
            known.free.append(_GraphSlot(self, eagerly, state, known.weights, reads))
            known.slots.append(known.free[-1])
        replayed: State = _Replayed.apply(known.free.pop(), known.free, ends, *state)
        return replayed

    def memory(self, of: str, number: int, like: Tensor) -> Tensor:
        """Return memory for the gradient of a run's input or output, which all runs share: it is used while one of
        their backwards runs, and until the next."""
        key = of, number, like.shape, like.dtype
        if key not in self._gradients:
            self._gradients[key] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return self._gradients[key]


def _addresses(weights: Sequence[Any]) -> list[int]:
    return [address for each in weights for address in (each.data_ptr(), each.main_grad.data_ptr())]


def why_not(config: TransformerConfig, gpt: GPTOptions, ranks_inside: int) -> str:
    """Return why no piece of a model is captured; "" where some are. ranks_inside: tensor- and context-parallel."""
    reasons = (
        (gpt.cuda_graphs == OFF, "off"),
        (device().type != "cuda", "there is no GPU"),
        (ranks_inside > 1, "tensor- or context-parallel ranks communicate inside ops"),
        (config.hidden_dropout > 0, "--hidden-dropout draws random numbers"),
        (gpt.chunk_size > 0, "--chunk-size runs the MLP slice by slice"),
    )
    return next((reason for holds, reason in reasons if holds), "")


def make_graphs(
    config: TransformerConfig, gpt: GPTOptions, ranks_inside: int, weights_of: Callable[[Sequence[Piece]], list[Any]]
) -> Graphs | None:
    """Return the graphs of a model; None where it has none."""
    return None if why_not(config, gpt, ranks_inside) else Graphs(CudaEngine(), weights_of)
