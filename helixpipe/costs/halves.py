"""Time of an op over two halves of its tokens, one of which computes while the other's ranks communicate.

What `helixpipe/model/halves.py` does, on a clock: the second half is one step behind the first, in the backward the
first behind the second. Kernels run in the order of the steps on one stream, collectives in that order on another; a
step waits for the collective that ended the one before it of its half. In the backward a column-parallel layer gathers
its input again beside the input gradient's product, and sums input gradients from then on, beside the weight
gradient's. Collectives that are hidden slow down what they run beside (`Hardware.interference`).

Not counted: launching twice as many kernels, as launching any.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from functools import cached_property
from typing import NamedTuple

from helixpipe.common.alternate import alternate
from helixpipe.costs.models import Chunk, Layout, ModelShape, halves_of
from helixpipe.costs.piece_kinds import steps, work
from helixpipe.costs.sizes import COLUMN, ROW, ChunkSizes, Kernel, exchanged
from helixpipe.program.stages import LAYER_PIECES, Piece, role_of

Seconds = Callable[[Kernel], float]


def consecutive(pieces: Sequence[Piece], starts: Collection[Piece] = ()) -> list[tuple[str, ...]]:
    """The kinds of each run of pieces that follow one another in the model. starts: pieces that begin a run in any
    case."""
    runs: list[list[str]] = []
    before: int | None = None
    for piece in pieces:
        place = piece.layer * len(LAYER_PIECES) + LAYER_PIECES.index(piece.role)
        if before is None or place != before + 1 or piece in starts:
            runs.append([])
        runs[-1].append(piece.kind)
        before = place
    return [tuple(run) for run in runs]


class _StepTimes(NamedTuple):
    """Seconds of a half's kernels between two ends of steps. gradients: of I but for its matrix products."""

    forward: float = 0.0
    gradients: float = 0.0
    products: float = 0.0
    weights: float = 0.0

    def then(self, other: _StepTimes) -> _StepTimes:
        return _StepTimes(*(own + more for own, more in zip(self, other, strict=True)))


_Chain = tuple[list[_StepTimes], list[str]]
"""Steps, and what ends each but the last."""


class HalvedTimes:
    """Times of ops on one chunk. seconds: of a kernel alone. interference: the share of a hidden collective's time for
    which it holds up kernels."""

    def __init__(self, model: ModelShape, layout: Layout, chunk: Chunk, seconds: Seconds, interference: float):
        self._model, self._layout, self._chunk = model, layout, chunk
        self._seconds, self._interference = seconds, interference
        self._pieces: dict[tuple[str, int], _Chain] = {}
        self._known: dict[tuple[tuple[str, ...], str], float] = {}

    def time(self, kinds: tuple[str, ...], op: str) -> float:
        """Of an op of kind F, R, I, W or B on consecutive pieces of layers."""
        key = kinds, op
        if key not in self._known:
            self._known[key] = self._time(kinds, op)
        return self._known[key]

    def _time(self, kinds: tuple[str, ...], op: str) -> float:
        first, second = (self._chain(kinds, half) for half in (0, 1))
        if op == "W":
            return sum(step.weights for chain in (first, second) for step in chain[0])
        clock = _Streams()
        if op in "FR":
            alternate(self._forward(first, clock), self._forward(second, clock))
        else:
            alternate(self._backward(second, clock, op == "B"), self._backward(first, clock, op == "B"))
        # What leaves the run is joined, and so is the gradient of what enters it.
        joined = Kernel("memory", 0.0, 2 * ChunkSizes(self._model, self._layout, self._chunk).bytes("hidden"))
        return clock.now + self._interference * (clock.sent - clock.idle) + self._seconds(joined)

    def _forward(self, chain: _Chain, clock: _Streams) -> Generator[None, None, None]:
        under_way = 0.0
        for step, end in zip(chain[0], (*chain[1], None), strict=True):
            clock.wait(under_way)
            clock.compute(step.forward)
            if end is not None:
                under_way = clock.start({COLUMN: self._gather, ROW: self._sum}.get(end, 0.0))
                yield

    def _backward(self, chain: _Chain, clock: _Streams, whole: bool) -> Generator[None, None, None]:
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
        """Of half the tokens; nothing if there is none."""
        moved = exchanged(ChunkSizes(self._model, self._layout, self._halves[0]), which)
        return self._seconds(Kernel("network", 0.0, moved)) if moved else 0.0

    @cached_property
    def _halves(self) -> tuple[Chunk, Chunk]:
        return halves_of(self._chunk)

    def _chain(self, kinds: Sequence[str], half: int) -> _Chain:
        chain, ends = [_StepTimes()], list[str]()
        for kind in kinds:
            if (kind, half) not in self._pieces:
                at_once = self._layout.mlp_chunk if role_of(kind) == "mlp" else self._layout.context_parallel > 1
                apart = role_of(kind) not in ("mlp", "attn") or not at_once
                self._pieces[kind, half] = self._of_half(kind, half) if apart else self._of_both(kind, half)
            (first, *others), of_piece = self._pieces[kind, half]
            chain[-1] = chain[-1].then(first)
            chain += others
            ends += of_piece
        return chain, ends

    def _of_half(self, kind: str, half: int) -> _Chain:
        of_op = {op: steps(self._model, self._layout, kind, op, self._halves[half]) for op in "FIW"}
        lists = zip(*(of_op[op][0] for op in "FIW"), strict=True)
        return [self._step(*kernels) for kernels in lists], of_op["F"][1]

    def _of_both(self, kind: str, half: int) -> _Chain:
        """A piece that is done for both halves at once, in the first one's step, when both have come to it."""
        kernels = [work(self._model, self._layout, kind, op, self._chunk) for op in "FIW"]
        return [_StepTimes(), _StepTimes(), _StepTimes() if half else self._step(*kernels)], ["", ""]

    def _step(self, forward: list[Kernel], inputs: list[Kernel], weights: list[Kernel]) -> _StepTimes:
        products = [kernel for kernel in inputs if kernel.kind == "matmul"]
        others = [kernel for kernel in inputs if kernel.kind != "matmul"]
        return _StepTimes(*(sum(map(self._seconds, each)) for each in (forward, others, products, weights)))


class _Streams:
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
