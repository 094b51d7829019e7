"""AdaPipe: 1F1B with uneven stages that each recompute what the memory of their rank asks for.

Sun et al., "AdaPipe: Optimizing Pipeline Parallelism with Adaptive Recomputation and Partitioning", ASPLOS 2024. The
first ranks of 1F1B keep the most microbatches and so recompute the most; they get fewer layers in return.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from math import inf

from helixpipe.common.errors import ScheduleError
from helixpipe.costs.by_hand import PieceTimes, unit_costs
from helixpipe.lowering.graph import build_graph, collector_paused, list_schedule
from helixpipe.lowering.lower import timers
from helixpipe.planning.catalogue import NoOptions, Shape
from helixpipe.planning.recompute import peak_memory, place_early
from helixpipe.planning.recompute_choice import CHOICES, TOLERANCE, Choice, LayerChoices, Runs, make_stage
from helixpipe.program.costs import Costs
from helixpipe.program.program import Program
from schedules.one_f_one_b import one_f_one_b_order

Table = list[list[float]]
"""A number for each stage and each number of layers it may have; infinite where it cannot have them."""

Layout = tuple[tuple[Runs, ...], ...]
"""For each stage, for each of its layers, what it recomputes."""

CANDIDATES, STARTS, FINALISTS = 8, 2, 3
"""Layouts that are simulated, of those how many are bettered step by step, and how many of all these are simulated with
what is recomputed in idle time."""

BUDGET = 25_000
"""Forwards that are simulated to better one layout: half a second."""


def adapipe(shape: Shape, options: NoOptions) -> Program:
    """1F1B whose stages have as many whole layers, and recompute as much, as makes the step shortest (AdaPipe).

    Each layer recomputes nothing, its MLP, core attention, all but that, or all. Rank r keeps min(p-r, m) microbatches
    within `Shape.memory_limit`. Bubble: at most that of 1F1B with even stages, where those fit. Raises ScheduleError
    for fewer layers than ranks, when nothing fits (with what is needed), and when told what to recompute.
    """
    p = shape.ranks
    if shape.recompute.granularity is not None:
        flag = "activations" if shape.recompute.recompute_activations else "granularity"
        raise ScheduleError(
            f"adapipe chooses itself what each stage recomputes, by --memory-limit or the GPU's memory: leave "
            f"--recompute-{flag} out."
        )
    if shape.layers < p:
        raise ScheduleError(
            f"--num-layers {shape.layers} is too few for adapipe on {p} pipeline ranks, which each have at least one "
            f"whole layer; valid are {p} and more."
        )
    with collector_paused():
        search = Search(shape, shape.costs or PieceTimes())
        return search.best()


@dataclass(frozen=True)
class Split:
    """layers: of each stage. slowest: longest time of a stage, a microbatch. again: time of all recomputation."""

    layers: tuple[int, ...]
    slowest: float
    again: float


class Stages:
    """What each stage could be: up to `most` layers, with the cheapest choice of what they recompute.

    free: recomputation is taken to cost no time, and the choices are those that need the least memory.
    """

    def __init__(self, shape: Shape, costs: Costs, limit: float, most: int, free: bool = False):
        p = shape.ranks
        places = {
            (rank == 0, rank == p - 1): LayerChoices(costs, most, embed=rank == 0, head=rank == p - 1, free=free)
            for rank in range(p)
        }
        self.most = most
        self.places = [places[rank == 0, rank == p - 1] for rank in range(p)]
        self.units = [min(p - rank, shape.microbatches) for rank in range(p)]
        statics = {key: [0.0, *(place.static(count) for count in range(1, most + 1))] for key, place in places.items()}
        self._static = [statics[rank == 0, rank == p - 1] for rank in range(p)]
        self.choices: list[list[Choice | None]] = [
            [None, *(self._choice(rank, count, limit) for count in range(1, most + 1))] for rank in range(p)
        ]
        self.again: Table = [[inf if each is None else each.time for each in row] for row in self.choices]
        self.times: Table = [
            [count * place.forward_and_backward + place.ends + again for count, again in enumerate(row)]
            for place, row in zip(self.places, self.again, strict=True)
        ]

    def _choice(self, rank: int, count: int, limit: float) -> Choice | None:
        return self.places[rank].cheapest(count, self.units[rank], limit - self._static[rank][count])

    def memory(self) -> Table:
        """The least that a rank needs."""
        return [
            [inf, *(place.smallest(n, units) + static[n] for n in range(1, self.most + 1))]
            for place, units, static in zip(self.places, self.units, self._static, strict=True)
        ]

    def layout(self, layers: Sequence[int]) -> Layout | None:
        """None where one of the stages does not fit."""
        chosen = []
        for rank, count in enumerate(layers):
            choice = self.choices[rank][count]
            if choice is None:
                return None
            chosen.append(tuple(self.places[rank].kinds(choice)))
        return tuple(chosen)


class Search:
    """Layouts that may be the best for a shape, and which is."""

    def __init__(self, shape: Shape, costs: Costs):
        self.shape, self.costs = shape, costs
        self.limit = inf if shape.memory_limit is None else shape.memory_limit
        self._order = one_f_one_b_order(shape.ranks, shape.microbatches)
        self._most = shape.layers - shape.ranks + 1
        # The same ops and messages whatever the stages: which layers they have is not looked at.
        anything = (((),) * self._most, *(((),),) * (shape.ranks - 1))
        self._graph = build_graph(self.program(anything))

    def program(self, layout: Layout) -> Program:
        stages, first, p = [], 0, self.shape.ranks
        for rank, layers in enumerate(layout):
            stages.append(make_stage(layers, first, embed=rank == 0, head=rank == p - 1))
            first += len(layers)
        return Program("adapipe", tuple(stages), self._order, self.shape.microbatches)

    def fits(self, program: Program) -> bool:
        bound = self.limit + TOLERANCE * abs(self.limit)
        return self.limit == inf or all(
            peak_memory(program, self.costs, rank) <= bound for rank in range(self.shape.ranks)
        )

    # ------------------------------------------------------------------------------------------------ what may be best

    def even(self) -> list[Layout]:
        """Even stages that recompute nothing or, where that does not fit, everything: what 1f1b would be given."""
        p, layers = self.shape.ranks, self.shape.layers
        if layers % p:
            return []
        layouts = [((runs,) * (layers // p),) * p for runs in (CHOICES[0], CHOICES[-1])]
        return [layout for layout in layouts if self.fits(self.program(layout))][:1]

    def uneven(self, stages: Stages) -> list[Layout]:
        """By the time of a step as the paper counts it, best first; before them even stages, if they fit somehow."""
        p, m, layers = self.shape.ranks, self.shape.microbatches, self.shape.layers
        even = [(layers // p,) * p] if layers % p == 0 else []
        splits = [split.layers for split in splits_by_time(stages, layers, m)[: CANDIDATES - 1]]
        return [layout for layout in map(stages.layout, (*even, *splits)) if layout is not None]

    def stages(self) -> Stages:
        """First only stages of few layers are looked at; the best split says how many a stage may have at most."""
        m, layers = self.shape.microbatches, self.shape.layers
        most = min(self._most, 2 * -(-layers // self.shape.ranks))
        while True:
            stages = Stages(self.shape, self.costs, self.limit, most)
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

    def too_little_memory(self) -> ScheduleError:
        stages = Stages(self.shape, self.costs, self.limit, self._most, free=True)
        needed = _least_bottleneck(stages.memory(), self.shape.layers)
        return ScheduleError(
            f"adapipe: no split of {self.shape.layers} layers over {self.shape.ranks} ranks fits: with the best choice "
            f"of what to recompute a rank needs {_amount(needed, self.costs.memory_unit)}, but the memory limit is "
            f"{_amount(self.limit, self.costs.memory_unit)}."
        )

    # ---------------------------------------------------------------------------------------------------- which is best

    def best(self) -> Program:
        """The fastest as simulated, with what it recomputes moved into idle time as `schedules.build` will do.

        Of the paper's candidates the best are bettered by moving single layers. Even stages are always compared.
        """
        even, stages = self.even(), self.stages()
        rated = {layout: self._time(layout) for layout in (*even, *self.uneven(stages))}
        for layout in sorted(rated, key=rated.__getitem__)[:STARTS]:
            rated |= self._climb(stages, layout, rated[layout])
        fitting = [layout for layout in sorted(rated, key=rated.__getitem__) if self.fits(self.program(layout))]
        if not fitting:
            raise self.too_little_memory()
        if not self.shape.recompute.recompute_early:
            return self.program(fitting[0])
        finalists = dict.fromkeys((*fitting[:FINALISTS], *even))
        return self.program(min(finalists, key=lambda layout: self._time_placed(self.program(layout))))

    def _climb(self, stages: Stages, start: Layout, time: float) -> dict[Layout, float]:
        """The layouts, with their times, that moving one layer at a time from one stage to another leads to, each
        faster than the one before."""
        found: dict[Layout, float] = {}
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
                    return found
                trials -= 1
                now = self._time(layout)
                if now < time:
                    found[layout] = time = now
                    layers, better = moved, True
        return found

    def _time(self, layout: Layout) -> float:
        """Of a step that recomputes inside its backwards."""
        return _rounded(list_schedule(self._graph, *timers(self.program(layout), self.costs)).makespan)

    def _time_placed(self, program: Program) -> float:
        placed = place_early(program, self.shape.costs or unit_costs(), self.shape.memory_limit)
        return _rounded(list_schedule(build_graph(placed), *timers(placed, self.costs)).makespan)


def _rounded(time: float) -> float:
    """Without the last digits' rounding noise."""
    return float(f"{time:.9g}")


