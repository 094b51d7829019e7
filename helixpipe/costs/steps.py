"""Ops in steps on a clock: what runs while their collectives are under way.

Kernels run in the order of the steps on one stream, collectives in that order on another; a step waits for the
collective that ended the one before it of its run. In the backward a column-parallel layer gathers its input again
beside the input gradient's product, and sums input gradients from then on, beside the weight gradient's. Collectives
that are hidden slow down what they run beside (`Hardware.interference`).

Not counted: launching more kernels, as launching any.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from typing import NamedTuple

from helixpipe.costs.models import Chunk, Layout, ModelShape
from helixpipe.costs.piece_kinds import steps, work
from helixpipe.costs.sizes import COLUMN, ROW, ChunkSizes, Kernel, exchanged
from helixpipe.program.stages import role_of

Seconds = Callable[[Kernel], float]


class StepTimes(NamedTuple):
    """Seconds of the kernels between two ends of steps. gradients: of I but for its matrix products."""

    forward: float = 0.0
    gradients: float = 0.0
    products: float = 0.0
    weights: float = 0.0

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
        self._model, self._layout, self._chunk, self._seconds = model, layout, chunk, seconds
        self._half, self._whole = half, whole or chunk
        self._pieces: dict[str, Chain] = {}

    def chain(self, kinds: Sequence[str]) -> Chain:
        chain, ends = [StepTimes()], list[str]()
        for kind in kinds:
            if kind not in self._pieces:
                at_once = self._layout.mlp_chunk if role_of(kind) == "mlp" else self._layout.context_parallel > 1
                apart = role_of(kind) not in ("mlp", "attn") or not at_once
                self._pieces[kind] = self._in_steps(kind) if apart else self._at_once(kind)
            (first, *others), of_piece = self._pieces[kind]
            chain[-1] = chain[-1].then(first)
            chain += others
            ends += of_piece
        return chain, ends

    def forward(self, chain: Chain, clock: Streams) -> Generator[None, None, None]:
        under_way = 0.0
        for step, end in zip(chain[0], (*chain[1], None), strict=True):
            clock.wait(under_way)
            clock.compute(step.forward)
            if end is not None:
                under_way = clock.start({COLUMN: self._gather, ROW: self._sum}.get(end, 0.0))
                yield

    def backward(self, chain: Chain, clock: Streams, whole: bool) -> Generator[None, None, None]:
        """whole: with weight gradients."""
        under_way = 0.0
        for step, begins in zip(reversed(chain[0]), (*reversed(chain[1]), None), strict=True):
            weights = step.weights if whole else 0.0
            clock.wait(under_way)
            clock.compute(step.gradients)
            if begins == COLUMN:
                again = clock.start(self._gather)
                clock.compute(step.products)
                under_way = clock.start(self._sum)
                clock.wait(again)
                clock.compute(weights)
            else:
                clock.compute(step.products + weights)
                under_way = clock.start(self._gather if begins == ROW else 0.0)
            if begins is not None:
                yield

    @cached_property
    def _gather(self) -> float:
        return self._collective("gather")

    @cached_property
    def _sum(self) -> float:
        return self._collective("scatter")

    def _collective(self, which: str) -> float:
        """Of the chunk's tokens; nothing if there is none."""
        moved = exchanged(ChunkSizes(self._model, self._layout, self._chunk), which)
        return self._seconds(Kernel("network", 0.0, moved)) if moved else 0.0

    def _in_steps(self, kind: str) -> Chain:
        halved = self._half is not None
        of_op = {op: steps(self._model, self._layout, kind, op, self._chunk, halved) for op in "FIW"}
        lists = zip(*(of_op[op][0] for op in "FIW"), strict=True)
        return [self._step(*kernels) for kernels in lists], of_op["F"][1]

    def _at_once(self, kind: str) -> Chain:
        """A piece whose collectives nothing runs beside."""
        once = self._step(*(work(self._model, self._layout, kind, op, self._whole) for op in "FIW"))
        if self._half is not None:  # in the first half's step, when both have come to it
            return [StepTimes(), StepTimes(), StepTimes() if self._half else once], ["", ""]
        return ([once, StepTimes()], [""]) if role_of(kind) == "attn" else ([once], [])

    def _step(self, forward: list[Kernel], inputs: list[Kernel], weights: list[Kernel]) -> StepTimes:
        products = [kernel for kernel in inputs if kernel.kind == "matmul"]
        others = [kernel for kernel in inputs if kernel.kind != "matmul"]
        return StepTimes(*(sum(map(self._seconds, each)) for each in (forward, others, products, weights)))
