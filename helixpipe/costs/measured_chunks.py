"""Times of any chunk from those of a few that were measured.

What a piece takes for a token depends on how many there are: launches, small products, reading the weights. So all but
core attention is interpolated between the measured lengths. Attention, which also depends on what comes before the
chunk and on how many documents are in it, is fitted: so much once, for each document, for each query, for each key
read, and for each query times the keys it sees, none of them negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from helixpipe.common.bounded import FEW, BoundedDict
from helixpipe.costs.models import Chunk
from helixpipe.program.program import OP_KINDS
from helixpipe.program.stages import WINDOWS, role_of
from helixpipe.program.workload import Extent


@dataclass(frozen=True)
class MeasuredChunk:
    """Seconds on one chunk: of each piece (`F`, `I`, `W`, `B` and `R` of it), and of an op beside its pieces.

    tokens, earlier: the chunk's place in the sequence; a whole sequence has none earlier. pieces: by piece kind, then
    op kind. overhead: by op kind. documents: how many there are in it, all equally long.
    """

    tokens: int
    earlier: int
    pieces: Mapping[str, Mapping[str, float]]
    overhead: Mapping[str, float]
    documents: int = 1

    @property
    def chunk(self) -> Chunk:
        if self.documents == 1:
            return Chunk(self.tokens, self.earlier)
        return Chunk(self.tokens, slices=(Extent(self.tokens / self.documents, 0.0),) * self.documents)


class MeasuredChunks:
    """The times of `chunks`, the first of them a whole sequence, and of any other chunk.

    One alone is scaled: attention to the queries times the keys they see, all else to the tokens. window: tokens that
    one sees where attention is to a window.
    """

    def __init__(self, chunks: Sequence[MeasuredChunk], window: int = 0):
        self.chunks, self._window = tuple(chunks), window
        self._known: dict[Chunk, MeasuredChunk] = BoundedDict(FEW)

    def times(self, chunk: Chunk) -> MeasuredChunk:
        """Return the measured times, where they were measured."""
        if chunk not in self._known:
            self._known[chunk] = self._measured(chunk) or self._found(chunk)
        return self._known[chunk]

    def _measured(self, chunk: Chunk) -> MeasuredChunk | None:
        place = round(chunk.tokens), round(chunk.earlier), 1
        same = (each for each in self.chunks if (each.tokens, each.earlier, each.documents) == place)
        return None if chunk.slices else next(same, None)

    def _found(self, chunk: Chunk) -> MeasuredChunk:
        first = self.chunks[0]
        pieces = {
            piece: {
                kind: self._attention(piece, kind, chunk)
                if role_of(piece) == "attn"
                else _between([(each.tokens, each.pieces[piece][kind]) for each in self._lengths], chunk.tokens)
                for kind in kinds
            }
            for piece, kinds in first.pieces.items()
        }
        overhead = {
            kind: _held([(each.tokens, each.overhead[kind]) for each in self._lengths], chunk.tokens)
            for kind in first.overhead
        }
        return MeasuredChunk(round(chunk.tokens), round(chunk.earlier), pieces, overhead)

    @cached_property
    def _lengths(self) -> list[MeasuredChunk]:
        """Return the chunks of one document with nothing before it, by length, or the first where there is none."""
        found = {each.tokens: each for each in reversed(self.chunks) if not each.earlier and each.documents == 1}
        return [found[tokens] for tokens in sorted(found)] or [self.chunks[0]]

    def _attention(self, piece: str, kind: str, chunk: Chunk) -> float:
        sizes = self._sizes(piece, chunk)
        return sum(weight * size for weight, size in zip(self._weights[piece, kind], sizes, strict=True))

    def _sizes(self, piece: str, chunk: Chunk) -> tuple[float, ...]:
        return _sizes(replace(chunk, window=self._window) if piece in WINDOWS else chunk)

    @cached_property
    def _weights(self) -> dict[tuple[str, str], tuple[float, ...]]:
        """Of each of `_sizes`, by kind of core attention and op kind."""
        pieces = [piece for piece in self.chunks[0].pieces if role_of(piece) == "attn"]
        return {(piece, kind): self._fit(piece, kind) for piece in pieces for kind in OP_KINDS}

    def _fit(self, piece: str, kind: str) -> tuple[float, ...]:
        """The weights that fit what was measured."""
        rows = [(self._sizes(piece, each.chunk), each.pieces[piece][kind]) for each in self.chunks]
        rows = [row for row in rows if row[1] > 0]
        count = len(_sizes(self.chunks[0].chunk))
        if len(rows) < 2:
            pairs = [(0.0,) * (count - 1) + (time / sizes[-1],) for sizes, time in rows]
            return pairs[0] if pairs else (0.0,) * count
        most = [max(sizes[column] for sizes, _ in rows) or 1.0 for column in range(count)]
        scaled = [[size / scale for size, scale in zip(sizes, most, strict=True)] for sizes, _ in rows]
        weights = _robust(scaled, [time for _, time in rows])
        return tuple(weight / scale for weight, scale in zip(weights, most, strict=True))


ROUNDS = 30
"""Of a robust fit, each with the errors of the one before."""

SMALL = 0.02
"""Relative error below which all count by their squares."""


def _robust(sizes: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """Non-negative weights of the sizes with the least sum of relative errors: a few times that are far off, as they
    are on a machine with other work, change little. The error is relative to the larger of time and fit, so that one
    that is too low counts like one that is too high."""
    from scipy.optimize import nnls

    trust = [1.0 / time for time in times]
    for _ in range(ROUNDS):
        scaled = [[size * by for size in row] for row, by in zip(sizes, trust, strict=True)]
        found, _ = nnls(scaled, [time * by for time, by in zip(times, trust, strict=True)])
        trust = []
        for row, time in zip(sizes, times, strict=True):
            fit = sum(float(weight) * size for weight, size in zip(found, row, strict=True))
            larger = max(fit, time)
            trust.append(1.0 / larger / max(abs(fit - time) / larger, SMALL) ** 0.5)
    return [float(weight) for weight in found]


def _sizes(chunk: Chunk) -> tuple[float, ...]:
    """Return what core attention's time is made of; the last are queries times the keys they see."""
    return 1.0, float(max(len(chunk.slices), 1)), chunk.tokens, chunk.seen, chunk.pairs


def _between(points: Sequence[tuple[int, float]], tokens: float) -> float:
    """The line through the two measured lengths around so many tokens; below and above all, through the nearest two,
    and not below proportional to the tokens there. One alone: in proportion."""
    if len(points) == 1:
        return points[0][1] * tokens / points[0][0]
    low, high = next((pair for pair in pairwise(points) if tokens <= pair[1][0]), points[-2:])
    slope = (high[1] - low[1]) / (high[0] - low[0])
    if tokens < low[0]:
        slope = min(max(slope, 0.0), low[1] / low[0])
    elif tokens > high[0]:
        low, slope = high, min(max(slope, 0.0), high[1] / high[0])
    return low[1] + slope * (tokens - low[0])


def _held(points: Sequence[tuple[int, float]], tokens: float) -> float:
    """The same for what does not grow with the tokens: beyond the measured lengths as at the nearest."""
    return _between(points, min(max(tokens, points[0][0]), points[-1][0])) if len(points) > 1 else points[0][1]