def _amount(memory: float, unit: str) -> str:
    return f"{memory / 2**30:.4g} GiB" if unit == "bytes" else f"{memory:.6g} {unit}"


# ----------------------------------------------------------------------------------------- dynamic programs over stages


def splits_by_time(stages: Stages, layers: int, m: int) -> list[Split]:
    """The best split and those that trade the slowest stage for more or less recomputation, best first."""
    least = _least_bottleneck(stages.times, layers)
    if least == inf:
        return []
    found: dict[tuple[int, ...], Split] = {}
    fastest = _cheapest_split(stages, layers, least)
    cheapest = _cheapest_split(stages, layers, inf)
    if fastest is None or cheapest is None:
        raise AssertionError("a split with the least bottleneck exists")
    best = _objective(fastest, m)
    bound = inf if m == 1 else least + (fastest.again - cheapest.again) / (m - 1)
    while True:
        split = _cheapest_split(stages, layers, bound)
        if split is None:
            break
        found[split.layers] = split
        best = min(best, _objective(split, m))
        other = _cheapest_split(stages, layers, bound, large_first=True)
        if other is not None:
            found[other.layers] = other
        if split.again + (m - 1) * least >= best:
            break
        bound = split.slowest * (1 - 2 * TOLERANCE)
    return sorted(found.values(), key=lambda each: _rounded(_objective(each, m)))


