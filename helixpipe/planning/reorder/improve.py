"""A better program than a given one: other orders, and other programs to begin with.

What the evaluator finds is only a proposal: every program that counts has been built, validated, lowered and simulated,
and its memory swept. So what comes out is never slower than what was given and never over the limit, and all figures
are the simulator's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random

from helixpipe.common.errors import UserError
from helixpipe.lowering.lower import lower
from helixpipe.planning.reorder.anneal import anneal
from helixpipe.planning.reorder.evaluate import evaluator
from helixpipe.planning.reorder.instance import instance_of
from helixpipe.planning.reorder.places import moved
from helixpipe.planning.reorder.starts import Cut, joined, relatives
from helixpipe.planning.vocabulary.spread import spread_heads, spreadable
from helixpipe.program.costs import Costs
from helixpipe.program.program import Program
from helixpipe.simulate.simulator import Simulation, simulate

FINALISTS = 2
"""Starts whose orders are searched again, of those that were best after a first short search."""

FIRST, SECOND = 0.3, 0.2
"""The parts of the orders that all starts share, and that those do which the first finalists lead to; the last
finalists share the rest."""

PER_PLACE, AT_A_PLACE = 1000, 300
"""The number of orders after which something of the best program is moved to another rank, and of those tried then."""

MOVED = ", some on other ranks"


@dataclass(frozen=True)
class Budget:
    """The limits of a search. evaluations: orders that are judged with ops where the starts have them, at most; some
    more with ops elsewhere. seed: of the draws. orders_only: every op stays on its rank and every backward is whole or
    split as it was.
    """

    evaluations: int = 20_000
    seed: int = 0
    orders_only: bool = False


@dataclass(frozen=True)
class SimulatedProgram:
    """A program as it was simulated. start: what its order was found from. time: of the step."""

    start: str
    simulation: Simulation
    time: float

    @property
    def program(self) -> Program:
        return self.simulation.lowered.program

    @property
    def fullest(self) -> float:
        """The memory of the rank that needs most, in the costs' unit."""
        return max(self.simulation.device_needs)

    @property
    def least(self) -> float:
        """The pipeline's time with these ops on these ranks if the busiest never waited."""
        return max(self.simulation.busy)


@dataclass(frozen=True)
class Improved:
    """The result of a search. before: the given program. after: the best one, which may be the same. tried: the best of
    each start.
    """

    before: SimulatedProgram
    after: SimulatedProgram
    tried: tuple[SimulatedProgram, ...]
    evaluations: int
    interrupted: bool

    @property
    def gain(self) -> float:
        """The gain in speed, as a share of the speed before."""
        return self.before.time / self.after.time - 1 if self.after.time else 0.0


Say = Callable[[float, float], None]
"""A callback for the share of the search that is done, and the best time so far."""


def improve(
    program: Program,
    costs: Costs,
    budget: Budget,
    limit: float | None = None,
    after: Callable[[Program], float] = lambda program: 0.0,
    say: Say = lambda done, time: None,
    workload: Cut | None = None,
) -> Improved:
    """Search for a faster program for the same ranks, model and workload.

    The same arguments give the same result. An interrupt ends the search with the best so far.

    Args:
        program: The program to begin with.
        costs: Costs of its ops.
        budget: Limits of the search.
        limit: The memory that each rank may have in all, in the costs' unit; a program that is over it may have what it
            has. None: the memory of its fullest rank.
        after: Returns the time between the last op and the end of the step.
        say: Called with the progress.
        workload: Says how whole sequences are cut, as they will be when the found program runs; None: into equal
            chunks.

    Raises:
        ProgramError: The program is not valid.
    """
    return _OrderSearch(costs, budget, after, say, workload).run(program, limit)


