"""The search for AdaPipe's stages: how many layers each has, and what they recompute, under a memory limit.

The dynamic programs count memory op by op, with an estimate of the room beside what units keep; what is chosen in the
end is measured by the memory sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, permutations
from math import inf

from helixpipe.common.errors import ScheduleError
from helixpipe.costs.by_hand import unit_costs
from helixpipe.lowering.bound import BoundCosts, Timers
from helixpipe.lowering.build import build_graph
from helixpipe.lowering.compiled import earliest_times_by
from helixpipe.lowering.lower import lowered_valid, scheduled
from helixpipe.planning.catalogue import Shape
from helixpipe.planning.memory.early import peak_memory, place_early
from helixpipe.planning.memory.recompute_choice import (
    CHOICES,
    TOLERANCE,
    Runs,
    StageRecompute,
    make_stage,
)
from helixpipe.planning.order.splits import Table, cheapest_split, least_bottleneck, rounded, splits_by_time
from helixpipe.program.costs import Costs
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import Stage
from helixpipe.program.transfer import Transfer
from helixpipe.simulate.graph_memory import captures
from helixpipe.simulate.needs import beside_eager

Layout = tuple[tuple[Runs, ...], ...]
"""What each layer of each stage recomputes."""

StageKey = tuple[tuple[Runs, ...], int, int]
"""What each layer of a stage recomputes, the first one's number, and the rank."""

CANDIDATES, STARTS, FINALISTS = 8, 2, 3
"""Layouts that are simulated, of those how many are bettered step by step, and how many of all these are simulated with
what is recomputed in idle time."""

TRIES = 3
"""How often layouts are looked for: what CUDA graphs have depends on the layout."""

BUDGET = 25_000
"""Forwards that are simulated to better one layout: half a second."""


class Stages:
    """The possible stages of each rank: up to `most` layers, with the cheapest choice of what they recompute.

    free: recomputation is taken to cost no time, and the choices are those that need the least memory. graphs: of each
    rank, what its CUDA graphs have a layer beside what its ops would have without.
    """

    def __init__(
        self, shape: Shape, costs: Costs, limit: float, most: int, graphs: Sequence[float], free: bool = False
    ):
        p = shape.ranks
        places = {
            ends: shape.tables.choices(costs, most, *ends, free, shape.layer_kinds)
            for ends in {(rank == 0, rank == p - 1) for rank in range(p)}
        }
        self.most = most
        self.places = [places[rank == 0, rank == p - 1] for rank in range(p)]
        self.units = [min(p - rank, shape.microbatches) for rank in range(p)]
        always = {key: [0.0, *(place.always(count) for count in range(1, most + 1))] for key, place in places.items()}
        self._always = [
            [one + count * graphs[rank] for count, one in enumerate(always[rank == 0, rank == p - 1])]
            for rank in range(p)
        ]
        self.choices: list[list[StageRecompute | None]] = [
            [None, *(self._choice(rank, count, limit) for count in range(1, most + 1))] for rank in range(p)
        ]
        self.again: Table = [[inf if each is None else each.time for each in row] for row in self.choices]
        self.times: Table = [
            [count * place.forward_and_backward + place.ends + again for count, again in enumerate(row)]
            for place, row in zip(self.places, self.again, strict=True)
        ]

    def _choice(self, rank: int, count: int, limit: float) -> StageRecompute | None:
        return self.places[rank].cheapest(count, self.units[rank], limit - self._always[rank][count])

    def memory(self) -> Table:
        """Return the least memory of each rank for each number of layers."""
        return [
            [inf, *(place.smallest(n, units) + always[n] for n in range(1, self.most + 1))]
            for place, units, always in zip(self.places, self.units, self._always, strict=True)
        ]

    def layout(self, layers: Sequence[int]) -> Layout | None:
        """Return what each layer of each stage recomputes; None if a stage does not fit."""
        chosen = []
        for rank, count in enumerate(layers):
            choice = self.choices[rank][count]
            if choice is None:
                return None
            chosen.append(tuple(self.places[rank].kinds(choice)))
        return tuple(chosen)


