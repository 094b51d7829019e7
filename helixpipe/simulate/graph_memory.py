"""The memory of CUDA graphs (`helixpipe.model.graphs`), and what a program's buffers weigh outside of it."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import NamedTuple

from helixpipe.costs.remembered import Likeness
from helixpipe.lowering.bound import BoundCosts
from helixpipe.program.costs import Contents, Costs
from helixpipe.program.graphs import runs, stages_in_graphs
from helixpipe.program.program import Op, Program, Unit
from helixpipe.program.stages import Activations, Segment, segments
from helixpipe.program.tasks import Buffer
from helixpipe.program.workload import Extents

_OUTSIDE = frozenset({"saved", "recomputed", "workspace"})
"""Kinds of buffers of which parts lie in the memory of graphs."""


def captures(costs: Costs) -> bool:
    """Whether pieces run as graphs where the program lets them."""
    return getattr(costs, "captures", False)


class _UnitInGraphs(NamedTuple):
    """Bytes of the slots of a unit's runs, of those that are kept and those that are recomputed; of what a backward of
    one of them needs, and of gradients of their inputs and outputs."""

    slots: tuple[float, float]
    backward: float
    gradients: float
    extents: Extents


class CostsOutsideGraphs(BoundCosts):
    """Costs of a rank's buffers without what lies in the memory of its graphs."""

    def __init__(self, program: Program, costs: Costs, rank: int):
        super().__init__(program, costs)
        self._rank = rank
        self._stages = stages_in_graphs(program, rank) if captures(costs) else frozenset()

    def contents(self, buffer: Buffer) -> Contents | None:
        contents, unit = super().contents(buffer), Unit(buffer.stage, buffer.microbatch, buffer.chunk)
        if contents is None or buffer.kind not in _OUTSIDE or not self.captured(unit):
            return contents
        return contents._replace(outside=True)

    def captured(self, unit: Unit) -> bool:
        """Whether some of a unit runs as graphs. Rows of several documents do not."""
        stage, microbatch, chunk = unit
        alone = len(self._extents[microbatch][chunk]) == 1
        return stage in self._stages and alone and not self.program.activations_of(unit).offload

    def _likeness(self, kind: str, stage: int, microbatch: int, chunk: int) -> Likeness:
        likeness = super()._likeness(kind, stage, microbatch, chunk)
        outside = kind in _OUTSIDE and self.captured(Unit(stage, microbatch, chunk))
        return (f"{kind} outside", *likeness[1:]) if outside else likeness

    def graphs(self) -> float:
        """Return the bytes that graphs have once all are there.

        Each run of a stage's pieces on a chunk of microbatches has slots for as many units as are in flight at most:
        from F to B, or, where it is recomputed, from R, or from what B begins with. Those of all chunks stay, though
        not all are in flight at once.
        """
        now: dict[tuple[object, bool], int] = defaultdict(int)
        most: dict[tuple[object, bool], int] = defaultdict(int)
        known: dict[object, _UnitInGraphs] = {}
        for op in self.program.ranks[self._rank] if self._stages else ():
            if op.kind == "W" or not self.captured(op.unit):
                continue
            activations = self.program.activations_of(op.unit)
            key = op.stage, self._extents[op.microbatch][op.chunk], activations
            if key not in known:
                known[key] = self._of_unit(op, activations)
            again = "R" if op.unit in self._explicit else "B"
            for recomputed in (False, True):
                if op.kind == (again if recomputed else "F"):
                    now[key, recomputed] += 1
                    most[key, recomputed] = max(most[key, recomputed], now[key, recomputed])
                if op.kind == "B":
                    now[key, recomputed] -= 1
        gradients: dict[Extents, float] = defaultdict(float)
        for unit in known.values():
            gradients[unit.extents] = max(gradients[unit.extents], unit.gradients)
        backward = max((unit.backward for unit in known.values()), default=0.0)
        slots = sum(number * known[key].slots[recomputed] for (key, recomputed), number in most.items())
        return slots + backward + sum(gradients.values())

    def _of_unit(self, op: Op, activations: Activations) -> _UnitInGraphs:
        own, extents = self.program.stages[op.stage].pieces, self._extents[op.microbatch][op.chunk]
        following = self.program.stages[op.stage + 1 : op.stage + 2]
        after = dict(pairwise((*own, *(stage.pieces[0] for stage in following))))
        slots, backward, ends = [0.0, 0.0], 0.0, list[Segment]()
        for segment in segments(own, activations):
            for captured, run in runs(segment.pieces):
                if captured:
                    parts = Segment(run, False), Segment((after[run[-1]],), False)
                    slot = Contents("graph_slot", parts, extents, self.whole)
                    slots[segment.recomputed] += self.costs.size(slot)
                    backward = max(backward, self.costs.size(slot._replace(kind="graph_backward")))
                    ends += parts
        gradients = self.costs.size(Contents("graph_gradients", tuple(ends), extents, self.whole)) if ends else 0.0
        return _UnitInGraphs((slots[0], slots[1]), backward, gradients, extents)