def _objective(split: Split, m: int) -> float:
    """The time of a step, less once through all stages without recomputation, which is the same for all."""
    return split.again + (m - 1) * split.slowest


def _cheapest_split(stages: Stages, layers: int, slowest: float, large_first: bool = False) -> Split | None:
    """The split whose stages take no longer than `slowest` and recompute the least; then the one whose stages' times
    are most alike. large_first: of equals, the one whose later stages are smaller. None where there is none."""
    bound = slowest + TOLERANCE * abs(slowest)
    step = max((each for row in stages.again for each in row if each < inf), default=0.0) * TOLERANCE or 1.0
    reached: dict[int, tuple[int, float]] = {0: (0, 0.0)}  # layers so far -> recomputation in steps, squared times
    taken: list[dict[int, int]] = []
    for rank, row in enumerate(stages.times):
        allowed = [
            (count, round(stages.again[rank][count] / step), time * time)
            for count, time in enumerate(row)
            if count and time <= bound and time < inf
        ]
        if large_first:
            allowed.reverse()
        remaining = len(stages.times) - rank - 1
        found: dict[int, tuple[int, float]] = {}
        last: dict[int, int] = {}
        for before, (again, squares) in reached.items():
            for count, more, square in allowed:
                now = before + count
                if now > layers - remaining or (not remaining and now != layers):
                    continue
                cost = (again + more, squares + square)
                if now not in found or cost < found[now]:
                    found[now], last[now] = cost, count
        reached = found
        taken.append(last)
    if layers not in reached:
        return None
    split = []
    left = layers
    for last in reversed(taken):
        split.append(last[left])
        left -= last[left]
    split.reverse()
    times = [stages.times[rank][count] for rank, count in enumerate(split)]
    return Split(tuple(split), max(times), sum(stages.again[rank][count] for rank, count in enumerate(split)))


def _least_bottleneck(values: Table, layers: int) -> float:
    """The least that the largest value of a stage can be; infinite where no split is possible."""
    reached = {0: -inf}
    for row in values:
        found: dict[int, float] = {}
        for before, largest in reached.items():
            for count in range(1, min(len(row) - 1, layers - before) + 1):
                now = max(largest, row[count])
                if now < found.get(before + count, inf):
                    found[before + count] = now
        reached = found
    return reached.get(layers, inf)
