"""A better plan for the speeds that a run has now: candidates, each simulated with them, and whether one is worth a
switch.

Every candidate trains the same model on the same ranks: the same pieces, in memory the run has, over links it uses.
Where layers may move, ranks may have others of them. The function is pure, so that it can be tried on paper, and run in
a process beside training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import gt
from typing import NamedTuple

from helixpipe.adapt.cuts import Division, better_divisions, ranks_of_stages, recut
from helixpipe.adapt.measured_costs import where_they_run
from helixpipe.common.errors import UserError
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.lower import lower
from helixpipe.lowering.project import LoweredProgram
from helixpipe.planning.memory.chunk_recompute import recompute_chunks
from helixpipe.planning.memory.early import busy, place_early
from helixpipe.planning.order.orders import one_forward_one_backward
from helixpipe.planning.reorder.improve import Budget, improve
from helixpipe.planning.reorder.starts import split
from helixpipe.program.costs import Costs
from helixpipe.program.program import Program
from helixpipe.program.stages import Activations, Piece, layers_of
from helixpipe.simulate.simulator import Simulation, simulate

LEAST_GAIN = 0.03
"""The gain in speed that a switch must promise."""

ROUNDING = 1.02
"""How many times as long a step may take whose losses stay equal to the digit, before one whose losses are equal to
rounding is taken instead."""

NEAR = 1.005
"""How many times as long as the best step that of the run's own program may take to be taken instead."""

MOST_ORDERS, OPS_JUDGED = 4000, 1_000_000
"""Orders that are judged beyond the candidates, and the ops in all of them, at most: a second or a few."""

FINALISTS = 2
"""Candidates whose orders are searched for better ones."""

RECOMPUTED = 3
"""Candidates without room that are tried with some of it made by recomputation, the fastest."""

DIVISIONS = 2
"""Divisions of the layers whose programs are tried, of those found better than the run's."""

REBUILT = 5.0
"""Seconds that ranks take to build model and optimizer anew where layers move."""

TOLD = 0.01
"""Seconds more for each rank of the job: all take in what each has and needs (2 ms), after its way through a tree."""

HOST_RATE = 2e9
"""Bytes a second at which a rank copies its state to its host's memory, or back, and hosts send theirs, at most."""

DEEPER = (1.5, 2.0, 3.0)
"""Forwards of warm-up for each rank downstream, in place of one."""

Candidate = tuple[str, Callable[[], Program]]
"""The name of a program, and the function that makes it."""

Candidates = Callable[[Costs], Iterable[Candidate]]
"""Makes the programs of other schedules for costs; those that do not suit are left out."""


@dataclass(frozen=True)
class Situation:
    """A run as it is. Only the number makes two of them equal.

    running: the program of its steps, lowered with `lowered_with`. own: the program that the run began with. costs: as
    measured now. limit: what each rank may use in all, in the costs' unit of memory; None: what the fullest rank uses.
    well: nothing is slow any more. exact: of the same layers on each rank, only programs with the same sums are wanted.
    moving: the steps in which it has to pay that layers move between ranks; 0: they stay. job_ranks: of all replicas.
    """

    number: int
    running: Program = field(compare=False)
    lowered_with: Costs = field(compare=False)
    own: Program = field(compare=False)
    costs: Costs = field(compare=False)
    limit: float | None = field(default=None, compare=False)
    well: bool = field(default=False, compare=False)
    exact: bool = field(default=True, compare=False)
    moving: int = field(default=0, compare=False)
    job_ranks: int = field(default=1, compare=False)


class Proposal(NamedTuple):
    """A program to switch to. name: where its order is from. before, after: seconds of a step on paper. exact: whether
    the same sums are made in the same order, so that losses are equal to the digit. moves: whether layers move between
    ranks."""

    name: str
    program: Program
    before: float
    after: float
    exact: bool
    moves: bool = False

    @property
    def gain(self) -> float:
        """The gain in speed."""
        return self.before / self.after - 1 if self.after else 0.0

    def __str__(self) -> str:
        equal = "to the digit" if self.exact else "to rounding"
        return f"{self.name} would make steps {1 + self.gain:.2f} times as fast, losses equal {equal}"


