"""Greedy list scheduling of split backwards: a program found from what its ops take, under a memory limit.

Every rank, whenever it is free, starts the op that a few rules prefer among those whose inputs have arrived. The units
of a stage, the chunks of the microbatches, go through F in one given order and through I and W in another. W waits for
nothing but its I and nothing waits for it, so it fills the time a rank would otherwise idle, or makes room when the
memory limit holds an F back.

compiled/split_backwards.cpp is its twin, which gives the same to the last bit; where none was compiled this one runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from math import inf

from helixpipe.compiled import MadeWhenAsked
from helixpipe.planning.order.problem import Problem
from helixpipe.program.program import Op

_KINDS = "FIW"


@dataclass(frozen=True)
class Rules:
    """The preferences of a free rank.

    prefer: F and I of the rank's stages, first choice first, as (kind, place of the stage on its rank). order: instead,
    the F and I of each rank in a fixed order; only W is placed by the rules below. ahead: ops of the fixed order, the
    next one included, of which a rank starts the first that can start. in_turn: the preference rotates:
    after an op the next in `prefer` comes first. make_room: if memory holds an F back, W comes before I. deferred: W
    runs before anything else once more than this many of the rank's wait; a number a rank. warmup: units a rank may
    hold between F and I when it starts an F of its first stage; a number a rank. patience: a rank rather idles than
    start a W that would keep an op waiting for more than this part of the W.
    """

    prefer: tuple[tuple[str, int], ...] = ()
    order: tuple[tuple[Op, ...], ...] = ()
    ahead: int = 1
    in_turn: bool = False
    make_room: bool = True
    deferred: tuple[float, ...] | None = None
    warmup: tuple[float, ...] | None = None
    patience: float = inf

    @cached_property
    def numbered_order(self) -> list[list[tuple[int, int]]]:
        """The fixed order as the compiled twin takes it."""
        kinds = {kind: number for number, kind in enumerate(_KINDS)}
        return [[(kinds[op[0]], op[1]) for op in ops] for ops in self.order]


@dataclass(frozen=True)
class ListSchedule(MadeWhenAsked):
    """A schedule: each rank's ops, the makespan, the longest time from a rank's first op to its last, and the largest
    part of its limit that a rank uses."""

    ranks: tuple[tuple[Op, ...], ...]
    makespan: float
    span: float
    memory: float

    @property
    def rating(self) -> tuple[float, float, float]:
        """The figures to minimise, rounded so that floating-point noise does not decide."""
        return float(f"{self.makespan:.9g}"), float(f"{self.span:.9g}"), float(f"{self.memory:.9g}")

    def reaches(self, bounds: tuple[float, float]) -> bool:
        """Whether both times are at their lower bounds."""
        return self.makespan <= bounds[0] * (1 + 1e-9) and self.span <= bounds[1] * (1 + 1e-9)


ABANDONED = ListSchedule((), inf, inf, inf)
"""The result of rules that were given up, since they lead to a schedule that is too slow."""


MARGIN = 1 + 1e-6
"""Above what counts as the same time in `ListSchedule.rating`, whose digits are few."""


def best_of(given: Problem, rules: Iterable[Rules], slowest: float = inf) -> ListSchedule:
    """Return the best schedule that any of the rules leads to; `ABANDONED` if none ends by `slowest`."""
    best = ABANDONED
    for each in rules:
        schedule = greedy(given, each, min(slowest, best.makespan * MARGIN))
        if schedule is not None and schedule.rating < best.rating:
            best = schedule
    return best


def greedy(given: Problem, rules: Rules, slowest: float = inf) -> ListSchedule | None:
    """Return the schedule that the rules lead to; None when ops of a fixed order find no room in the memory;
    `ABANDONED` as soon as some rank can no longer end by `slowest`.

    An F is started only where room remains for what is left of its microbatch in each later stage of the rank. So the
    oldest unfinished microbatch always finds room wherever it comes, and without a fixed order the schedule cannot get
    stuck: whatever a younger one has left to run there, it has left too. An I for whose gradients there is no room lets
    W go first; when none waits there is room, for F left the reserve free.
    """
    if given.compiled is None:
        return _Greedy(given, rules).run(slowest)
    kinds = _KINDS.index
    found = given.compiled.greedy(
        [(kinds(kind), place) for kind, place in rules.prefer],
        rules.numbered_order,
        rules.ahead,
        rules.in_turn,
        rules.make_room,
        rules.deferred or (),
        rules.warmup or (),
        rules.patience,
        slowest,
    )
    if found.stuck or found.abandoned:
        return ABANDONED if found.abandoned else None
    return ListSchedule.of(
        found,
        ranks=lambda: _ops_of(given, found.ranks),
        makespan=lambda: found.makespan,
        span=lambda: found.span,
        memory=lambda: found.memory,
    )


def _ops_of(given: Problem, ranks: Sequence[Sequence[int]]) -> tuple[tuple[Op, ...], ...]:
    """Return the ops whose numbers the compiled twin gives."""
    every = [op for kind in _KINDS for stage in given.ops for op in stage[kind]]
    return tuple(tuple(every[number] for number in own) for own in ranks)


class _StageState:
    """A stage in the making.

    ops, forward, inputs, weights, held, deferred, added, left: of each unit, as of `Problem`. forwards_ready,
    inputs_ready: when the input of each unit's F, and of its I, is there, as far as known, in the order of units.
    forwards_done, inputs_done: how many have been started. later: the later stages of its rank that must find room for
    what an F starts.
    """

    __slots__ = (
        *("number", "rank", "later", "ops", "forward", "inputs", "weights", "held", "deferred", "added", "left"),
        *("forwards_ready", "inputs_ready", "forwards_done", "inputs_done"),
    )

    def __init__(self, given: Problem, number: int, rank: _Rank):
        self.number, self.rank = number, rank
        self.later: list[_StageState] = []
        self.forward, self.inputs, self.weights = given.forward[number], given.inputs[number], given.weights[number]
        self.held, self.deferred, self.added = given.held[number], given.deferred[number], given.added[number]
        self.ops, self.left = given.ops[number], given.left[number]
        self.forwards_ready: list[float] = []
        self.inputs_ready: list[float] = []
        self.forwards_done = self.inputs_done = 0


_Choice = tuple[str, _StageState, int]
"""F or I of a stage, and the place of the stage on its rank; of a fixed order the place says nothing, and is 1."""


class _Rank:
    """A rank in the making.

    stages: its own. choices: F and I in the order of preference, or what is left of a fixed order, the last op first.
    turn: where in the preferences the next choice begins. waiting: W to do, oldest first, as (stage, place of the
    unit). order: its ops so far. used: what it keeps; peak: the most so far. alive: units between F and I. begun: when
    its first op starts; free: when its last one ends. work: what its ops that have not started take. limit, reserve,
    deferred, warmup: as of `Problem` and `Rules`.
    """

    __slots__ = (
        *("number", "stages", "choices", "turn", "waiting", "order", "used", "peak", "alive", "begun", "free", "work"),
        *("limit", "reserve", "deferred", "warmup"),
    )

    def __init__(self, given: Problem, rules: Rules, number: int):
        self.number = number
        self.stages: list[_StageState] = []
        self.choices: list[_Choice] = []
        self.turn = self.alive = 0
        self.waiting: list[tuple[_StageState, int]] = []
        self.order: list[Op] = []
        self.used = self.peak = self.free = 0.0
        self.begun, self.work = inf, given.work[number]
        self.limit, self.reserve = given.limit[number] * (1 + 1e-9), given.reserve[number]
        self.deferred = rules.deferred[number] if rules.deferred else inf
        self.warmup = rules.warmup[number] if rules.warmup else inf


class _Greedy:
    """A schedule in the making. `events` are times at which a rank may find something to start."""

    def __init__(self, given: Problem, rules: Rules):
        self.given, self.rules = given, rules
        self.forwards, self.backwards = given.forward_units, given.backward_units
        self.needed = [given.place(*unit) for unit in self.backwards]  # the F that each I waits for in the last stage
        self.ranks = [_Rank(given, rules, number) for number in range(len(given.own))]
        self.stages = [_StageState(given, number, self.ranks[home]) for number, home in enumerate(given.homes)]
        for rank, own in zip(self.ranks, given.own, strict=True):
            rank.stages = stages = [self.stages[number] for number in own]
            if rules.order:
                rank.choices = [(op.kind, self.stages[op.stage], 1) for op in reversed(rules.order[rank.number])]
                continue
            rank.choices = [(kind, stages[place], place) for kind, place in rules.prefer]
            for place, stage in enumerate(stages):
                stage.later = stages[place + 1 :]
        self.stages[0].forwards_ready = [0.0] * len(self.forwards)
        self.link_free: dict[tuple[int, int], float] = {}
        self.events = [(0.0, given.homes[0])]

    def run(self, slowest: float) -> ListSchedule | None:
        events, ranks = self.events, self.ranks
        start = {"F": self._forward, "I": self._inputs}
        while events:
            now, number = heappop(events)
            rank = ranks[number]
            if rank.free > now:
                continue
            kind, stage = self._choose(rank, now)
            if kind == "W":
                end = self._weights(rank, now)
            elif stage is not None:
                end = start[kind](rank, stage, now)
            else:
                continue
            rank.free = end
            rank.work -= end - now
            if end + rank.work > slowest:
                return ABANDONED
            if rank.begun == inf:
                rank.begun = now
            if rank.used > rank.peak:
                rank.peak = rank.used
            heappush(events, (end, number))
        return self._found()

    def _choose(self, rank: _Rank, now: float) -> tuple[str, _StageState | None]:
        """Choose what the rank starts: a kind and, for F and I, the stage (W is of the unit that waits longest)."""
        kind: str = ""
        chosen: _StageState | None = None
        held_back, crowded, soon = False, False, inf
        for wanted, stage, place in self._choices(rank) if self.rules.order or rank.turn else rank.choices:
            if wanted == "F":
                at, ready = stage.forwards_done, stage.forwards_ready
            else:
                at, ready = stage.inputs_done, stage.inputs_ready
            if at >= len(ready):
                continue
            if ready[at] > now:
                if ready[at] < soon:
                    soon = ready[at]
            elif wanted == "F" and rank.used + self._room(stage) + rank.reserve > rank.limit:
                held_back = True
            elif wanted == "I" and rank.waiting and rank.used + stage.added[self.needed[at]] > rank.limit:
                crowded = held_back = True
            elif not kind and (wanted == "I" or place or rank.alive < rank.warmup):
                kind, chosen = wanted, stage
        if rank.waiting:
            oldest, unit = rank.waiting[0]
            weights = oldest.weights[unit]
            if (
                len(rank.waiting) > rank.deferred
                or crowded
                or (held_back and (not kind or (kind == "I" and self.rules.make_room)))
                or (not kind and (not weights or now + weights - soon <= self.rules.patience * weights))
            ):
                return "W", None
        return kind, chosen

    def _choices(self, rank: _Rank) -> list[_Choice]:
        """Return the F and I that the rank may run next, first choice first."""
        choices, turn = rank.choices, rank.turn
        if self.rules.order:
            return choices[: -self.rules.ahead - 1 : -1]
        return choices[turn:] + choices[:turn] if turn else choices

    def _room(self, stage: _StageState) -> float:
        """Return the memory that must be free for the stage's next F."""
        later = 0.0
        if stage.later:
            microbatch, _ = self.forwards[stage.forwards_done]
            start, end = self.given.starts[microbatch : microbatch + 2]
            for other in stage.later:
                if other.forwards_done < end:  # a loop: sums of 3.12 and later are not those of the compiled twin
                    later += other.left[max(other.forwards_done, start)]
        return stage.held[stage.forwards_done] + later

    # ----------------------------------------------------------------------------------------- starting an op: its end

    def _forward(self, rank: _Rank, stage: _StageState, now: float) -> float:
        place = stage.forwards_done
        end = now + stage.forward[place]
        stage.forwards_done += 1
        rank.used += stage.held[place]
        rank.alive += 1
        if stage.number + 1 < len(self.stages):
            target = self.stages[stage.number + 1]
            self._deliver(stage, target, place, end, target.forwards_ready)
        else:
            ready = stage.inputs_ready
            while len(ready) < len(self.needed) and self.needed[len(ready)] <= place:
                ready.append(end)
        self._started("F", rank, stage, place)
        return end

    def _inputs(self, rank: _Rank, stage: _StageState, now: float) -> float:
        place = self.needed[stage.inputs_done]
        end = now + stage.inputs[place]
        stage.inputs_done += 1
        rank.peak = max(rank.peak, rank.used + stage.added[place])
        rank.used += stage.deferred[place] - stage.held[place]
        rank.alive -= 1
        rank.waiting.append((stage, place))
        if stage.number > 0:
            target = self.stages[stage.number - 1]
            self._deliver(stage, target, place, end, target.inputs_ready)
        self._started("I", rank, stage, place)
        return end

    def _weights(self, rank: _Rank, now: float) -> float:
        stage, place = rank.waiting.pop(0)
        rank.used -= stage.deferred[place]
        rank.order.append(stage.ops["W"][place])
        return now + stage.weights[place]

    def _started(self, kind: str, rank: _Rank, stage: _StageState, place: int) -> None:
        rank.order.append(stage.ops[kind][place])
        if self.rules.order:
            at = next(at for at in reversed(range(len(rank.choices))) if rank.choices[at][:2] == (kind, stage))
            del rank.choices[at]
        elif self.rules.in_turn:
            prefer = self.rules.prefer
            rank.turn = (prefer.index((kind, rank.stages.index(stage))) + 1) % len(prefer)

    def _deliver(self, source: _StageState, target: _StageState, place: int, end: float, ready: list[float]) -> None:
        """Send what `source` has made of a unit at `end`, and note in `ready` when `target` has it."""
        link = source.rank.number, target.rank.number
        if link[0] != link[1]:
            begin = max(end, self.link_free.get(link, 0.0))
            end = self.link_free[link] = begin + self.given.message[min(source.number, target.number)][place]
        ready.append(end)
        heappush(self.events, (end, link[1]))

    def _found(self) -> ListSchedule | None:
        if sum(len(rank.order) for rank in self.ranks) < 3 * len(self.forwards) * len(self.stages):
            return None
        makespan, span = max(rank.free for rank in self.ranks), max(rank.free - rank.begun for rank in self.ranks)
        limits = zip(self.ranks, self.given.limit, strict=True)
        memory = max(rank.peak / limit if limit else 0.0 for rank, limit in limits)
        return ListSchedule(tuple(tuple(rank.order) for rank in self.ranks), makespan, span, memory)
