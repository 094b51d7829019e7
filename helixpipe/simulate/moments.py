"""Computes the memory of a rank at each moment of a program, and which units' saved activations are in it.

For solvers that change what units save: the rest of a rank's memory stays what it is, as long as the order does.
"""

from __future__ import annotations

from dataclasses import dataclass

from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.graph import Graph
from helixpipe.lowering.project import LoweredProgram
from helixpipe.program.program import Unit
from helixpipe.simulate.sweep import Sweep


@dataclass(frozen=True)
class Moments:
    """The moments of one rank at which its memory may peak, in the order of time.

    totals: all that the sweep counts, in the costs' unit, at each moment it looks. saved: of each unit the moments
    [first, end) at which what it saved is there. backward: of each unit the moment of its B or I at which what that
    recomputes inside is there as well.
    """

    totals: tuple[float, ...]
    saved: dict[Unit, tuple[int, int]]
    backward: dict[Unit, int]


def moments(lowered: LoweredProgram, costs: BoundCosts, rank: int) -> Moments:
    """Sweep through one rank's instructions."""
    state = _MomentSweep(lowered.graph, costs, rank)
    state.go_through(lowered)
    return Moments(tuple(state.totals), state.saved, state.backward)


class _MomentSweep(Sweep):
    """A sweep that notes each moment at which there may be most."""

    def __init__(self, graph: Graph, costs: BoundCosts, rank: int):
        super().__init__(graph, costs, rank)
        self.totals: list[float] = []
        self.saved: dict[Unit, tuple[int, int]] = {}
        self.backward: dict[Unit, int] = {}
        self._first: dict[int, int] = {}

    def run(self, task: int) -> None:
        start = len(self.totals)
        super().run(task)
        op = self.graph.ops[task]
        if op.kind in "BI":
            self.backward[op.unit] = start

    def take(self, number: int, category: int = -1) -> None:
        super().take(number, category)
        if self.graph.buffers[number].kind == "saved":
            self._first[number] = len(self.totals)

    def free(self, number: int) -> None:
        super().free(number)
        if number in self._first:
            _, _, stage, microbatch, chunk, _ = self.graph.buffers[number]
            self.saved[Unit(stage, microbatch, chunk)] = self._first.pop(number), len(self.totals)

    def check(self) -> None:
        super().check()
        self.totals.append(sum(self.now))
