"""Ops in steps on a clock: what runs while their collectives are under way.

Kernels run in the order of the steps on one stream, collectives in that order on another; a step waits for the
collective that ended the one before it of its run. In the backward a column-parallel layer gathers its input again
beside the input gradient's product, and sums input gradients from then on, beside the weight gradient's. A ring passes
keys and values on beside the attention of a round, and in the backward their gradients beside the next one's. An
exchange of tokens with experts is waited for when shared experts have run as well. Collectives that are hidden slow
down what they run beside (`Hardware.interference`).

Not counted: launching more kernels, as launching any.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from typing import NamedTuple

from helixpipe.costs.context_parallel import block, sent
from helixpipe.costs.expert_kind import sent_to_experts
from helixpipe.costs.models import Chunk, Layout, ModelShape
from helixpipe.costs.piece_kinds import steps, work
from helixpipe.costs.sizes import ARRIVED, COLUMN, ROW, SENT, TO_HEADS, TO_ROWS, ChunkSizes, Kernel, exchanged
from helixpipe.program.stages import role_of

Seconds = Callable[[Kernel], float]


class StepTimes(NamedTuple):
    """Seconds of the kernels between two ends of steps. gradients: of I but for its matrix products. message: of a ring
    whose rounds they are, one rank's keys and values."""

    forward: float = 0.0
    gradients: float = 0.0
    products: float = 0.0
    weights: float = 0.0
    message: float = 0.0

    def then(self, other: StepTimes) -> StepTimes:
        return StepTimes(*(own + more for own, more in zip(self, other, strict=True)))


Chain = tuple[list[StepTimes], list[str]]
"""Steps, and what ends each but the last."""


class Streams:
    """One stream of kernels and one of collectives. now: of kernels; idle: they waited; sent: collectives took."""

    def __init__(self) -> None:
        self.now = self.idle = self.sent = self._free = 0.0

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def start(self, seconds: float) -> float:
        """A collective; returns when it ends."""
        if not seconds:
            return 0.0
        self.sent += seconds
        self._free = max(self._free, self.now) + seconds
        return self._free

    def wait(self, end: float) -> None:
        self.idle += max(end - self.now, 0.0)
        self.now = max(end, self.now)

    def taken(self, interference: float) -> float:
        """The time until now, with what hidden collectives slow down."""
        return self.now + interference * (self.sent - self.idle)


