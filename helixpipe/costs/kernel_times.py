"""Times of pieces: the sums of their kernels' times, each found once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from helixpipe.common.bounded import FEW, BoundedDict
from helixpipe.costs.head_kinds import Head
from helixpipe.costs.lines import Lines
from helixpipe.costs.models import Chunk, Layout, ModelShape
from helixpipe.costs.piece_kinds import KINDS, work
from helixpipe.costs.sizes import Kernel


class KernelTimes:
    """Times of pieces of a model in a layout. kernel_time: of one kernel.

    by_tokens: kinds whose times lie on lines over a chunk's tokens: not those that work on slices of fixed lengths, nor
    a head with layers of its own.
    """

    def __init__(self, model: ModelShape, layout: Layout, kernel_time: Callable[[Kernel], float]):
        self.model, self.layout, self.kernel_time = model, layout, kernel_time
        sliced = layout.mlp_chunk or layout.loss_chunk
        self.by_tokens = frozenset(
            name
            for name, kind in KINDS.items()
            if kind.by_tokens and not sliced and not (model.further and isinstance(kind, Head))
        )
        # Schedules that search ask again and again.
        self._known: dict[tuple[str, str, Chunk, bool, int], float] = BoundedDict()
        self._lines: dict[tuple[str, str, bool, bool, int], Lines] = BoundedDict(FEW)

    def of(self, piece: str, op: str, chunk: Chunk, alone: bool, shares: int) -> float:
        """Return seconds; see `ModelCosts.piece_time`."""
        if piece in self.by_tokens:
            of_kind = (piece, op, chunk.stored, alone, shares)
            lines = self._lines.get(of_kind)
            if lines is None:
                lines = self._lines[of_kind] = Lines(partial(self._of_tokens, *of_kind))
            return lines(chunk.tokens)
        key = (piece, op, chunk, alone, shares)
        time = self._known.get(key)
        if time is None:
            time = self._known[key] = self._sum(piece, op, chunk, alone, shares)
        return time

    def _of_tokens(self, piece: str, op: str, stored: bool, alone: bool, shares: int, tokens: float) -> float:
        return self._sum(piece, op, Chunk(tokens, stored=stored), alone, shares)

    def _sum(self, piece: str, op: str, chunk: Chunk, alone: bool, shares: int) -> float:
        return sum(map(self.kernel_time, work(self.model, self.layout, piece, op, chunk, alone, shares)))
