"""Computes how much memory recomputation must save on a rank, and can save, from its memory at each moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from helixpipe.lowering.bound import BoundCosts
from helixpipe.planning.memory.integer_program import Covering
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.program.costs import Contents, Work
from helixpipe.program.program import Program, Unit
from helixpipe.program.stages import Activations, Piece, segments
from helixpipe.simulate.curve import Moments

if TYPE_CHECKING:
    import numpy as np


def layer_runs(program: Program) -> list[tuple[tuple[Piece, ...], ...]]:
    whole_layers = RecomputeOptions(recompute_granularity="full")
    return [whole_layers.runs(stage.pieces) for stage in program.stages]


class LayerSizes:
    """The memory that units save and that their backwards add, with 0, 1, ... layers recomputed, and the time of one
    layer.

    Costs are evaluated once for stages and chunks that are alike; one object may serve several programs with the same
    costs.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[np.ndarray, np.ndarray, float]] = {}

    def of(
        self, bound: BoundCosts, unit: Unit, runs: Sequence[tuple[Piece, ...]]
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Return the sizes with 0, 1, ... layers recomputed. runs: the pieces that each layer of the unit's stage
        recomputes.
        """
        pieces = bound.program.stages[unit.stage].pieces
        extents = bound.program.workload.extents[unit.microbatch][unit.chunk]
        key = tuple(piece.kind for piece in pieces), extents, bound.whole
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._asked(bound, unit, runs)
        return known

    def _asked(
        self, bound: BoundCosts, unit: Unit, runs: Sequence[tuple[Piece, ...]]
    ) -> tuple[np.ndarray, np.ndarray, float]:
        import numpy as np

        pieces = bound.program.stages[unit.stage].pieces
        extents = bound.program.workload.extents[unit.microbatch][unit.chunk]

        def size(kind: str, count: int) -> float:
            own = segments(pieces, Activations(tuple(runs[:count])))
            return bound.costs.size(Contents(kind, own, extents, bound.whole, in_backward=True))

        kept = np.array(_along(lambda count: size("saved", count), len(runs)))
        inside = np.zeros_like(kept)
        if runs:
            inside[1:] = _along(lambda count: size("recomputed", count + 1), len(runs) - 1)
        return kept, inside, bound.costs.op_time(Work("R", runs[0], extents, bound.whole)) if runs else 0.0


def _along(size: Callable[[int], float], most: int) -> list[float]:
    """Return the sizes at 0, 1, ... most. Layers are alike, so between the second and the last but one they lie on a
    line; if its ends show that they do not, all are computed.
    """
    if most <= 4:
        return [size(count) for count in range(most + 1)]
    first, second, third, before, last = (size(count) for count in (0, 1, 2, most - 1, most))
    line = [second + (third - second) * count for count in range(most - 1)]
    if abs(line[-1] - before) > 1e-9 * max(abs(before), abs(second)):
        return [first, second, third, *(size(count) for count in range(3, most - 1)), before, last]
    return [first, *line[:-1], before, last]


class SavedActivations(NamedTuple):
    """The memory to save at a moment. units: those whose saved activations are alive. running: the one whose backward
    runs and recomputes.
    """

    units: frozenset[Unit]
    running: Unit | None
    size: float


def _least_slope(figures: np.ndarray, above: float) -> float:
    """Return the least decrease of the figures a step, from the first to any other above `above`; 0 if they rise."""
    steps = [count for count in range(1, len(figures)) if figures[count] > above] or range(len(figures) - 1, 0, -1)[:1]
    return max(0.0, min((float(figures[0] - figures[count]) / count for count in steps), default=0.0))


class RankNeeds:
    """The effect of recomputation on the memory of one rank.

    units: in the order of their backwards. runs: of each stage the pieces that its layers recompute, a run each. kept:
    of each unit the memory it keeps with 0, 1, ... layers recomputed. inside: what its backward then adds at most.
    time: of recomputing its first layer. saving: the least memory saved by each recomputed layer. saving_inside,
    most_inside: the same while the unit's backward recomputes one of them, and what all of them save then: as much as
    all but one.
    """

    def __init__(self, bound: BoundCosts, rank: int, moments: Moments, sizes: LayerSizes):
        import numpy as np

        self.number, self.moments = rank, moments
        self.runs = layer_runs(bound.program)
        self.totals = np.array(moments.totals)
        self.most = float(self.totals.max(initial=0.0))
        self.units = sorted(moments.backward, key=moments.backward.__getitem__)
        self.kept: dict[Unit, np.ndarray] = {}
        self.inside: dict[Unit, np.ndarray] = {}
        self.time: dict[Unit, float] = {}
        self.saving: dict[Unit, float] = {}
        self.saving_inside: dict[Unit, float] = {}
        self.most_inside: dict[Unit, float] = {}
        for unit in self.units:
            self.kept[unit], self.inside[unit], self.time[unit] = kept, _, _ = sizes.of(
                bound, unit, self.runs[unit.stage]
            )
            self.saving[unit] = _least_slope(kept, -inf)
            inside = kept + self.inside[unit]
            self.saving_inside[unit] = _least_slope(inside, inside[-1])
            self.most_inside[unit] = max(0.0, float(inside[0] - inside[-1]))

    def needs(self, room: float) -> list[SavedActivations]:
        """Return the memory to save at moments at which the same units are alive, without needs that others imply.

        While a backward runs, its unit saves the lesser of what its layers save and the most that they can. So there
        are two needs, of which the latter leaves the unit out.
        """
        backward_at = {moment: unit for unit, moment in self.moments.backward.items()}
        changes: dict[int, list[Unit]] = {}
        for unit in self.units:
            for moment in self.moments.saved[unit]:
                changes.setdefault(moment, []).append(unit)
        alive: frozenset[Unit] = frozenset()
        kept: list[SavedActivations] = []
        for start, end in pairwise([*sorted(changes), len(self.totals)]):
            alive ^= frozenset(changes[start])
            if end == start:
                continue
            moments = [
                SavedActivations(alive, backward_at.get(at), float(self.totals[at]) - room) for at in range(start, end)
            ]
            without = [
                SavedActivations(alive - {unit}, None, size - self.most_inside[unit])
                for _, unit, size in moments
                if unit is not None
            ]
            for need in sorted([*moments, *without], key=lambda each: (-each.size, each.running is None)):
                if need.size <= 0 or (kept and self._follows(need, kept[-1])):
                    continue
                while kept and self._follows(kept[-1], need):
                    kept.pop()
                kept.append(need)
        return kept

    def coefficients(self, need: SavedActivations) -> list[tuple[Unit, float]]:
        """Return, for each unit, the least memory saved at that moment by each layer that it recomputes."""
        return [
            (unit, (self.saving_inside if unit == need.running else self.saving)[unit]) for unit in sorted(need.units)
        ]

    def _follows(self, one: SavedActivations, other: SavedActivations) -> bool:
        """Whether covering the `other` need always covers this one: the most that units absent here, and the one
        running here, save for the other need alone is no more than the difference.
        """
        if not one.units <= other.units:
            return False
        less = sum(self.saving[unit] * len(self.runs[unit.stage]) for unit in other.units - one.units)
        if one.running is not None and one.running != other.running:
            less += (self.saving[one.running] - self.saving_inside[one.running]) * len(self.runs[one.running.stage])
        return one.size <= other.size - less

    def trimmed(self, layers: Mapping[Unit, int], room: float) -> list[tuple[Unit, int]]:
        """Reduce the layers to as few as this rank itself needs: it may have room where others have none. Returns
        `layers` unchanged if they do not fit into `room`.
        """
        now = self.totals.copy()
        if self.most <= room:
            return [(unit, 0) for unit in self.units]
        for unit in self.units:
            self._change(now, unit, 0, layers[unit])
        if now.max() > room:
            return [(unit, layers[unit]) for unit in self.units]
        chosen = dict(layers)
        for unit in sorted(self.units, key=lambda unit: -self.time[unit]):
            (start, end), backward = self.moments.saved[unit], self.moments.backward[unit]
            count, kept, inside = chosen[unit], self.kept[unit], self.inside[unit]
            if count == 0:
                continue
            most = max(now[start:backward].max(initial=0.0), now[backward + 1 : end].max(initial=0.0))
            spare, own = room - most, room - now[backward]
            more, beside = kept - kept[count], inside - inside[count]
            chosen[unit] = next(
                (less for less in range(count) if more[less] <= spare and more[less] + beside[less] <= own), count
            )
            self._change(now, unit, count, chosen[unit])
        return [(unit, chosen[unit]) for unit in self.units]

    def _change(self, now: np.ndarray, unit: Unit, before: int, after: int) -> None:
        """Update the rank's memory at each moment for a unit that recomputes `after` layers instead of `before`."""
        start, end = self.moments.saved[unit]
        kept, inside = self.kept[unit], self.inside[unit]
        now[start:end] += kept[after] - kept[before]
        now[self.moments.backward[unit]] += inside[after] - inside[before]


class Diagonals:
    """The numbers to be found, one for each diagonal: place of a unit's backward on its rank, and ranks after that.

    of: each unit's diagonal. everything: all layers of every unit. weights: the most that a layer of the diagonal
    takes. unit: of the weights in a covering.
    """

    def __init__(self, ranks: Sequence[RankNeeds]):
        import numpy as np

        self.ranks = ranks
        self.of = {
            unit: place + len(ranks) - 1 - rank.number for rank in ranks for place, unit in enumerate(rank.units)
        }
        self.weights = np.zeros(1 + max(self.of.values(), default=-1))
        self.most = np.zeros_like(self.weights)
        for rank in ranks:
            for unit in rank.units:
                at = self.of[unit]
                self.weights[at] = max(self.weights[at], rank.time[unit])
                self.most[at] = max(self.most[at], len(rank.runs[unit.stage]))
        self.everything = {unit: len(rank.runs[unit.stage]) for rank in ranks for unit in rank.units}
        self.unit = float(self.weights.max(initial=0.0)) or 1.0

    def layers(self, values: np.ndarray) -> dict[Unit, int]:
        """Return the number of layers that each unit recomputes."""
        return {
            unit: min(int(values[self.of[unit]]), len(rank.runs[unit.stage]))
            for rank in self.ranks
            for unit in rank.units
        }

    def time(self, layers: Mapping[Unit, int]) -> float:
        """Return the sum of the longest times that the diagonals' units recompute, with so many layers of each."""
        longest = [0.0] * len(self.weights)
        for unit, count in layers.items():
            at = self.of[unit]
            longest[at] = max(longest[at], count * float(self.weights[at]))
        return sum(longest)

    def covering(self, room: Sequence[float]) -> Covering:
        """Return the memory that recomputation must save at each moment; room: of each rank, beside its weights and
        optimizer.
        """
        import numpy as np
        from scipy.sparse import csc_array

        rows: list[int] = []
        columns: list[int] = []
        figures: list[float] = []
        needs: list[float] = []
        for rank, free in zip(self.ranks, room, strict=True):
            if rank.most <= free:
                continue
            for need in rank.needs(free):
                for unit, figure in rank.coefficients(need):
                    rows.append(len(needs))
                    columns.append(self.of[unit])
                    figures.append(figure)
                needs.append(need.size)
        scale = max(figures, default=1.0) or 1.0
        shape = len(needs), len(self.weights)
        matrix = csc_array((np.array(figures) / scale, (rows, columns)), shape=shape)
        matrix.sum_duplicates()
        matrix.eliminate_zeros()
        weights = self.weights / self.unit if self.weights.any() else np.ones_like(self.weights)
        return Covering(matrix, np.array(needs) / scale, self.most, weights)