class SteppedPieces:
    """Pieces of layers on a chunk, or on half of one, in steps. seconds: of a kernel alone. half: of which the chunk is
    given as `whole`; pieces that halves do not run apart are then in the first one's step, when both have come to them.
    """

    def __init__(
        self, model: ModelShape, layout: Layout, chunk: Chunk, seconds: Seconds, half: int | None = None,
        whole: Chunk | None = None,
    ):  # fmt: skip
        self._model, self.layout, self._chunk, self._seconds = model, layout, chunk, seconds
        self._half, self._whole = half, whole or chunk
        self._pieces: dict[str, Chain] = {}
        self._swaps: dict[str, float] = {}

    def chain(self, kinds: Sequence[str]) -> Chain:
        chain, ends = [StepTimes()], list[str]()
        for kind in kinds:
            if kind not in self._pieces:
                self._pieces[kind] = self._at_once(kind) if self._is_at_once(kind) else self._in_steps(kind)
            (first, *others), of_piece = self._pieces[kind]
            chain[-1] = chain[-1].then(first)
            chain += others
            ends += of_piece
        return chain, ends

    def _is_at_once(self, kind: str) -> bool:
        if role_of(kind) == "mlp":
            return self.layout.mlp_chunk > 0
        return role_of(kind) == "attn" and self.layout.rings and self._half is not None

    def forward(self, chain: Chain, clock: Streams) -> Generator[None, None, None]:
        under_way = 0.0
        for step, end in zip(chain[0], (*chain[1], None), strict=True):
            if end != ARRIVED:
                clock.wait(under_way)
            if step.message:
                yield from self._ring_forward(step, clock)
            else:
                clock.compute(step.forward)
            if end not in (None, ARRIVED):
                under_way = clock.start(self._sum if end == ROW else self._mirrored(end))
            if end not in (None, SENT):
                yield

    def _ring_forward(self, step: StepTimes, clock: Streams) -> Generator[None, None, None]:
        rounds = self.layout.context_parallel
        for number in range(rounds):
            passing = clock.start(step.message if number + 1 < rounds else 0.0)
            clock.compute(step.forward / rounds)
            if passing:
                yield
                clock.wait(passing)

    def backward(self, chain: Chain, clock: Streams, whole: bool) -> Generator[None, None, None]:
        """whole: with weight gradients."""
        under_way = 0.0
        for step, begins in zip(reversed(chain[0]), (*reversed(chain[1]), None), strict=True):
            weights = step.weights if whole else 0.0
            if begins != SENT:
                clock.wait(under_way)
            if step.message:
                yield from self._ring_backward(step, clock)
            else:
                clock.compute(step.gradients)
            if begins == COLUMN:
                again = clock.start(self._gather)
                clock.compute(step.products)
                under_way = clock.start(self._sum)
                clock.wait(again)
                clock.compute(weights)
            else:
                clock.compute(step.products + weights)
                if begins != SENT:
                    under_way = clock.start(self._gather if begins == ROW else self._mirrored(begins))
            if begins not in (None, ARRIVED):
                yield

    def _ring_backward(self, step: StepTimes, clock: Streams) -> Generator[None, None, None]:
        rounds, passed = self.layout.context_parallel, 0.0
        for number in range(rounds):
            passing = clock.start(step.message if number + 1 < rounds else 0.0)
            clock.compute(step.gradients / rounds)
            if passing:
                yield
            clock.wait(passing)
            clock.wait(passed)
            passed = clock.start(step.message)
        yield
        clock.wait(passed)

    @cached_property
    def _exchange(self) -> float:
        """Of the chunk's tokens with the experts' ranks."""
        moved = sent_to_experts(self._sizes)
        return self._seconds(Kernel("experts", 0.0, moved)) if moved else 0.0

    @cached_property
    def _gather(self) -> float:
        return self._collective("gather")

    @cached_property
    def _sum(self) -> float:
        return self._collective("scatter")

    def _mirrored(self, end: str | None) -> float:
        """Of a swap, of an exchange with experts, or of the gather before a column-parallel layer, whose backward
        starts another collective there; nothing where a step ends for none."""
        if end in (SENT, ARRIVED):
            return self._exchange
        if end in (TO_HEADS, TO_ROWS):
            if end not in self._swaps:
                self._swaps[end] = self._seconds(Kernel("all-to-all", 0.0, sent(self._sizes, end)))
            return self._swaps[end]
        return self._gather if end == COLUMN else 0.0

    def _collective(self, which: str) -> float:
        """Of the chunk's tokens; nothing if there is none."""
        moved = exchanged(self._sizes, which)
        return self._seconds(Kernel("network", 0.0, moved)) if moved else 0.0

    @property
    def _sizes(self) -> ChunkSizes:
        return ChunkSizes(self._model, self.layout, self._chunk)

    def _in_steps(self, kind: str) -> Chain:
        halved = self._half is not None
        of_op = {op: steps(self._model, self.layout, kind, op, self._chunk, halved) for op in "FIW"}
        lists = zip(*(of_op[op][0] for op in "FIW"), strict=True)
        times = [self._step(*kernels) for kernels in lists]
        if role_of(kind) == "attn" and self.layout.rings:
            messages = self.layout.context_parallel - 1
            ring = Kernel("ring", 0.0, messages * block(self._sizes))  # in one, as `off` has it
            times[1] = times[1]._replace(message=self._seconds(ring) / messages)
        return times, of_op["F"][1]

    def _at_once(self, kind: str) -> Chain:
        """A piece whose collectives nothing runs beside."""
        once = self._step(*(work(self._model, self.layout, kind, op, self._whole) for op in "FIW"))
        if self._half is not None:  # in the first half's step, when both have come to it
            return [StepTimes(), StepTimes(), StepTimes() if self._half else once], ["", ""]
        return [once], []

    def _step(self, forward: list[Kernel], inputs: list[Kernel], weights: list[Kernel]) -> StepTimes:
        products = [kernel for kernel in inputs if kernel.kind == "matmul"]
        others = [kernel for kernel in inputs if kernel.kind != "matmul"]
        return StepTimes(*(sum(map(self._seconds, each)) for each in (forward, others, products, weights)))
