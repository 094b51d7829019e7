"""Chooses which activations to keep, to offload and to recompute under a memory limit, for the least predicted time.

Where all fits nothing is done. Else, for each level of recomputation (none, parts of some or all layers), every rank
offloads as little as makes it fit, found by bisection, in two ways. One follows SPPO's rule (Chen et al., 2025, sec.
5): a unit's share is proportional to what can be copied in the time that hides it. That time is here the shortest of
three, because a copy in has to be hidden as well: to the end of the rank's next forward, from the start of the backward
before, and half of what lies between the unit's own forward and backward. The other offloads whole units, first those
that wait longest. Where copies would hold up ops recomputation may be cheaper. The best level is then changed rank by
rank, and in small programs the shares unit by unit, as long as the predicted step gets shorter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from helixpipe.common.errors import ScheduleError
from helixpipe.lowering.lower import lowered_valid
from helixpipe.planning.memory.early import place_early
from helixpipe.planning.memory.offload import OffloadOptions, timed, with_ahead, with_shares
from helixpipe.planning.memory.offload_hidden import Base, OffloadAmount
from helixpipe.planning.memory.recompute_choice import CHOICES, TOLERANCE, Runs, recomputing
from helixpipe.program.costs import Costs
from helixpipe.program.program import Program, Unit
from helixpipe.simulate.simulator import Simulation, simulate

Level = tuple[Runs, float]
"""The runs that layers recompute, and the share of a stage's layers that do, the first ones."""

LEVELS: tuple[Level, ...] = (((), 0.0), *((runs, share) for runs in CHOICES[1:] for share in (0.25, 0.5, 1.0)))

AMOUNTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Looked at before bisection."""

BISECTIONS = 4
NOTHING = 1e-4
"""Part of a step's time that is not worth looking for."""
SIMULATED_OPS = 100_000
"""Ops in all the simulations after which no more improvements are looked for; they take some ten seconds."""

LARGE = 1000
"""Ops of a program for which no level is simulated any more that all ranks would take longer with: on some ranks alone
it might be right."""

SMALL = 48
"""Units of a program whose shares are looked at one by one."""


@dataclass(frozen=True)
class MemoryLimits:
    """The memory a rank may use, in the costs' unit of memory: of its device, weights and optimizer included, and of
    its host.
    """

    device: float
    host: float = inf


class OffloadedProgram:
    """A program with what it offloads, on paper. shares: of each unit that offloads."""

    def __init__(self, program: Program, costs: Costs, limits: MemoryLimits, shares: Mapping[Unit, float]):
        self.program, self.costs, self.limits, self.shares = program, costs, limits, shares

    @cached_property
    def simulation(self) -> Simulation:
        return simulate(lowered_valid(self.program, self.costs), self.costs)

    @property
    def time(self) -> float:
        return self.simulation.makespan

    @cached_property
    def needs(self) -> list[float]:
        """The memory that each rank needs of its device."""
        return self.simulation.device_needs

    @cached_property
    def host_needs(self) -> list[float]:
        """The memory that each rank needs of its host."""
        return self.simulation.host_needs

    def fits_rank(self, rank: int) -> bool:
        device = self.limits.device * (1 + TOLERANCE)
        return self.needs[rank] <= device and self.host_needs[rank] <= self.limits.host

    @property
    def excess(self) -> float:
        """How far the fullest device is above the limit; 0 or below if all fit."""
        return max(self.needs) - self.limits.device * (1 + TOLERANCE)

    @property
    def fits(self) -> bool:
        return self.excess <= 0 and max(self.host_needs) <= self.limits.host * (1 + TOLERANCE)