class LayoutSearch:
    """Layouts that may be the best for a shape, and which is. order: 1F1B's, of a stage a rank."""

    def __init__(self, name: str, shape: Shape, costs: Costs, order: tuple[tuple[Op, ...], ...]):
        self.name = name
        self.shape, self.costs = shape, costs
        self.limit = inf if shape.memory_limit is None else shape.memory_limit
        self._order = order
        self._most = shape.layers - shape.ranks + 1
        self._made: dict[StageKey, Stage] = {}
        self._times: dict[tuple[object, ...], float] = {}  # of ops of a stage, of messages
        # The same ops and messages whatever the stages: which layers they have is not looked at.
        anything = (((),) * self._most, *(((),),) * (shape.ranks - 1))
        self._graph = build_graph(self.program(anything))
        self._graphs = self._in_graphs(self._spread(CHOICES[0]))

    def program(self, layout: Layout) -> Program:
        stages, first = [], 0
        for rank, layers in enumerate(layout):
            stages.append(self._stage(layers, first, rank))
            first += len(layers)
        return self.shape.in_chunks(Program(self.name, tuple(stages), self._order, self.shape.workload))

    def _stage(self, layers: tuple[Runs, ...], first: int, rank: int) -> Stage:
        """Return the stage of a rank that begins with layer `first`; layouts that are tried have most stages in
        common."""
        key = layers, first, rank
        if key not in self._made:
            kinds = self.shape.layer_kinds
            ends = rank == 0, rank == self.shape.ranks - 1
            self._made[key] = make_stage(layers, first, *ends, kinds[first:] or kinds)
        return self._made[key]

    def _spread(self, runs: Runs) -> Layout:
        """Return stages as even as can be, whose layers all recompute `runs`."""
        fewest, more = divmod(self.shape.layers, self.shape.ranks)
        return tuple((runs,) * (fewest + (rank < more)) for rank in range(self.shape.ranks))

    def _in_graphs(self, layout: Layout) -> list[float]:
        """Return what graphs have in each rank, a layer, beside what its ops would have without."""
        if self.limit == inf or not captures(self.shape.workload, self.costs):
            return [0.0] * self.shape.ranks
        more = beside_eager(lowered_valid(self.program(layout), self.costs), self.costs)
        return [own / len(layers) for own, layers in zip(more, layout, strict=True)]

    def fits(self, program: Program) -> bool:
        bound = self.limit + TOLERANCE * abs(self.limit)
        return self.limit == inf or max(peak_memory(program, self.costs)) <= bound

    # ------------------------------------------------------------------------------------------------ what may be best

    def even(self) -> list[Layout]:
        """Return even stages that recompute nothing or, if that does not fit, everything: as 1f1b would have."""
        p, layers = self.shape.ranks, self.shape.layers
        if layers % p:
            return []
        layouts = [((runs,) * (layers // p),) * p for runs in (CHOICES[0], CHOICES[-1])]
        return [layout for layout in layouts if self.fits(self.program(layout))][:1]

    def uneven(self, stages: Stages) -> list[Layout]:
        """Return layouts sorted by the paper's time of a step, preceded by even stages if they fit."""
        p, m, layers = self.shape.ranks, self.shape.microbatches, self.shape.layers
        even = [(layers // p,) * p] if layers % p == 0 else []
        splits = [split.layers for split in splits_by_time(stages, layers, m)[: CANDIDATES - 1]]
        return [layout for layout in map(stages.layout, (*even, *splits)) if layout is not None]

    def stages(self) -> Stages:
        """First only stages of few layers are looked at; the best split says how many a stage may have at most."""
        m, layers = self.shape.microbatches, self.shape.layers
        most = min(self._most, 2 * -(-layers // self.shape.ranks))
        while True:
            stages = Stages(self.shape, self.costs, self.limit, most, self._graphs)
            layer_time = stages.places[0].forward_and_backward
            splits = splits_by_time(stages, layers, m)
            if not splits:
                enough = 2 * most
            elif m == 1 and splits[0].again == 0:
                return stages  # all splits that recompute nothing take the same time
            elif m == 1 or layer_time == 0:
                enough = self._most
            else:
                slowest = splits[0].slowest + splits[0].again / (m - 1)  # a slower stage could not be made up for
                enough = int(slowest * (1 + TOLERANCE) / layer_time)
            enough = min(enough, self._most)
            if enough <= most:
                return stages
            most = enough

    def least_memory(self) -> Program:
        """Return the program whose largest rank needs the least memory over all splits and choices, by estimates.
        Raises ScheduleError if that does not fit.
        """
        layers = self.shape.layers
        needed = least_bottleneck(self._free_stages(inf).memory(), layers)
        stages = self._free_stages(needed)
        split = cheapest_split(stages, layers, inf)
        layout = stages.layout(split.layers) if split is not None else None
        assert layout is not None, "what needs the least memory keeps to it"
        program = self.program(layout)
        if not self.fits(program):
            raise self._too_little_memory(max(peak_memory(program, self.costs)))
        return program

    def _free_stages(self, limit: float) -> Stages:
        return Stages(self.shape, self.costs, limit, self._most, self._graphs, free=True)

    def _too_little_memory(self, needed: float) -> ScheduleError:
        return ScheduleError(
            f"adapipe: no split of {self.shape.layers} layers over {self.shape.ranks} ranks fits: with the best choice "
            f"of what to recompute a rank needs {_amount(needed, self.costs.memory_unit)}, but the memory limit is "
            f"{_amount(self.limit, self.costs.memory_unit)}."
        )

    # ---------------------------------------------------------------------------------------------------- which is best

    def best(self) -> Program:
        """Return the fastest program by simulation, with recomputation moved into idle time as `schedules.build` will
        do.

        The best of the paper's candidates are improved by moving single layers. Even stages are always compared.
        """
        even = self.even()
        rated = {layout: self._time(layout) for layout in even}
        for _ in range(TRIES if any(self._graphs) else 1):
            stages = self.stages()
            own = {layout: self._time(layout) for layout in self.uneven(stages)}
            for layout in sorted(own, key=own.__getitem__)[:STARTS]:
                own |= self._climb(stages, layout, own[layout])
            rated |= own
            self._graphs = self._in_graphs(min(own, key=own.__getitem__) if own else self._spread(CHOICES[-1]))
        fitting = [layout for layout in sorted(rated, key=rated.__getitem__) if self.fits(self.program(layout))]
        if not fitting:
            return self.least_memory()
        if not self.shape.recompute.recompute_early:
            return self.program(fitting[0])
        finalists = dict.fromkeys((*fitting[:FINALISTS], *even))
        return self.program(min(finalists, key=lambda layout: self._time_placed(self.program(layout))))

    def _climb(self, stages: Stages, start: Layout, time: float) -> dict[Layout, float]:
        """Return the layouts, with their times, reached by moving one layer at a time from one stage to another, each
        faster than the one before.
        """
        times: dict[Layout, float] = {}
        p = self.shape.ranks
        moves = sorted(permutations(range(p), 2), key=lambda pair: abs(pair[0] - pair[1]))
        trials = BUDGET // (p * self.shape.microbatches)
        layers = [len(stage) for stage in start]
        better = True
        while better:
            better = False
            for source, target in moves:
                if layers[source] == 1 or layers[target] == stages.most:
                    continue
                moved = [count - (rank == source) + (rank == target) for rank, count in enumerate(layers)]
                layout = stages.layout(moved)
                if layout is None:
                    continue
                if trials == 0:
                    return times
                trials -= 1
                now = self._time(layout)
                if now < time:
                    times[layout] = time = now
                    layers, better = moved, True
        return times

    def _time(self, layout: Layout) -> float:
        """Return the time of a step that recomputes inside its backwards."""
        return rounded(earliest_times_by(self._graph, self._timers(layout)).makespan)

    def _timers(self, layout: Layout) -> Timers:
        """Return the times of a layout's ops and messages. Those of an op follow from its stage and its tokens, those
        of a message from its tokens where all layers are alike."""
        firsts = list(accumulate(map(len, layout), initial=0))
        keys = [(layers, first, rank) for rank, (layers, first) in enumerate(zip(layout, firsts[:-1], strict=True))]
        extents, known = self._graph.program.workload.extents, self._times
        cuts = () if len(set(self.shape.layer_kinds)) == 1 else tuple(firsts)
        bound = cache(lambda: BoundCosts(self.program(layout), self.costs))  # only where something new is asked for

        def op_time(op: Op) -> float:
            kind, stage, microbatch, chunk = op
            key = kind, keys[stage], extents[microbatch][chunk]
            time = known.get(key)
            return time if time is not None else known.setdefault(key, bound().op_time(op))

        def transfer_time(transfer: Transfer) -> float:
            key = transfer.kind, transfer.ranks, extents[transfer.unit.microbatch][transfer.unit.chunk], cuts
            time = known.get(key)
            return time if time is not None else known.setdefault(key, bound().transfer_time(transfer))

        return op_time, transfer_time

    def _time_placed(self, program: Program) -> float:
        placed = place_early(program, self.shape.costs or unit_costs(), self.shape.memory_limit)
        return rounded(scheduled(placed, self.costs).makespan)


def _amount(memory: float, unit: str) -> str:
    return f"{memory / 2**30:.4g} GiB" if unit == "bytes" else f"{memory:.6g} {unit}"
