"""Time of an op over two halves of its tokens, one of which computes while the other's ranks communicate.

What `helixpipe/model/halves.py` does, on a clock (`steps.py`): the second half follows the first, in the backward the
first the second.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from helixpipe.common.alternate import alternate
from helixpipe.costs.models import Chunk, Layout, ModelShape
from helixpipe.costs.sizes import ChunkSizes, Kernel
from helixpipe.costs.steps import Seconds, SteppedPieces, Streams
from helixpipe.program.stages import LAYER_PIECES, Piece
from helixpipe.program.workload import Extent, Extents


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


class HalvedTimes:
    """Times of ops on one chunk. seconds: of a kernel alone. interference: the share of a hidden collective's time for
    which it holds up kernels."""

    def __init__(self, model: ModelShape, layout: Layout, chunk: Chunk, seconds: Seconds, interference: float):
        self._behind = steps_behind(layout.tensor_parallel)
        self._interference, halves = interference, enumerate(halves_of(chunk))
        self._halves = tuple(SteppedPieces(model, layout, half, seconds, which, chunk) for which, half in halves)
        # What leaves a run is joined, and so is the gradient of what enters it.
        joined = Kernel("memory", 0.0, 2 * ChunkSizes(model, layout, chunk).bytes("hidden"))
        self._joining = seconds(joined)
        self._known: dict[tuple[tuple[str, ...], str], float] = {}

    def time(self, kinds: tuple[str, ...], op: str) -> float:
        """Of an op of kind F, R, I, W or B on consecutive pieces of layers."""
        key = kinds, op
        if key not in self._known:
            self._known[key] = self._time(kinds, op)
        return self._known[key]

    def _time(self, kinds: tuple[str, ...], op: str) -> float:
        (first, of_first), (second, of_second) = ((half, half.chain(kinds)) for half in self._halves)
        if op == "W":
            return sum(step.weights for chain in (of_first, of_second) for step in chain[0])
        clock, whole = Streams(), op == "B"
        if op in "FR":
            alternate(first.forward(of_first, clock), second.forward(of_second, clock), self._behind)
        else:
            backwards = second.backward(of_second, clock, whole), first.backward(of_first, clock, whole)
            alternate(*backwards, self._behind)
        return clock.taken(self._interference) + self._joining


def halves_of(chunk: Chunk) -> tuple[Chunk, Chunk]:
    """The first and the second half of a chunk's tokens; the second comes after the first."""
    parts = chunk.slices or (Extent(chunk.tokens, chunk.earlier, chunk.stored),)
    halves: tuple[list[Extent], list[Extent]] = ([], [])
    left = chunk.tokens / 2
    for part in parts:
        first = min(part.tokens, left)
        left -= first
        if first > 0:
            halves[0].append(part._replace(tokens=first))
        if part.tokens > first:
            halves[1].append(part._replace(tokens=part.tokens - first, earlier=part.earlier + first))
    first_half, second_half = (_chunk(tuple(each), chunk) for each in halves)
    return first_half, second_half


def _chunk(slices: Extents, like: Chunk) -> Chunk:
    tokens, earlier = sum(part.tokens for part in slices), sum(part.earlier for part in slices)
    return Chunk(tokens, earlier, like.stored, slices if len(slices) > 1 else (), like.window)


def steps_behind(tensor_parallel: int) -> int:
    """Steps of the first half of an op's tokens that the second half waits for. Tensor-parallel ranks gather after a
    norm, which is short, so that the other half is to be at a product; ranks that only swap rows for heads do so after
    products."""
    return min(tensor_parallel - 1, 1)