def choose(
    program: Program,
    options: OffloadOptions,
    costs: Costs,
    limits: MemoryLimits,
    recompute: bool = True,
    early: bool = True,
) -> Program:
    """Return the program with what it offloads and recomputes to stay within the limits.

    recompute: whether recomputation may be chosen; never where the program recomputes something already. early: place
    it in idle time. Raises ScheduleError, with what would do, where nothing fits.
    """
    if program.forward_only:
        return program
    plain = OffloadedProgram(program, costs, limits, {})
    if plain.fits:
        return program
    search = _OffloadSearch(program, options, costs, limits, early)
    chosen = any(program.activations_of(unit).recompute for unit in program.units())
    tried: list[_LeastOffload] = []
    for level in LEVELS if recompute and not chosen else LEVELS[:1]:
        for longest in (False, True):
            fitting = [each.choice.time for each in tried if each.choice.fits]
            below = min(fitting) if fitting and search.large else inf
            least = search.least((level,) * program.num_ranks, longest, below)
            if least is None:
                continue
            tried.append(least)
            if least.choice.fits and least.choice.time <= plain.time * (1 + NOTHING):
                return search.improved(least.choice).program  # nothing could be faster
    if any(all(each.penalty(rank) == inf for each in tried) for rank in range(program.num_ranks)):
        raise ScheduleError(_sentence(min((each.choice for each in tried), key=lambda each: each.excess), costs))
    best = search.mixed(tried)
    if not best.fits:
        raise ScheduleError(_sentence(best, costs))
    return search.improved(best).program


def _sentence(closest: OffloadedProgram, costs: Costs) -> str:
    unit = 2.0**30 if costs.memory_unit == "bytes" else 1.0
    name = "GiB" if costs.memory_unit == "bytes" else costs.memory_unit
    if closest.excess > 0:
        need = max(closest.needs)
        return (
            f"--offload-activations auto: even with all that can be offloaded and recomputed a rank needs "
            f"{need / unit:.4g} {name}, {closest.excess / unit:.3g} more than it may use; more ranks, smaller "
            "microbatches or more chunks would help."
        )
    return (
        f"--offload-activations auto: the host's memory would have to hold {max(closest.host_needs) / unit:.4g} {name} "
        f"a rank, but --host-memory leaves it {closest.limits.host / unit:.4g}."
    )


