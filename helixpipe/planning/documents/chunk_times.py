"""Looks up the time of chunks of documents in a cost model, and caches it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, floor, log2

from helixpipe.lowering.bound import stage_work
from helixpipe.program.costs import Costs
from helixpipe.program.stages import Stage
from helixpipe.program.workload import Extent, Extents

STEPS = 4
"""Lengths an octave between which what a document adds is on a line: the square in it is off by 0.4 %."""


class ChunkTimes:
    """Time of chunks, forward and backward of all `stages` (one stage that is the whole model, or one rank's), in the
    unit of the costs.

    costs are asked for the exact work, slices and the tokens before them, and each kind of work once: no formula is
    fitted to them. whole: tokens of a microbatch on average; only times given by hand, which are those of a whole
    microbatch, depend on it.
    """

    def __init__(self, costs: Costs, stages: Sequence[Stage], whole: float | None, usual: int = 8192):
        self.costs, self.stages, self.whole = costs, tuple(stages), whole
        self.usual = usual
        self._known: dict[tuple[tuple[int, int], ...], float] = {}
        self._documents: dict[int, float] = {}
        self._on_grid: dict[int, float] = {}
        self._alone: dict[int, float] = {}

    def of_slice(self, tokens: int, earlier: int = 0) -> float:
        """Return the time of a chunk of one slice that follows `earlier` tokens of its document."""
        return self.of_chunk(((tokens, earlier),))

    def of_chunk(self, slices: Iterable[tuple[int, int]]) -> float:
        """Return the time of a chunk of several slices, given as (tokens, earlier tokens) each."""
        parts = tuple(slices)
        if parts not in self._known:
            self._known[parts] = self._time(tuple(Extent(*part) for part in parts))
        return self._known[parts]

    def added(self, tokens: int, beside: int) -> float:
        """Return the time that a whole document adds to a chunk of `beside` tokens: less than its time alone, since
        reading weights and starting messages is paid once a chunk.
        """
        return self.of_chunk(((beside, 0), (tokens, 0))) - self.of_slice(beside)

    def of_document(self, tokens: int) -> float:
        """Return what a document adds to a chunk of usual size, estimated: on the line between `STEPS` lengths an
        octave, so that a batch's hundreds of lengths take few questions.
        """
        known = self._documents.get(tokens)
        if known is None:
            known = self._documents[tokens] = self._on_line(tokens)
        return known

    def _on_line(self, tokens: int) -> float:
        step = floor(log2(tokens) * STEPS)
        low, high = ceil(2 ** (step / STEPS)), ceil(2 ** ((step + 1) / STEPS))
        if tokens <= low or high - low <= 1:
            return self._of_grid(tokens)
        return self._of_grid(low) + (self._of_grid(high) - self._of_grid(low)) * (tokens - low) / (high - low)

    def _of_grid(self, tokens: int) -> float:
        if tokens not in self._on_grid:
            self._on_grid[tokens] = self.added(tokens, self.usual)
        return self._on_grid[tokens]

    @property
    def once(self) -> float:
        """The fixed time of a chunk, whatever it contains."""
        return max(self.of_slice(self.usual) - self.added(self.usual, self.usual), 0.0)

    def tokens_within(self, time: float, most: int, close: float) -> int:
        """Return the tokens of a document whose chunk, with nothing before it, takes about `time`; at most `most`.
        close: by how much the time may differ.
        """
        low, high, side = 0, most, 0
        below, above = -time, self.of_slice(most) - time
        for tokens, known in self._alone.items():  # asked before: the range to begin with
            error = known - time
            if low < tokens < high and abs(error) <= close:
                return tokens
            if low < tokens < high and error < 0:
                low, below = tokens, error
            elif low < tokens < high:
                high, above = tokens, error
        while high - low > 1 and above > 0:  # false position, Illinois rule
            tokens = min(max(low + round((high - low) * below / (below - above)), low + 1), high - 1)
            error = self.of_slice(tokens) - time
            self._alone[tokens] = error + time
            if abs(error) <= close:
                return tokens
            if error < 0:
                low, below, above = tokens, error, above / 2 if side < 0 else above
            else:
                high, above, below = tokens, error, below / 2 if side > 0 else below
            side = -1 if error < 0 else 1
        return high

    def _time(self, extents: Extents) -> float:
        ops = ((kind, stage) for stage in range(len(self.stages)) for kind in "FB")
        return sum(self.costs.op_time(stage_work(kind, self.stages, stage, extents, self.whole)) for kind, stage in ops)
