"""Watches the speeds of a run's ranks, links and copies, and says what has become slower and what it costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from helixpipe.adapt.changes import ChangePoint
from helixpipe.adapt.measured_costs import MeasuredCosts, measured_costs, slowed
from helixpipe.adapt.reports import Expected, Link, Observation, RankTimes, Stage
from helixpipe.lowering.project import LoweredProgram
from helixpipe.program.costs import Costs
from helixpipe.program.program import Program
from helixpipe.simulate.simulator import simulate

LEAST_COST = 0.03
"""The share of a step that a change must cost, or give back, to be told and planned for."""


class Part(NamedTuple):
    """A part of a run that may be slow: `rank` (its ops), `link` (from a rank to another) or `copies` of a rank."""

    kind: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        if self.kind == "link":
            return f"rank {self.ranks[0]}'s link to rank {self.ranks[1]}"
        return f"rank {self.ranks[0]}" + ("'s copies to its host" if self.kind == "copies" else "")


@dataclass(frozen=True)
class Slow:
    """A part that takes `factor` times as long as it did at first."""

    part: Part
    factor: float

    @property
    def speed(self) -> float:
        return 1 / self.factor

    def __str__(self) -> str:
        verb = "are" if self.part.kind == "copies" else "is"
        return f"{self.part} {verb} at {self.speed:.2f} of its speed"


@dataclass(frozen=True)
class Change:
    """What one observation has shown to be different from before.

    step: of the observation. parts: that have changed, as they are now. slow: all that are slow now. cost: how many
    times as long a step takes as with all parts as they were at first. before: the same before this change.
    """

    step: int
    parts: tuple[Slow, ...]
    slow: tuple[Slow, ...]
    cost: float
    before: float

    @property
    def matters(self) -> bool:
        return abs(self.cost / self.before - 1) >= LEAST_COST

    def __str__(self) -> str:
        told = [f"{each.part} has its first speed again" if each.factor == 1.0 else str(each) for each in self.parts]
        more = f" and {len(told) - 3} more" if len(told) > 3 else ""
        return f"{', '.join(told[:3])}{more}; a step takes {self.cost:.2f} times as long as at first"


class Monitor:
    """Takes in observations of a run, one after another. costs: what a step was expected to take."""

    def __init__(self, lowered: LoweredProgram, costs: Costs):
        self.base = costs
        self.cost = 1.0
        self.last: Observation | None = None
        self._parts: dict[Part, ChangePoint] = {}
        self._stages: dict[Stage, list[float]] = defaultdict(list)
        self._at_restart: dict[int, float] = {}  # factors of ranks when the times of stages were taken
        self._measured_in = lowered.program
        self.run(lowered)

    def run(self, lowered: LoweredProgram) -> None:
        """Take the observations that follow as of this program."""
        self._expected = Expected(lowered, self.base)
        if _arithmetic(lowered.program) != _arithmetic(self._measured_in):
            for series in self._parts.values():
                series.restart()
            self._stages.clear()
            self._at_restart = {part.ranks[0]: own.factor for part, own in self._parts.items() if part.kind == "rank"}
            self._measured_in = lowered.program

    @property
    def lowered(self) -> LoweredProgram:
        return self._expected.lowered

    def take(self, reports: Sequence[RankTimes]) -> Change | None:
        """Take in a step. Returns what has changed, or None where nothing has that matters."""
        self.last = seen = self._expected.observation(reports)
        changed = [part for part, value in _figures(seen).items() if self._series(part).add(value)]
        if not all(self._series(part).known for part in self._parts if part.kind == "rank"):
            for key, ratio in seen.stages.items():
                self._stages[key].append(ratio)
        if not changed:
            return None
        before, self.cost = self.cost, self._cost()
        told = tuple(Slow(part, self._parts[part].factor) for part in changed)
        change = Change(seen.step, told, self.slow, self.cost, before)
        return change if change.matters else None

    @property
    def measured_in(self) -> Program:
        """The program in which the times of stages were taken."""
        return self._measured_in

    @property
    def known(self) -> bool:
        """Whether the speeds of all ranks are known."""
        ranks = [part for part in self._parts if part.kind == "rank"]
        return len(ranks) == self._measured_in.num_ranks and all(self._parts[part].known for part in ranks)

    @property
    def slow(self) -> tuple[Slow, ...]:
        """The parts that are not as they were at first, the slowest first."""
        slow = [Slow(part, series.factor) for part, series in self._parts.items() if series.factor != 1.0]
        return tuple(sorted(slow, key=lambda each: -each.factor))

    def costs(self) -> MeasuredCosts:
        """Return the run's costs as they are now."""
        return self._costs_at({part: series.factor for part, series in self._parts.items()})

    def _cost(self) -> float:
        """Return how many times as long a step on paper takes as at first."""
        first = simulate(self.lowered, self._costs_at({})).makespan
        return simulate(self.lowered, self.costs()).makespan / first if first else 1.0

    def _costs_at(self, factors: Mapping[Part, float]) -> MeasuredCosts:
        program = self._measured_in
        stages = {key: sorted(values)[len(values) // 2] for key, values in self._stages.items()}
        known = {part: series.first_level for part, series in self._parts.items() if series.known}
        links: dict[Link, float] = {
            (part.ranks[0], part.ranks[1]): level for part, level in known.items() if part.kind == "link"
        }
        copies = {part.ranks[0]: level for part, level in known.items() if part.kind == "copies"}
        homes = _homes(program)
        then = {stage: self._at_restart.get(rank, 1.0) for stage, rank in homes.items()}
        stages = {(kind, stage): ratio / then.get(stage, 1.0) for (kind, stage), ratio in stages.items()}
        costs = measured_costs(self.base, program, stages, links, max(copies.values(), default=1.0))
        return slowed(
            costs,
            {stage: factors.get(Part("rank", (rank,)), 1.0) for stage, rank in homes.items()},
            {link: factors.get(Part("link", link), 1.0) for link in links},
            max((factors.get(Part("copies", (rank,)), 1.0) for rank in copies), default=1.0),
        )

    def _series(self, part: Part) -> ChangePoint:
        if part not in self._parts:
            self._parts[part] = ChangePoint()
        return self._parts[part]


def _figures(seen: Observation) -> dict[Part, float]:
    return {
        **{Part("rank", (rank,)): ratio for rank, ratio in seen.ranks.items()},
        **{Part("link", link): ratio for link, ratio in seen.links.items()},
        **{Part("copies", (rank,)): ratio for rank, ratio in seen.copies.items()},
    }


def _homes(program: Program) -> dict[int, int]:
    """Return the rank of each stage that runs on one rank alone."""
    ranks: dict[int, set[int]] = defaultdict(set)
    for rank, ops in enumerate(program.ranks):
        for op in ops:
            ranks[op.stage].add(rank)
    return {stage: next(iter(own)) for stage, own in ranks.items() if len(own) == 1}


def _arithmetic(program: Program) -> tuple[object, ...]:
    """Return what the times of a program's ops depend on, whatever their order: programs alike in it have equal ops."""
    kinds = frozenset(op.kind for ops in program.ranks for op in ops)
    return program.stages, program.workload, kinds, tuple(sorted(program.activations))