class _OffloadSearch:
    def __init__(self, program: Program, options: OffloadOptions, costs: Costs, limits: MemoryLimits, early: bool):
        self.given, self.options, self.costs, self.limits = program, options, costs, limits
        self.early = early
        self.left = SIMULATED_OPS
        self.large = sum(map(len, program.ranks)) > LARGE
        self._bases: dict[tuple[Level, ...], Base] = {}

    def least(self, levels: tuple[Level, ...], longest: bool = False, below: float = inf) -> _LeastOffload | None:
        """Return the least offloading that makes each rank fit with these levels of recomputation, one for each rank;
        ranks that do not fit offload everything. longest: see `OffloadAmount`. None: no stage has what is to be
        recomputed, or the step takes longer than `below` with nothing offloaded.
        """
        base = self._base(levels)
        if base is None or base.times.makespan >= below:
            return None
        ranks = range(self.given.num_ranks)
        low, high, fitting = [1.0] * len(ranks), [1.0] * len(ranks), [False] * len(ranks)
        best: OffloadedProgram | None = None
        for amount in reversed(AMOUNTS):  # with more, what leaves last and comes back first may take more room
            choice = self._choice(base, [amount] * len(ranks), longest)
            for rank in ranks:
                if choice.fits_rank(rank):
                    high[rank], fitting[rank], low[rank] = amount, True, amount
                elif low[rank] == high[rank]:
                    low[rank] = amount
            if choice.fits and (best is None or choice.time <= best.time):
                best, most = choice, amount
        for _ in range(BISECTIONS):
            middle = [(a + b) / 2 if fits else b for a, b, fits in zip(low, high, fitting, strict=True)]
            if middle == high:
                break
            choice = self._choice(base, middle, longest)
            for rank in ranks:
                (high if choice.fits_rank(rank) else low)[rank] = middle[rank]
        last = self._choice(base, high, longest)
        if best is not None and not (last.fits and last.time <= best.time * (1 + NOTHING)):
            return _LeastOffload(levels, base, [OffloadAmount(most, longest)] * len(ranks), best)
        return _LeastOffload(levels, base, [OffloadAmount(amount, longest) for amount in high], last)

    def mixed(self, tried: Sequence[_LeastOffload]) -> OffloadedProgram:
        """Give each rank the level of recomputation that costs it least, then try others as long as that helps."""
        fitting = [each.choice for each in tried if each.choice.fits]
        best = min(fitting, key=lambda choice: choice.time) if fitting else None
        ranks = range(self.given.num_ranks)
        orders = [sorted(tried, key=lambda each, at=rank: each.penalty(at)) for rank in ranks]  # type: ignore[misc]
        current = [order[0] for order in orders]
        choice = self._mix(current)
        if best is not None and (not choice.fits or best.time < choice.time):
            uniform = next(each for each in tried if each.choice is best)
            choice, current = best, [uniform] * len(current)
        better = True
        while better and self.left > 0:
            better = False
            for rank in ranks:
                for other in orders[rank]:
                    if self.left <= 0 or other is current[rank] or other.penalty(rank) == inf:
                        continue
                    changed = [*current[:rank], other, *current[rank + 1 :]]
                    new = self._mix(changed)
                    if new.fits and (not choice.fits or new.time < choice.time * (1 - NOTHING)):
                        choice, current, better = new, changed, True
        return choice

    def _mix(self, chosen: Sequence[_LeastOffload]) -> OffloadedProgram:
        levels = tuple(each.levels[rank] for rank, each in enumerate(chosen))
        base = self._base(levels)
        if base is None:
            return chosen[0].choice
        choice = self._shared(base.program, base.shares([each.places[rank] for rank, each in enumerate(chosen)]), base)
        if choice.fits:
            return choice
        least = self.least(levels)  # times have changed, and with them what is there at once
        return least.choice if least is not None else choice

    def improved(self, best: OffloadedProgram) -> OffloadedProgram:
        """Unit by unit in small programs: less or more of it offloaded, as long as the step gets shorter."""
        units = sorted(best.program.units())
        if len(units) > SMALL:
            return best
        better = True
        while better and self.left > 0:
            better = False
            for unit in units:
                for share in (0.0, 0.5, 1.0):
                    if self.left <= 0 or share == best.shares.get(unit, 0.0):
                        continue
                    shares = {**best.shares, unit: share}
                    choice = self._shared(best.program, {u: s for u, s in shares.items() if s > 0})
                    if choice.fits and choice.time < best.time * (1 - NOTHING):
                        best, better = choice, True
        return best

    def _base(self, levels: tuple[Level, ...]) -> Base | None:
        if levels not in self._bases:
            of_stage = {op.stage: levels[rank] for rank, ops in enumerate(self.given.ranks) for op in ops}
            stages = tuple(recomputing(stage, *of_stage[n]) for n, stage in enumerate(self.given.stages))
            program = replace(self.given, stages=stages)
            if stages == self.given.stages and any(level[0] for level in levels):
                return None
            if self.early and any(stage.recompute for stage in stages):
                program = place_early(program, self.costs, self.limits.device, offloads=True)
            self._bases[levels] = Base(program, self.options, self.costs)
        return self._bases[levels]

    def _choice(self, base: Base, amounts: Sequence[float], longest: bool) -> OffloadedProgram:
        return self._shared(base.program, base.shares([OffloadAmount(amount, longest) for amount in amounts]), base)

    def _shared(self, program: Program, shares: Mapping[Unit, float], base: Base | None = None) -> OffloadedProgram:
        plain = replace(program, activations={})
        graph, times = (base.graph, base.times) if base is not None else timed(plain, self.costs)
        made = with_shares(program, self.options, shares, self.costs)
        self.left -= sum(map(len, program.ranks))
        return OffloadedProgram(with_ahead(made, self.costs, graph, times), self.costs, self.limits, shares)


@dataclass(frozen=True)
class _LeastOffload:
    """The least offloading with some levels of recomputation.

    places: of each rank. choice: the program with these.
    """

    levels: tuple[Level, ...]
    base: Base
    places: Sequence[OffloadAmount]
    choice: OffloadedProgram

    def penalty(self, rank: int) -> float:
        """Return the time that the rank spends on recomputation and, about, waiting for copies; infinite where it does
        not fit.
        """
        if not self.choice.fits_rank(rank):
            return inf
        return self.base.recomputing[rank] + self.base.exposed(rank, self.places[rank])
