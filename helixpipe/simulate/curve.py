"""Computes the memory of a rank at each moment of a step: as a curve for drawings, and as moments for solvers.

A solver that changes what units save asks for the moments and for which units' saved tensors are in them: the rest of a
rank's memory stays what it is, as long as the order does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.graph import Graph
from helixpipe.lowering.project import Action, LoweredProgram
from helixpipe.program.costs import Costs
from helixpipe.program.program import Unit
from helixpipe.program.transfer import Transfer
from helixpipe.simulate.graph_memory import CostsOutsideGraphs
from helixpipe.simulate.sweep import Sweep, sweep

_AT_END = frozenset({Action.WAIT, Action.FREE})
"""What a rank does when the task has ended; the rest it does when the task starts."""


class Level(NamedTuple):
    """From the start of a task, or from its end, a rank has so much, in the costs' unit of memory."""

    task: int
    at_end: bool
    device: float
    host: float


@dataclass(frozen=True)
class MemoryCurve:
    """The memory of one rank over a step. levels: in the order of its stream; several may be of one moment, the highest
    of which is the most there is then. static_device, static_host: what is there at all times, which the levels
    contain: on the device also all of the memory that messages are received into (`sweep.Peak.received`)."""

    levels: list[Level]
    static_device: float
    static_host: float


def memory_curves(lowered: LoweredProgram, costs: Costs) -> list[MemoryCurve]:
    """Return the memory curve of every rank. The highest level on the device is the `Simulation`'s `device_needs`."""
    program, curves = lowered.program, []
    for rank in range(program.num_ranks):
        pieces, bound = program.pieces_of_rank(rank), CostsOutsideGraphs(program, costs, rank)
        device, host = costs.static_memory(pieces) + bound.graphs(), costs.static_host_memory(pieces)
        device += sweep(lowered, bound, rank).received
        recorder = _LevelSweep(lowered.graph, bound, rank, device, host)
        recorder.go_through(lowered)
        if not program.forward_only:
            recorder.update(costs.update_memory(pieces))
        curves.append(MemoryCurve(recorder.levels, device, host))
    return curves


class _LevelSweep(Sweep):
    """A sweep that notes each level; of one moment the highest and the last."""

    def __init__(self, graph: Graph, costs: BoundCosts, rank: int, device: float, host: float):
        super().__init__(graph, costs, rank)
        self.device, self.on_host = device, host
        self.levels: list[Level] = []
        self._moment = (-1, False)
        self._during: list[float] | None = None  # an op: what there is at each check

    def run(self, task: int) -> None:
        if task in self.graph.pairs:  # it runs with the next
            super().run(task)
            return
        self._during = []
        super().run(task)
        *inside, after = self._during
        self._during = None
        for at_end, totals in ((False, inside), (True, [after])):
            self._moment = (task, at_end)
            for total in totals:
                self._note(total)

    def update(self, size: float) -> None:
        """The optimizer's moment, when the rank's last task has ended."""
        if size and self.levels:
            self._moment, last = (self.levels[-1].task, True), self.outside
            self._note(size)
            self._note(last)

    def transfer(self, action: Action, transfer: Transfer, task: int) -> None:
        self._moment = (task, action in _AT_END)
        super().transfer(action, transfer, task)
        self._note(self.outside)

    def free(self, number: int) -> None:
        super().free(number)
        if self._during is None:  # what an op's end has freed
            self._note(self.outside)

    def check(self) -> None:
        super().check()
        if self._during is not None:
            self._during.append(self.outside)

    def _note(self, total: float) -> None:
        device, host, levels = total + self.device, self.host + self.on_host, self.levels
        if levels and (levels[-1].device, levels[-1].host) == (device, host):
            return
        level = Level(*self._moment, device, host)
        if len(levels) > 1 and levels[-1][:2] == levels[-2][:2] == self._moment:
            highest = max(levels[-2].device, levels[-1].device), max(levels[-2].host, levels[-1].host)
            levels[-2:] = [Level(*self._moment, *highest)]
        levels.append(level)


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
    return Moments(tuple(total + state.received_most for total in state.totals), state.saved, state.backward)


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
        self.totals.append(self.outside)