class _OrderSearch:
    """The search for orders. best: of each start. room: the memory of each rank. done: orders that were evaluated."""

    def __init__(self, costs: Costs, budget: Budget, after: Callable[[Program], float], say: Say, workload: Cut | None):
        self.costs, self.budget, self.after, self.say, self.workload = costs, budget, after, say, workload
        self.best: dict[str, SimulatedProgram] = {}
        self.room = inf
        self.done = 0
        self.interrupted = False

    def run(self, program: Program, limit: float | None) -> Improved:
        before = self._simulated("as given", program)
        self.room = max(before.fullest, 0.0 if limit is None else limit)
        program = replace(program, turns=())  # another order has no use for them
        self.best[before.start] = self._simulated(before.start, program)
        try:
            if not self.budget.orders_only and not program.forward_only:
                for start in self._relatives(program):
                    self.best[start.start] = start
            self._search(self._ranked(), int(self.budget.evaluations * FIRST))
            if not self.budget.orders_only:
                self._search(self._spread(), int(self.budget.evaluations * SECOND))
            self._search(self._ranked()[:FINALISTS], self.budget.evaluations - self.done)
            if not self.budget.orders_only:
                self._move()
            self._join()
        except KeyboardInterrupt:
            self.interrupted = True
        tried = tuple(self.best[name] for name in self._ranked())
        fastest = tried[0] if tried[0].time < before.time * (1 - 1e-9) else before
        return Improved(before, fastest, tried, self.done, self.interrupted)

    def _ranked(self) -> list[str]:
        """Return the starts, the fastest first; of equal ones the one that was tried first."""
        return sorted(self.best, key=lambda name: self.best[name].time)

    def _simulated(self, start: str, program: Program) -> SimulatedProgram:
        simulation = simulate(lower(program, self.costs), self.costs)
        return SimulatedProgram(start, simulation, simulation.makespan + self.after(program))

    def _fitting(self, start: str, program: Program) -> SimulatedProgram | None:
        """Return the simulated program; None if it is invalid or does not fit."""
        try:
            candidate = self._simulated(start, program)
        except UserError:
            return None
        return candidate if candidate.fullest <= self.room * (1 + 1e-9) else None

    def _relatives(self, program: Program) -> Iterator[SimulatedProgram]:
        for name, make in relatives(program, self.costs, self.room, self.workload):
            try:
                related = make()
            except UserError:
                continue
            if (candidate := self._fitting(name, related)) is not None:
                yield candidate

    def _spread(self) -> list[str]:
        """Add the finalists with a copy of the head on every rank; returns what they are called."""
        names = []
        for name in self._ranked()[:FINALISTS]:
            program = self.best[name].program
            if spreadable(program) and not program.forward_only:
                candidate = self._fitting(f"{name}, heads spread", spread_heads(program, self.costs))
                if candidate is not None:
                    self.best[candidate.start] = candidate
                    names.append(candidate.start)
        return names

    def _search(self, names: Sequence[str], evaluations: int) -> None:
        """Search the orders of these starts, each with its share."""
        for number, name in enumerate(names):
            before = self.done
            self.best[name] = self._annealed(self.best[name], evaluations // (len(names) - number))
            evaluations -= self.done - before
            self._stop_if_interrupted()

    def _move(self) -> None:
        """Take ops of the best to other ranks, group by group, as long as the step gets shorter."""
        rng = Random(f"{self.budget.seed} places")
        for _ in range(self.budget.evaluations // PER_PLACE):
            best = self.best[self._ranked()[0]]
            program = moved(best.simulation, rng)
            candidate = None if program is None else self._fitting(best.start.removesuffix(MOVED) + MOVED, program)
            if candidate is None:
                continue
            candidate = self._annealed(candidate, AT_A_PLACE)
            if candidate.time < best.time:
                self.best[candidate.start] = candidate
            self._stop_if_interrupted()

    def _stop_if_interrupted(self) -> None:
        if self.interrupted:
            raise KeyboardInterrupt

    def _annealed(self, start: SimulatedProgram, evaluations: int) -> SimulatedProgram:
        """Return the program with the best order found by annealing if it simulates as fast; else unchanged."""
        program, lowered, makespan = start.program, start.simulation.lowered, start.simulation.makespan
        if makespan <= start.least * (1 + 1e-9):  # its busiest rank never waits
            self.done += 1
            return start
        limits = [self.room - self.costs.static_memory(program.pieces_of_rank(r)) for r in range(program.num_ranks)]
        instance = instance_of(lowered, self.costs, limits)
        rng = Random(f"{self.budget.seed} {start.start} {self.done}")
        first, most, best = self.done, max(self.budget.evaluations, 1), min(each.time for each in self.best.values())
        drawn = instance.with_slow_messages
        annealed = anneal(
            drawn,
            evaluator(drawn),
            evaluations,
            rng,
            start.least,
            lambda done, found: self.say(min((first + done) / most, 1.0), min(best, found + start.time - makespan)),
        )
        self.done += annealed.evaluations
        self.interrupted = annealed.interrupted
        if evaluator(instance).makespan(annealed.orders, makespan) >= makespan:
            return start
        candidate = self._fitting(start.start, replace(program, ranks=instance.ranks_of(annealed.orders)))
        return candidate if candidate is not None and candidate.time < start.time else start

    def _join(self) -> None:
        """Undo splits of the best that are worth nothing."""
        best = self.best[self._ranked()[0]]
        program = joined(best.program)
        if program.ranks != best.program.ranks:
            candidate = self._fitting(best.start, program)
            if candidate is not None and candidate.time <= best.time * (1 + 1e-9):
                self.best[best.start] = candidate