class PlannerAnswer(NamedTuple):
    """What a planner says: a proposal, or that there is none."""

    proposal: Proposal | None


class _Tried(NamedTuple):
    name: str
    program: Program
    time: float
    exact: bool
    fits: bool
    moving: float

    @property
    def cost(self) -> float:
        """The time of a step, with its share of that in which layers move."""
        return self.time + self.moving

    @property
    def score(self) -> float:
        return self.cost if self.exact else self.cost * ROUNDING


OWN = "the run's own order"


def replan(situation: Situation, candidates: Candidates) -> Proposal | None:
    """Return the program to switch to; None where none is worth it."""
    return _Replanning(situation).result(candidates)


class _Replanning:
    def __init__(self, situation: Situation):
        self.now = situation
        self.evaluations = min(MOST_ORDERS, OPS_JUDGED // sum(map(len, situation.running.ranks)))
        running = situation.running
        self.first = simulate(lower(running, situation.lowered_with), situation.costs)
        self.before = self.first.makespan
        self.limit = situation.limit if situation.limit is not None else max(self.first.device_needs)
        own = self._simulated(situation.own)
        self.page_locked = [peak.host * (1 + 1e-9) for peak in own.peaks]  # for the run's own program, as it began
        self.pieces = [running.pieces_of_rank(rank) for rank in range(running.num_ranks)]
        self.division = layers_of(running.stages)
        self.channels = _channels(self.first.lowered)

    def result(self, candidates: Candidates) -> Proposal | None:
        own = self._tried(OWN, self.now.own)
        own = own if own is not None and own.fits else None
        if self.now.well and own is not None and own.cost <= self.before * NEAR:
            return None if self.now.own == self.now.running else self._proposal(own)
        programs = [(OWN, lambda: self.now.own), ("the same order", lambda: self.now.running)]
        programs += [*variants(self.now.running), *variants(self.now.own), *candidates(self.now.costs)]
        divisions = self._divisions()
        every = [self._made(name, make, division) for name, make in programs for division in divisions]
        tried = [each for each in every if each is not None]
        fitting = [each for each in tried if each.fits]
        best = self._best([*fitting, *self._recomputing(tried, min(each.score for each in fitting))])
        if own is not None and own.score <= best.score * NEAR:
            best = own
        pays = self.before / best.cost - 1 >= LEAST_GAIN if best.cost else False
        return self._proposal(best) if pays and best.program != self.now.running else None

    def _divisions(self) -> list[Division]:
        """Return the divisions of layers over stages that are tried, the run's own and the present one among them."""
        present, own = self.division, layers_of(self.now.own.stages)
        if not self.now.moving:
            return [present]
        better: dict[Division, float] = {}

        def fits(program: Program) -> bool:
            tried = self._tried("", program)
            if tried is None or not tried.fits:
                return False
            better[layers_of(program.stages)] = tried.score
            return True

        def of_ranks(program: Program) -> Sequence[float]:
            return busy(program, self._costs(program))

        with suppress(UserError):
            list(better_divisions(self.now.running, of_ranks, fits))
        return list(dict.fromkeys([present, own, *sorted(better, key=better.__getitem__)[:DIVISIONS]]))

    def _best(self, tried: list[_Tried]) -> _Tried:
        """Return the best of the candidates, and of what a search over the orders of the first few comes to."""
        tried.sort(key=lambda each: each.score)
        for each in tried[:FINALISTS]:
            budget = Budget(self.evaluations // FINALISTS, orders_only=True)
            improved = improve(each.program, self._costs(each.program), budget, self.limit).after.program
            found = self._tried(f"{each.name}, searched", in_turn(improved))
            if found is not None and found.fits:
                tried.append(found)
        return min(tried, key=lambda each: each.score)

    def _recomputing(self, tried: list[_Tried], least: float) -> list[_Tried]:
        """Return those that would be faster than `least`, had they the memory, with what they recompute chosen anew by
        the costs as measured: as few layers of as few units as make them fit."""
        wide = sorted((each for each in tried if not each.fits and each.score < least), key=lambda each: each.score)
        chosen = []
        for each in wide[:RECOMPUTED]:
            free, costs = _kept(each.program, recompute=True), self._costs(each.program)
            program = recompute_chunks(free, costs, self.limit, exact=False).program
            program = place_early(program, costs, self.limit)
            found = self._tried(f"{each.name}, recomputing what does not fit", program)
            chosen += [found] if found is not None and found.fits else []
        return chosen

    def _made(self, name: str, make: Callable[[], Program], division: Division) -> _Tried | None:
        try:
            program = recut(make(), division)
        except UserError:
            return None
        layers = "" if division == self.division else f", layers {'-'.join(map(str, division))}"
        return self._tried(name + ("" if program == self.now.own else layers), program)

    def _tried(self, name: str, program: Program) -> _Tried | None:
        """Return a program as simulated, whether or not it fits into memory; None where it is not valid or does not
        suit the run."""
        try:
            moves = layers_of(program.stages) != self.division
            if not (self._suits_moved(program) if moves else self._pieces(program) == self.pieces):
                return None
            simulation = self._simulated(program)
        except UserError:
            return None
        if not _channels(simulation.lowered) <= self.channels:
            return None
        host = [peak.host for peak in simulation.peaks]
        if program not in (self.now.running, self.now.own) and any(map(gt, host, self.page_locked)):
            return None
        fits = max(simulation.device_needs) <= self.limit * (1 + 1e-9) or program == self.now.running
        exact = same_sums(program, self.now.running)
        if self.now.exact and not (same_order(program, self.now.running) if moves else exact):
            return None
        moving = self._seconds_of_moving(program) / self.now.moving if moves else 0.0
        return _Tried(name, program, simulation.makespan, exact, fits, moving)

    def _suits_moved(self, program: Program) -> bool:
        """Whether it is the same model in stages of other layers on the same ranks, and layers may move."""
        pieces, own = ([piece for each in of.stages for piece in each.pieces] for of in (program, self.now.running))
        if not self.now.moving or pieces != own or not adaptable(program):
            return False
        return ranks_of_stages(program) == ranks_of_stages(self.now.running)

    def _seconds_of_moving(self, program: Program) -> float:
        """Return how long ranks do not train: the fullest copies weights, gradients and optimizer's state to its host,
        and back into a new model, and the one that gets most waits for it, over the slowest link as fast as messages
        are on it."""
        graph, bound = self.first.lowered.graph, BoundCosts(self.now.running, self.now.costs)
        rates = []
        for message in graph.messages:
            seconds = bound.transfer_time(message)
            size = sum(bound.size(graph.buffers[number]) for number in graph.writes[graph.task(message)])
            rates += [size / seconds] if seconds > 0 and size > 0 else []
        size_of, now = self.now.costs.static_memory, self._pieces(program)
        copied = max(size_of(each) for each in self.pieces) + max(size_of(each) for each in now)
        new = ([piece for piece in own if piece not in old] for own, old in zip(now, self.pieces, strict=True))
        sent = max(map(size_of, new)) / min([*rates, HOST_RATE])
        return REBUILT + TOLD * self.now.job_ranks + copied / HOST_RATE + sent

    def _pieces(self, program: Program) -> list[tuple[Piece, ...]]:
        return [program.pieces_of_rank(rank) for rank in range(program.num_ranks)]

    def _costs(self, program: Program) -> Costs:
        """Return the present costs of a program."""
        same = [stage.pieces for stage in program.stages] == [stage.pieces for stage in self.now.running.stages]
        return self.now.costs if same else where_they_run(self.now.costs, program)

    def _simulated(self, program: Program) -> Simulation:
        costs = self._costs(program)
        return simulate(lower(program, costs), costs)

    def _proposal(self, best: _Tried) -> Proposal:
        moves = layers_of(best.program.stages) != self.division
        return Proposal(best.name, best.program, self.before, best.time, best.exact, moves)


def adaptable(program: Program) -> bool:
    """Whether another program may take this one's place: each stage's weights are on the one rank that runs it."""
    whole = program.sharded == 1 and program.chain == len(program.stages)
    return whole and all(stage.placement == "resident" for stage in program.stages) and not program.pairs


def same_sums(program: Program, other: Program) -> bool:
    """Whether two programs add up each weight's gradients in the same order, of the same units."""
    alike = [stage.pieces for stage in program.stages] == [stage.pieces for stage in other.stages]
    return alike and same_order(program, other)


def same_order(program: Program, other: Program) -> bool:
    """Whether two programs of as many stages add up gradients in the same order, of the same microbatches' chunks."""
    if program.workload != other.workload or len(program.stages) != len(other.stages):
        return False
    return _sums(program) == _sums(other)


def _sums(program: Program) -> list[list[tuple[int, int]]]:
    """Return for each stage its units in the order in which their weights' gradients come. Of a split backward norms
    come with I and linear layers with W: both orders count."""
    order: dict[str, list[list[tuple[int, int]]]] = {kind: [[] for _ in program.stages] for kind in "IW"}
    for ops in program.ranks:
        for kind, stage, *unit in ops:
            for half in {"B": "IW", "I": "I", "W": "W"}.get(kind, ""):
                order[half][stage].append((unit[0], unit[1]))
    return order["I"] + order["W"]


def in_turn(program: Program) -> Program:
    """Return the program with the units of each stage in the order of the first: where an order has exchanged equal
    microbatches, that is the same step, and its sums stay in their order."""
    if len({tuple(chunks) for chunks in program.workload.extents}) > 1 or program.activations:
        return program
    ranks = []
    for ops in program.ranks:
        places: dict[tuple[str, int], list[int]] = {}
        for place, op in enumerate(ops):
            places.setdefault((op.kind, op.stage), []).append(place)
        order = list(ops)
        for own in places.values():
            backwards = ops[own[0]].kind != "F"
            units = sorted((ops[place] for place in own), key=lambda op: (op[2], -op[3] if backwards else op[3]))
            for place, op in zip(own, units, strict=True):
                order[place] = op
        ranks.append(tuple(order))
    return replace(program, ranks=tuple(ranks))


def variants(program: Program) -> Iterator[Candidate]:
    """Yield programs of the same stages: deeper warm-ups, split backwards, and activations kept on the device."""
    for depth in DEEPER:
        yield f"a warm-up {depth:g} times as deep", partial(deeper, program, depth)
    if not any(op.kind == "W" for ops in program.ranks for op in ops):
        yield "split backwards", partial(split, program)
    if any(stage.recompute for stage in program.stages) or program.activations:
        yield "nothing recomputed", partial(_kept, program, recompute=True)
    if any(each.offload for each in program.activations.values()):
        yield "nothing offloaded", partial(_kept, program, recompute=False)
        yield "half as much offloaded", partial(_offloading, program, 0.5)


def deeper(program: Program, times: float) -> Program:
    """Return the program with this many times the forwards of warm-up on each rank; other ops keep their order."""
    ranks = []
    for ops in program.ranks:
        forwards, others = [op for op in ops if op.kind == "F"], [op for op in ops if op.kind != "F"]
        if len(forwards) != len(others):
            return program
        warmup = next((place for place, op in enumerate(ops) if op.kind != "F"), len(ops)) - 1
        ranks.append(tuple(one_forward_one_backward(forwards, others, round(warmup * times))))
    return replace(program, ranks=tuple(ranks))


def _kept(program: Program, recompute: bool) -> Program:
    """Return the program with no activations offloaded, and none recomputed if `recompute`."""

    def kept(each: Activations) -> Activations:
        return replace(each, recompute=() if recompute else each.recompute, offload=())

    stages = tuple(replace(stage, recompute=()) if recompute else stage for stage in program.stages)
    ranks = tuple(tuple(op for op in ops if not (recompute and op.kind == "R")) for ops in program.ranks)
    activations = {unit: kept(each) for unit, each in program.activations.items()}
    return replace(program, stages=stages, ranks=ranks, activations=activations)


def _offloading(program: Program, times: float) -> Program:
    """Return the program with this many times the share of each run offloaded."""

    def shared(each: Activations) -> Activations:
        return replace(each, offload=tuple((run, share * times) for run, share in each.offload))

    return replace(program, activations={unit: shared(each) for unit, each in program.activations.items()})


def _channels(lowered: LoweredProgram) -> frozenset[tuple[int, int]]:
    return frozenset((each.source, each.target) for each in lowered.graph.messages)
