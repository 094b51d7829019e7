"""How many layers each stage recomputes of each chunk: as little as keeps every rank to its memory. No torch here.

Shiju Wang et al., "Data-Centric Elastic Pipeline Parallelism for Efficient Long-Context LLM Training" (InfiniPipe,
2025), Alg. 2. Ranks whose pipeline is full run backwards at the same time that are one place apart in the order from
rank to rank. Where one of them recomputes a layer, the others may do so for nothing. So there is one number for each
such diagonal: n chunks on p ranks have n + p - 1 numbers, and not np. Their sum, weighted with what a layer takes, is
to be least.

What a rank has at each moment, and how much less that is for each layer recomputed, comes from the memory sweep of the
program itself, so this works for the order of any schedule. A recomputed layer keeps its input, and its keys and values
where they lie in the buffer of the microbatch's row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.build import build_graph
from helixpipe.lowering.lower import lower_graph
from helixpipe.planning.early import peak_memory
from helixpipe.planning.integer_program import Covering, Solution, least, solve
from helixpipe.planning.problem import held_by
from helixpipe.planning.recompute import RecomputeOptions
from helixpipe.planning.room import beside_units
from helixpipe.program.costs import Contents, Costs, Work
from helixpipe.program.program import Program, Unit
from helixpipe.program.stages import Activations, Piece, segments
from helixpipe.simulate.moments import Moments, moments

if TYPE_CHECKING:
    import numpy as np

TRIES = 4
"""Programs that are solved for: recomputation changes when messages are there, and so the room beside activations."""

TOLERANCE = 1e-9
"""Part of a limit that rounding may exceed."""


@dataclass(frozen=True)
class Recomputation:
    """What was chosen.

    program: with it. layers: of each unit that recomputes, how many. solution: of the integer program, None where
    nothing had to be recomputed or nothing helps. fits: whether every rank is within the limit.
    """

    program: Program
    layers: Mapping[Unit, int]
    solution: Solution | None
    fits: bool


def recompute_chunks(program: Program, costs: Costs, limit: float, sizes: LayerSizes | None = None) -> Recomputation:
    """The program with as few layers recomputed, unit by unit, as keeps the memory of every rank to `limit` (in the
    costs' unit, weights and optimizer included).

    By mixed-integer programming within its time limit, or its linear relaxation, rounded, where that is better. Where
    not even all layers recomputed fit, all are. The program must be valid and recompute nothing yet.
    """
    lowered = lower_graph(build_graph(program), costs)
    bound, sizes = BoundCosts(program, costs), sizes or LayerSizes()
    ranks = [_Rank(bound, rank, moments(lowered, bound, rank), sizes) for rank in range(program.num_ranks)]
    room = _room(program, costs, limit)
    if all(rank.most <= free for rank, free in zip(ranks, room, strict=True)):
        return Recomputation(program, {}, None, True)
    diagonals = _Diagonals(ranks)
    for _ in range(TRIES):
        found = _chosen(program, diagonals, room)
        excess = [peak - limit * (1 + TOLERANCE) for peak in peak_memory(found.program, costs)]
        if max(excess) <= 0:
            return replace(found, fits=True)
        room = [free - max(0.0, more) * (1 + TOLERANCE) for free, more in zip(room, excess, strict=True)]
    everything = diagonals.everything
    found = Recomputation(_with_layers(program, everything), everything, None, False)
    return replace(found, fits=max(peak_memory(found.program, costs)) <= limit * (1 + TOLERANCE))


class Estimates:
    """Recomputation without lowering: of programs of the same stages, placed alike, on the same workload.

    Memory is counted op by op, with an estimate of what ranks have beside what units keep.
    """

    def __init__(self, program: Program, costs: Costs, sizes: LayerSizes):
        self.costs, self.sizes = costs, sizes
        self._bound = BoundCosts(program, costs)
        self._held: dict[Unit, float] = {}
        self._beside: dict[int, float] = {}

    def recomputation(self, program: Program, limit: float) -> Recomputation:
        """As `recompute_chunks`, by the linear relaxation, rounded: a fraction of the time, to compare programs."""
        diagonals, room = self._problem(program, limit)
        return _chosen(program, diagonals, room, exact=False) if diagonals else Recomputation(program, {}, None, True)

    def least(self, program: Program, limit: float) -> float:
        """The time that recomputation adds to the program at least, by the linear relaxation; inf where not even all
        layers recomputed fit. The program may lack microbatches."""
        diagonals, room = self._problem(program, limit)
        return least(diagonals.covering(room)) * diagonals.unit if diagonals else 0.0

    def _problem(self, program: Program, limit: float) -> tuple[_Diagonals | None, list[float]]:
        """Nothing to be found where all fits as it is."""
        room = _room(program, self.costs, limit)
        ranks = [_Rank(self._bound, rank, self._moments(program, rank), self.sizes) for rank in range(len(room))]
        fits = all(rank.most <= free for rank, free in zip(ranks, room, strict=True))
        return None if fits else _Diagonals(ranks), room

    def _moments(self, program: Program, rank: int) -> Moments:
        """One for each op."""
        own, held = program.ranks[rank], self._held
        now = max((self._around(stage) for stage in {op.stage for op in own}), default=0.0)
        totals = []
        begun: dict[Unit, int] = {}
        saved: dict[Unit, tuple[int, int]] = {}
        backward: dict[Unit, int] = {}
        for place, op in enumerate(own):
            unit = op.unit
            if op.kind == "F":
                begun[unit] = place
                if unit not in held:
                    held[unit] = held_by(self._bound, op)
                now += held[unit]
            totals.append(now)
            if op.kind in "BI":
                saved[unit], backward[unit] = (begun[unit], place + 1), place
                now -= held[unit]
        return Moments(tuple(totals), saved, backward)

    def _around(self, stage: int) -> float:
        if stage not in self._beside:
            self._beside[stage] = beside_units(self._bound, [stage])
        return self._beside[stage]


def _room(program: Program, costs: Costs, limit: float) -> list[float]:
    """What each rank may have beside its weights and optimizer."""
    static = (costs.static_memory(program.pieces_of_rank(rank)) for rank in range(program.num_ranks))
    return [limit * (1 + TOLERANCE) - own for own in static]


def _chosen(program: Program, diagonals: _Diagonals, room: Sequence[float], exact: bool = True) -> Recomputation:
    """What covers the needs of all ranks, and of that what each needs itself; all layers where nothing covers them."""
    solution = solve(diagonals.covering(room), exact)
    shared = diagonals.everything if solution is None else diagonals.layers(solution.values)
    own = (rank.trimmed(shared, free) for rank, free in zip(diagonals.ranks, room, strict=True))
    layers = {unit: count for pairs in own for unit, count in pairs if count}
    return Recomputation(_with_layers(program, layers), layers, solution, solution is not None)


def _with_layers(program: Program, layers: Mapping[Unit, int]) -> Program:
    """The first so many layers of each unit recomputed: a backward starts with the last, and when it comes to those
    that make much again, what the others kept is gone."""
    known = {
        (stage, count): Activations(runs[:count])
        for stage, runs in enumerate(_layer_runs(program))
        for count in range(1, len(runs) + 1)
    }
    chosen = {unit: known[unit.stage, count] for unit, count in sorted(layers.items()) if count}
    return replace(program, activations={**program.activations, **chosen})


def _layer_runs(program: Program) -> list[tuple[tuple[Piece, ...], ...]]:
    whole_layers = RecomputeOptions(recompute_granularity="full")
    return [whole_layers.runs(stage.pieces) for stage in program.stages]


class _Rank:
    """What recomputation does to the memory of one rank.

    units: in the order of their backwards. runs: of each stage what its layers recompute, a run each. kept: of each
    unit what it saves with 0, 1, ... layers recomputed. inside: what its backward then adds at most. time: of
    recomputing its first layer. saving: what each layer recomputed saves at least.
    """

    def __init__(self, bound: BoundCosts, rank: int, found: Moments, sizes: LayerSizes):
        import numpy as np

        self.number, self.moments = rank, found
        self.runs = _layer_runs(bound.program)
        self.totals = np.array(found.totals)
        self.most = float(self.totals.max(initial=0.0))
        self.units = sorted(found.backward, key=found.backward.__getitem__)
        self.kept: dict[Unit, np.ndarray] = {}
        self.inside: dict[Unit, np.ndarray] = {}
        self.time: dict[Unit, float] = {}
        self.saving: dict[Unit, float] = {}
        for unit in self.units:
            self.kept[unit], self.inside[unit], self.time[unit] = kept, _, _ = sizes.of(
                bound, unit, self.runs[unit.stage]
            )
            slopes = [float(kept[0] - kept[count]) / count for count in range(1, len(kept))]
            self.saving[unit] = max(0.0, min(slopes, default=0.0))

    def needs(self, room: float) -> list[tuple[tuple[Unit, ...], float]]:
        """What must be saved at the moments that have most of those with the same units: the units, and how much."""
        now = self.totals.copy()
        for unit in self.units:
            now[self.moments.backward[unit]] += self.inside[unit].max()
        changes: dict[int, list[Unit]] = {}
        for unit in self.units:
            for moment in self.moments.saved[unit]:
                changes.setdefault(moment, []).append(unit)
        alive: frozenset[Unit] = frozenset()
        found: list[tuple[frozenset[Unit], float]] = []
        for start, end in pairwise([*sorted(changes), len(now)]):
            alive ^= frozenset(changes[start])
            if end == start or (need := float(now[start:end].max()) - room) <= 0:
                continue
            if found and self._follows((alive, need), found[-1]):
                continue
            while found and self._follows(found[-1], (alive, need)):
                found.pop()
            found.append((alive, need))
        return [(tuple(sorted(units)), need) for units, need in found]

    def _follows(self, one: tuple[frozenset[Unit], float], other: tuple[frozenset[Unit], float]) -> bool:
        """Whether whatever covers the `other` need covers this one: its units and more, which alone cannot cover it."""
        more = other[0] - one[0]
        whole = (self.saving[unit] * len(self.runs[unit.stage]) for unit in more)
        return one[0] <= other[0] and one[1] <= other[1] - sum(whole)

    def trimmed(self, layers: Mapping[Unit, int], room: float) -> list[tuple[Unit, int]]:
        """The same with as few layers as this rank by itself needs: it may have room where others have none. `layers`
        itself where that does not fit into `room`."""
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
            spare, own = room - now[start:end].max(initial=0.0), room - now[backward]
            more, beside = kept - kept[count], inside - inside[count]
            chosen[unit] = next(
                (less for less in range(count) if more[less] <= spare and more[less] + beside[less] <= own), count
            )
            self._change(now, unit, count, chosen[unit])
        return [(unit, chosen[unit]) for unit in self.units]

    def _change(self, now: np.ndarray, unit: Unit, before: int, after: int) -> None:
        """What the rank has at each moment, when a unit recomputes so many layers instead."""
        start, end = self.moments.saved[unit]
        kept, inside = self.kept[unit], self.inside[unit]
        now[start:end] += kept[after] - kept[before]
        now[self.moments.backward[unit]] += inside[after] - inside[before]


class LayerSizes:
    """What units save, and what their backwards add, with 0, 1, ... layers recomputed, and the time of one layer.

    Asked of costs once for stages and chunks that are alike; one may be handed on from program to program of the same
    costs.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[np.ndarray, np.ndarray, float]] = {}

    def of(
        self, bound: BoundCosts, unit: Unit, runs: Sequence[tuple[Piece, ...]]
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """runs: what the layers of the unit's stage recompute, each."""
        pieces = bound.program.stages[unit.stage].pieces
        extents = bound.program.workload.extents[unit.microbatch][unit.chunk]
        key = tuple(piece.kind for piece in pieces), extents, bound.whole
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._asked(bound, unit, runs)
        return found

    def _asked(
        self, bound: BoundCosts, unit: Unit, runs: Sequence[tuple[Piece, ...]]
    ) -> tuple[np.ndarray, np.ndarray, float]:
        import numpy as np

        pieces = bound.program.stages[unit.stage].pieces
        extents = bound.program.workload.extents[unit.microbatch][unit.chunk]

        def size(kind: str, count: int) -> float:
            own = segments(pieces, Activations(tuple(runs[:count])))
            return bound.costs.size(Contents(kind, own, extents, bound.whole, in_backward=True))

        kept = np.array([size("saved", count) for count in range(len(runs) + 1)])
        inside = np.zeros_like(kept)
        if runs:
            inside[1:] = max(size("recomputed", count) for count in {1, len(runs)})
        return kept, inside, bound.costs.op_time(Work("R", runs[0], extents, bound.whole)) if runs else 0.0


class _Diagonals:
    """The numbers to be found, one for each diagonal: place of a unit's backward on its rank, and ranks after that.

    of: each unit's diagonal. everything: all layers of every unit. weights: the most that a layer of the diagonal
    takes. unit: of the weights in a covering.
    """

    def __init__(self, ranks: Sequence[_Rank]):
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
        """Of every unit."""
        return {
            unit: min(int(values[self.of[unit]]), len(rank.runs[unit.stage]))
            for rank in self.ranks
            for unit in rank.units
        }

    def covering(self, room: Sequence[float]) -> Covering:
        """What recomputation must save, where; room: of each rank, beside its weights and optimizer.

        A backward of a unit that recomputes nothing is charged for it all the same: only what is chosen says which."""
        import numpy as np
        from scipy.sparse import csc_array

        rows: list[int] = []
        columns: list[int] = []
        figures: list[float] = []
        needs: list[float] = []
        for rank, free in zip(self.ranks, room, strict=True):
            if rank.most <= free:
                continue
            for alive, need in rank.needs(free):
                rows += [len(needs)] * len(alive)
                columns += [self.of[unit] for unit in alive]
                figures += [rank.saving[unit] for unit in alive]
                needs.append(need)
        scale = max(figures, default=1.0) or 1.0
        shape = len(needs), len(self.weights)
        matrix = csc_array((np.array(figures) / scale, (rows, columns)), shape=shape)
        matrix.sum_duplicates()
        matrix.eliminate_zeros()
        weights = self.weights / self.unit if self.weights.any() else np.ones_like(self.weights)
        return Covering(matrix, np.array(needs) / scale, self.most, weights)
