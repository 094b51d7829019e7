"""What the units of a rank keep for their backward, op by op, in the costs' unit of memory. No torch here."""

from __future__ import annotations

from helixpipe.program.costs import Costs
from helixpipe.program.program import Op, Program, Unit


def copies(program: Program, costs: Costs, rank: int) -> float:
    """The most that copies of other ranks' weights and the gradients summed for them can take on a rank: all of shipped
    stages, and of ring stages as many as there is room for."""
    copied = program.copied_stages(rank)
    shipped = [costs.copy_memory(program, stage) for stage in copied if program.stages[stage].placement == "shipped"]
    ring = [costs.copy_memory(program, stage) for stage in copied if program.stages[stage].placement == "ring"]
    sizes = [sorted(kind, reverse=True)[: program.ring.slots] for kind in zip(*ring, strict=True)]
    return sum(map(sum, shipped)) + sum(map(sum, sizes))


class StashWalk:
    """Follows the ops of one rank in their order.

    now: kept by all units, and keys and values of chunks. A unit keeps its stash from F to B or I, after an R
    everything its backward needs, and after I what W still needs, until W.
    """

    def __init__(self, program: Program, costs: Costs, rank: int):
        self.now = 0.0
        self._program, self._costs = program, costs
        self._explicit = {op.unit for op in program.ranks[rank] if op.kind == "R"}
        self._alive: dict[Unit, float] = {}
        self._sizes: dict[tuple[str, int, int], float] = {}
        self._stores: dict[int, tuple[float, float]] = {}

    def run(self, op: Op) -> float:
        """Run an op; returns the most that is kept meanwhile. `now` includes what B or W leaves until `free`."""
        more, less = self._keys_values(op)
        self.now += more
        before = self._alive.get(op.unit, 0.0)
        during = after = before
        if op.kind in "FR" and not self._program.forward_only:
            after = self._size(op)
        elif op.kind == "I":
            after = self._deferred(op)
        if op.kind in "BI" and self._program.stages[op.stage].recompute and op.unit not in self._explicit:
            during = self._size(op)
        most = self.now - before + max(before, during, after)
        self.now += after - before - less
        self._alive[op.unit] = after
        return most

    def _keys_values(self, op: Op) -> tuple[float, float]:
        """What an op adds to the keys and values of chunks and their gradients before it runs, and frees after."""
        first, last = op.chunk == 0, op.chunk == self._program.num_chunks - 1
        if first and last:
            return 0.0, 0.0
        if op.stage not in self._stores:
            self._stores[op.stage] = self._costs.keys_values(self._program, op.stage)
        buffers, gradients = self._stores[op.stage]
        if op.kind == "F":
            return buffers * first, buffers * (last and self._program.forward_only)
        return (gradients * last, (buffers + gradients) * first) if op.kind in "BI" else (0.0, 0.0)

    def free(self, op: Op) -> None:
        """The FREE after a B or W: its unit keeps nothing any more."""
        self.now -= self._alive.pop(op.unit, 0.0)

    def _size(self, op: Op) -> float:
        key = (op.kind, op.stage, op.chunk)
        if key not in self._sizes:
            self._sizes[key] = self._costs.stash(self._program, op)
        return self._sizes[key]

    def _deferred(self, op: Op) -> float:
        key = ("W", op.stage, op.chunk)
        if key not in self._sizes:
            self._sizes[key] = self._costs.deferred_stash(self._program, op)
        return self._sizes[key]
