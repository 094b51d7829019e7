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
from helixpipe.program.costs import Costs, Work
from helixpipe.program.program import Program, Unit
from helixpipe.program.stages import Activations, Piece, segments
from helixpipe.program.tasks import Buffer
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
    nothing had to be recomputed. fits: whether the memory sweep says that every rank is within the limit.
    """

    program: Program
    layers: Mapping[Unit, int]
    solution: Solution | None
    fits: bool


def recompute_chunks(program: Program, costs: Costs, limit: float, exact: bool = True) -> Recomputation:
    """The program with as few layers recomputed, unit by unit, as keeps the memory of every rank to `limit` (in the
    costs' unit, weights and optimizer included).

    exact: by mixed-integer programming within its time limit, else by its linear relaxation, rounded. Where not even
    all layers recomputed fit, all are. The program must be valid and recompute nothing yet.
    """
    lowered = lower_graph(build_graph(program), costs)
    bound = BoundCosts(program, costs)
    ranks = [_Rank(program, bound, rank, moments(lowered, bound, rank)) for rank in range(program.num_ranks)]
    static = [costs.static_memory(program.pieces_of_rank(rank)) for rank in range(program.num_ranks)]
    room = [limit * (1 + TOLERANCE) - more for more in static]
    if all(rank.most <= free for rank, free in zip(ranks, room, strict=True)):
        return Recomputation(program, {}, None, True)
    diagonals = _Diagonals(ranks)
    everything = {unit: len(rank.runs[unit.stage]) for rank in ranks for unit in rank.units}
    solution = None
    for _ in range(TRIES):
        solution = solve(diagonals.covering(room), exact)
        shared = everything if solution is None else diagonals.layers(solution.values)
        layers = dict(pair for rank, free in zip(ranks, room, strict=True) for pair in rank.trimmed(shared, free))
        found = _with_layers(program, layers)
        excess = [peak - limit * (1 + TOLERANCE) for peak in peak_memory(found, costs)]
        if max(excess) <= 0:
            return Recomputation(found, {unit: count for unit, count in layers.items() if count}, solution, True)
        room = [free - max(0.0, more) * (1 + TOLERANCE) for free, more in zip(room, excess, strict=True)]
    found = _with_layers(program, everything)
    return Recomputation(found, everything, None, max(peak_memory(found, costs)) <= limit * (1 + TOLERANCE))


def least_recomputation(program: Program, costs: Costs, limit: float) -> float:
    """The time that recomputation adds to the program at least, by the linear relaxation and an estimate of what its
    ranks have beside what units keep; inf where not even all layers recomputed fit."""
    bound = BoundCosts(program, costs)
    ranks, room = [], []
    for rank in range(program.num_ranks):
        ranks.append(_Rank(program, bound, rank, _estimated(program, bound, rank)))
        room.append(limit * (1 + TOLERANCE) - costs.static_memory(program.pieces_of_rank(rank)))
    if all(rank.most <= free for rank, free in zip(ranks, room, strict=True)):
        return 0.0
    diagonals = _Diagonals(ranks)
    return least(diagonals.covering(room)) * diagonals.unit


def _estimated(program: Program, bound: BoundCosts, rank: int) -> Moments:
    """A rank's moments, one for each op, without lowering the program."""
    own = program.ranks[rank]
    now = beside_units(bound, sorted({op.stage for op in own}))
    totals = []
    begun: dict[Unit, int] = {}
    saved: dict[Unit, tuple[int, int]] = {}
    backward: dict[Unit, int] = {}
    for place, op in enumerate(own):
        if op.kind == "F":
            begun[op.unit] = place
            now += held_by(bound, op)
        totals.append(now)
        if op.kind in "BI":
            saved[op.unit], backward[op.unit] = (begun[op.unit], place + 1), place
            now -= held_by(bound, op)
    return Moments(tuple(totals), saved, backward)


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

    def __init__(self, program: Program, bound: BoundCosts, rank: int, found: Moments):
        import numpy as np

        self.number, self.moments = rank, found
        self.runs = _layer_runs(program)
        self.totals = np.array(found.totals)
        self.most = float(self.totals.max(initial=0.0))
        self.units = sorted(found.backward, key=found.backward.__getitem__)
        known: dict[tuple[int, int], tuple[np.ndarray, np.ndarray, float]] = {}
        self.kept: dict[Unit, np.ndarray] = {}
        self.inside: dict[Unit, np.ndarray] = {}
        self.time: dict[Unit, float] = {}
        self.saving: dict[Unit, float] = {}
        extents = program.workload.extents
        for unit in self.units:
            key = unit.stage, id(extents[unit.microbatch][unit.chunk])
            if key not in known:
                known[key] = _measured(bound, unit, self.runs[unit.stage])
            self.kept[unit], self.inside[unit], self.time[unit] = kept, _, _ = known[key]
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
        alive: set[Unit] = set()
        found = []
        for start, end in pairwise([*sorted(changes), len(now)]):
            alive ^= set(changes[start])
            if end > start and (need := float(now[start:end].max()) - room) > 0:
                found.append((tuple(alive), need))
        return found

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


def _measured(bound: BoundCosts, unit: Unit, runs: Sequence[tuple[Piece, ...]]) -> tuple[np.ndarray, np.ndarray, float]:
    """What a unit saves, and what its backward adds, with 0, 1, ... layers recomputed; the time of one of them."""
    import numpy as np

    pieces = bound.program.stages[unit.stage].pieces

    def size(kind: str, count: int) -> float:
        contents = bound.contents(Buffer(kind, 0, *unit))
        assert contents is not None
        own = segments(pieces, Activations(tuple(runs[:count])))
        return bound.costs.size(contents._replace(segments=own, in_backward=True))

    counts = range(len(runs) + 1)
    inside = [0.0, *(size("recomputed", count) for count in counts[1:])]
    extents = bound.program.workload.extents[unit.microbatch][unit.chunk]
    time = bound.costs.op_time(Work("R", runs[0], extents, bound.whole)) if runs else 0.0
    return np.array([size("saved", count) for count in counts]), np.array(inside), time


class _Diagonals:
    """The numbers to be found, one for each diagonal: place of a unit's backward on its rank, and ranks after that.

    of: each unit's diagonal. weights: the most that a layer of the diagonal takes. unit: of the weights in a covering.
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
