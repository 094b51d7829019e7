"""Chooses how many layers each stage recomputes for each chunk: the fewest with which every rank fits its memory.

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.lower import lowered_valid
from helixpipe.planning.memory.early import peak_memory
from helixpipe.planning.memory.held import held_by
from helixpipe.planning.memory.integer_program import Solution, least, solve
from helixpipe.planning.memory.recompute_needs import Diagonals, LayerSizes, RankNeeds, layer_runs
from helixpipe.planning.memory.room import beside_units
from helixpipe.program.costs import Costs
from helixpipe.program.program import Op, Program, Unit
from helixpipe.program.stages import Activations
from helixpipe.simulate.curve import Moments, moments
from helixpipe.simulate.graph_memory import CostsOutsideGraphs, captures

TRIES, EXACT_TRIES = 8, 4
"""Programs that are solved for: recomputation changes when messages are there, and so the room beside activations. Of
those that need too much the first ones get less room by that; each one after them by twice as many times that."""

TOLERANCE = 1e-9
"""Part of a limit that rounding may exceed."""


@dataclass(frozen=True)
class Recomputation:
    """The result of choosing what to recompute.

    program: with the choice. layers: the number recomputed, of each unit that recomputes. solution: of the integer
    program, None if nothing had to be recomputed or nothing helps. time: the objective, the sum of each diagonal's
    longest. fits: whether every rank is within the limit.
    """

    program: Program
    layers: Mapping[Unit, int]
    solution: Solution | None
    fits: bool
    time: float = 0.0


def recompute_chunks(
    program: Program,
    costs: Costs,
    limit: float,
    sizes: LayerSizes | None = None,
    exact: bool = True,
    as_trained: Callable[[Program], Program] = lambda program: program,
) -> Recomputation:
    """Return the program with as few layers recomputed, unit by unit, as keeps the memory of every rank to `limit` (in
    the costs' unit, weights and optimizer included).

    By mixed-integer programming within its time limit, or its linear relaxation, rounded, where that is better; without
    `exact` by the relaxation alone, which is the same wherever it is solved. Where not even all layers recomputed fit,
    all are. In CUDA graphs, of which units that recompute unlike layers need more, all units of a rank recompute alike,
    where that fits. The program must be valid and recompute nothing yet. as_trained: what becomes of the program, which
    is what has to fit: weights in parts cut its stages.
    """

    def needs(one: Program) -> list[float]:
        return peak_memory(as_trained(one), costs)

    if max(needs(program)) <= limit * (1 + TOLERANCE):
        return Recomputation(program, {}, None, True)
    if captures(program.workload, costs) and (layers := _alike(program, limit, needs)):
        return Recomputation(_with_layers(program, layers), layers, None, True)
    lowered, bound, sizes = lowered_valid(program, costs), BoundCosts(program, costs), sizes or LayerSizes()
    looks = [moments(lowered, bound, rank) for rank in range(program.num_ranks)]
    room = _room(program, costs, limit)
    diagonals = Diagonals([RankNeeds(bound, rank, look, sizes) for rank, look in enumerate(looks)])
    for attempt in range(TRIES):
        chosen = _chosen(program, diagonals, room, exact)
        excess = [peak - limit * (1 + TOLERANCE) for peak in needs(chosen.program)]
        if max(excess) <= 0:
            return replace(chosen, fits=True)
        times = 2 ** max(attempt + 2 - EXACT_TRIES, 0) * (1 + TOLERANCE)
        room = [free - max(0.0, more) * times for free, more in zip(room, excess, strict=True)]
    everything = diagonals.everything
    chosen = Recomputation(_with_layers(program, everything), everything, None, False)
    return replace(chosen, fits=max(needs(chosen.program)) <= limit * (1 + TOLERANCE))


class Estimates:
    """Recomputation without lowering: of programs of the same stages, placed alike, on the same workload.

    Memory is counted op by op, with an estimate of what ranks have beside what units keep.
    """

    def __init__(self, program: Program, costs: Costs, sizes: LayerSizes):
        self.costs, self.sizes = costs, sizes
        self._captures = captures(program.workload, costs)
        self._static = [costs.static_memory(program.pieces_of_rank(rank)) for rank in range(program.num_ranks)]
        self._beside: dict[int, float] = {}

    def fits(self, program: Program, limit: float) -> bool:
        """Whether nothing has to be recomputed. The program may lack microbatches."""
        return all(need <= limit * (1 + TOLERANCE) for need in self._needs(program))

    def recomputation(self, program: Program, limit: float) -> Recomputation:
        """Choose as `recompute_chunks` does, by the rounded linear relaxation: much faster, to compare programs."""
        if self.fits(program, limit):
            return Recomputation(program, {}, None, True)
        diagonals, room = self._problem(program, limit)
        if layers := self._in_graphs(program, limit):
            return Recomputation(_with_layers(program, layers), layers, None, True, diagonals.time(layers))
        return _chosen(program, diagonals, room, exact=False)

    def least(self, program: Program, limit: float) -> float:
        """Return the time that recomputation adds to the program at least, by the linear relaxation; inf where not even
        all layers recomputed fit. The program may lack microbatches.
        """
        if self.fits(program, limit):
            return 0.0
        diagonals, room = self._problem(program, limit)
        if layers := self._in_graphs(program, limit):
            return diagonals.time(layers)
        return least(diagonals.covering(room)) * diagonals.unit

    def _in_graphs(self, program: Program, limit: float) -> dict[Unit, int]:
        """Return the layers that units recompute where all of a rank's recompute alike; {} without graphs."""
        return _alike(program, limit, self._needs) if self._captures else {}

    def _problem(self, program: Program, limit: float) -> tuple[Diagonals, list[float]]:
        """Return the problem, and the memory each rank has for activations."""
        room, ranks = [], []
        for rank, (bound, static) in enumerate(zip(self._bound(program), self._static, strict=True)):
            room.append(limit * (1 + TOLERANCE) - static - _of_graphs(bound))
            ranks.append(RankNeeds(bound, rank, self._moments(program, rank, bound), self.sizes))
        return Diagonals(ranks), room

    def _bound(self, program: Program) -> list[BoundCosts]:
        """The costs of each rank's buffers, of those outside of graphs where there are such."""
        if self._captures:
            return [CostsOutsideGraphs(program, self.costs, rank) for rank in range(program.num_ranks)]
        return [BoundCosts(program, self.costs)] * program.num_ranks

    def _needs(self, program: Program) -> list[float]:
        """Return what each rank needs in all."""
        needs = []
        known: dict[int, dict[tuple[int, ...], float]] = {}
        for own, bound, static in zip(program.ranks, self._bound(program), self._static, strict=True):
            sizes, held = [self._around(own, bound)], [known.setdefault(each, {}) for each in bound.alike]
            for op in own:
                of_stage, unit = held[op[1]], op[2:]
                if op[0] == "F":
                    size = of_stage.get(unit)
                    if size is None:
                        size = of_stage[unit] = held_by(bound, op)
                    sizes.append(size)
                elif op[0] != "R":
                    sizes.append(-of_stage[unit])
            needs.append(static + _of_graphs(bound) + max(accumulate(sizes)))
        return needs

    def _moments(self, program: Program, rank: int, bound: BoundCosts) -> Moments:
        """Return the memory that the rank needs at each of its ops, and when units are saved."""
        own = program.ranks[rank]
        now, totals = self._around(own, bound), []
        begun: dict[Unit, int] = {}
        held: dict[Unit, float] = {}
        saved: dict[Unit, tuple[int, int]] = {}
        backward: dict[Unit, int] = {}
        for place, op in enumerate(own):
            unit = op.unit
            if op.kind == "F":
                begun[unit], held[unit] = place, held_by(bound, op)
                now += held[unit]
            totals.append(now)
            if op.kind in "BI":
                saved[unit], backward[unit] = (begun[unit], place + 1), place
                now -= held[unit]
        return Moments(tuple(totals), saved, backward)

    def _around(self, own: Sequence[Op], bound: BoundCosts) -> float:
        """Return what a rank has beside its units', the most of its stages."""
        if self._captures:
            return beside_units(bound, {op.stage for op in own}) if own else 0.0
        alike = {bound.alike[op.stage] for op in own}
        for stage in alike - self._beside.keys():
            self._beside[stage] = beside_units(bound, [stage])
        return max((self._beside[stage] for stage in alike), default=0.0)


def _of_graphs(bound: BoundCosts) -> float:
    return bound.graphs() if isinstance(bound, CostsOutsideGraphs) else 0.0


def _room(program: Program, costs: Costs, limit: float) -> list[float]:
    """Return the memory that each rank has beside its weights and optimizer."""
    static = (costs.static_memory(program.pieces_of_rank(rank)) for rank in range(program.num_ranks))
    return [limit * (1 + TOLERANCE) - own for own in static]


def _alike(program: Program, limit: float, needs_of: Callable[[Program], Sequence[float]]) -> dict[Unit, int]:
    """Return how many layers of each unit recompute, of a rank's units equally many and as few as it needs; {} where
    that does not fit. needs_of: what each rank of a program needs in all."""
    runs, counts = layer_runs(program), [0] * program.num_ranks
    while True:
        layers = {
            op.unit: min(count, len(runs[op.stage]))
            for count, ops in zip(counts, program.ranks, strict=True)
            for op in ops
            if op.kind == "F"
        }
        needs = needs_of(_with_layers(program, layers))
        above = [rank for rank, need in enumerate(needs) if need > limit * (1 + TOLERANCE)]
        if not above:
            return {unit: count for unit, count in layers.items() if count}
        if any(counts[rank] == max(map(len, runs)) for rank in above):
            return {}
        for rank in above:
            counts[rank] += 1


def _chosen(program: Program, diagonals: Diagonals, room: Sequence[float], exact: bool = True) -> Recomputation:
    """Choose layers that cover the needs of all ranks and, of these, those that each rank needs itself; all layers if
    nothing covers the needs.
    """
    solution = solve(diagonals.covering(room), exact)
    shared = diagonals.everything if solution is None else diagonals.layers(solution.values)
    own = (rank.trimmed(shared, free) for rank, free in zip(diagonals.ranks, room, strict=True))
    layers = {unit: count for pairs in own for unit, count in pairs if count}
    time = diagonals.unit * (diagonals.most.sum() if solution is None else solution.objective)
    return Recomputation(_with_layers(program, layers), layers, solution, solution is not None, time)


def _with_layers(program: Program, layers: Mapping[Unit, int]) -> Program:
    """Return the program with the first layers of each unit recomputed, as many as `layers` says: a backward starts
    with the last layer, and when it reaches those that recompute much, the others' activations are freed.
    """
    known = {
        (stage, count): Activations(runs[:count])
        for stage, runs in enumerate(layer_runs(program))
        for count in range(1, len(runs) + 1)
    }
    chosen = {unit: known[unit.stage, count] for unit, count in sorted(layers.items()) if count}
    return replace(program, activations={**program.activations, **chosen})
