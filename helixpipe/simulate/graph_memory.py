"""The memory of CUDA graphs (`helixpipe.model.graphs`), and what a program's buffers weigh outside of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import NamedTuple

from helixpipe.lowering.bound import BoundCosts, Likeness
from helixpipe.program.costs import Contents, Costs
from helixpipe.program.graphs import runs, stages_in_graphs
from helixpipe.program.program import Program, Unit
from helixpipe.program.stages import Activations, Piece, Segment, segments
from helixpipe.program.tasks import Buffer
from helixpipe.program.workload import Extents, Workload

_OUTSIDE = frozenset({"saved", "recomputed", "workspace"})
"""Kinds of buffers of which parts lie in the memory of graphs."""


def captures(workload: Workload, costs: Costs) -> bool:
    """Whether pieces run as graphs where the program lets them: of sequences that are all cut alike, not of steps of
    documents, each of which has other lengths."""
    return getattr(costs, "captures", False) and workload.lengths is not None


class GraphRun(NamedTuple):
    """Pieces that are captured together on a chunk, which units have graphs of in common whatever else they recompute.
    after: the piece that gets what they give."""

    pieces: tuple[Piece, ...]
    after: Piece
    extents: Extents


class CostsOutsideGraphs(BoundCosts):
    """Costs of a rank's buffers without what lies in the memory of its graphs."""

    def __init__(self, program: Program, costs: Costs, rank: int):
        super().__init__(program, costs)
        self._rank = rank
        self._stages = stages_in_graphs(program, rank) if captures(program.workload, costs) else frozenset()

    def contents(self, buffer: Buffer) -> Contents | None:
        contents, unit = super().contents(buffer), Unit(buffer.stage, buffer.microbatch, buffer.chunk)
        if contents is None or buffer.kind not in _OUTSIDE or not self.captured(unit):
            return contents
        return contents._replace(outside=True)

    def captured(self, unit: Unit) -> bool:
        """Whether some of a unit runs as graphs."""
        return unit.stage in self._stages and not self.program.activations_of(unit).offload

    def _likeness(self, kind: str, stage: int, microbatch: int, chunk: int) -> Likeness:
        likeness = super()._likeness(kind, stage, microbatch, chunk)
        outside = kind in _OUTSIDE and self.captured(Unit(stage, microbatch, chunk))
        return (f"{kind} outside", *likeness[1:]) if outside else likeness

    def graphs(self) -> float:
        """Return the bytes that graphs have once all are there: of the slots, of what a backward of one of them needs,
        and of gradients of their inputs and outputs, which chunks of as many tokens have in common."""
        slots = self.slots()
        ends: dict[float, tuple[Extents, dict[tuple[str, str], tuple[Segment, Segment]]]] = {}
        total = backward = 0.0
        for run, number in slots.items():
            parts = Segment(run.pieces, False), Segment((run.after,), False)
            slot = Contents("graph_slot", parts, run.extents, self.whole)
            total += number * self.costs.size(slot)
            backward = max(backward, self.costs.size(slot._replace(kind="graph_backward")))
            _, alike = ends.setdefault(run.extents[0].tokens, (run.extents, {}))
            alike.setdefault((run.pieces[0].kind, run.after.kind), parts)
        for extents, alike in ends.values():
            segments_of_ends = tuple(end for both in alike.values() for end in both)
            total += self.costs.size(Contents("graph_gradients", segments_of_ends, extents, self.whole))
        return total + backward

    def slots(self) -> dict[GraphRun, int]:
        """Return how many slots each run has: for as many units as are in flight at most, from F to B, or, where it is
        recomputed, from R, or from what B begins with. Those of all chunks stay, though not all are in flight at once.
        """
        known: dict[tuple[int, Extents, Activations], list[tuple[GraphRun, bool]]] = {}
        now, most = Counter[GraphRun](), defaultdict[GraphRun, int](int)
        for op in self.program.ranks[self._rank] if self._stages else ():
            if not self.captured(op.unit):
                continue
            key = op.stage, self._extents[op.microbatch][op.chunk], self.program.activations_of(op.unit)
            if key not in known:
                known[key] = self._runs(*key)
            again = "R" if op.unit in self._explicit else "B"
            for run, recomputed in known[key]:
                if op.kind == (again if recomputed else "F"):
                    now[run] += 1
                    most[run] = max(most[run], now[run])
                if op.kind == "B":
                    now[run] -= 1
        return most

    def _runs(self, stage: int, extents: Extents, activations: Activations) -> list[tuple[GraphRun, bool]]:
        """The runs of a unit, each with whether it is recomputed."""
        own, following = self.program.stages[stage].pieces, self.program.stages[stage + 1 : stage + 2]
        after = dict(pairwise((*own, *(each.pieces[0] for each in following))))
        return [
            (GraphRun(run, after[run[-1]], extents), segment.recomputed)
            for segment in segments(own, activations)
            for captured, run in runs(segment.pieces)
            if captured
        ]
