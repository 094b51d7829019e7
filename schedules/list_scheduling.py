"""Greedy list scheduling of split backwards: a program found from what its ops take, under a memory limit.

Every rank, whenever it is free, starts the op that a few rules prefer among those whose inputs have arrived. The units
of a stage go through F, I and W each in the order of the microbatches. W waits for nothing but its I and nothing waits
for it, so it fills the time a rank would otherwise idle, or makes room when the memory limit holds an F back.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from math import inf

from helixpipe.costs import Costs
from helixpipe.graph import Message
from helixpipe.lowering import timers
from helixpipe.program import Op, Program, Stage


@dataclass(frozen=True)
class Rules:
    """What a rank that is free prefers.

    prefer: F and I of the rank's stages, first choice first, as (kind, place of the stage on its rank).
    order: instead, the F and I of each rank in a fixed order; only W is placed by the rules below.
    in_turn: the choice goes round: after an op the next in `prefer` comes first.
    make_room: when memory holds an F back, W comes before I.
    deferred: W runs before anything else once more than this many of the rank's wait; a number a rank.
    warmup: units a rank may hold between F and I when it starts an F of its first stage; a number a rank.
    patience: a rank rather idles than start a W that would keep an op waiting for more than this part of the W.
    """

    prefer: tuple[tuple[str, int], ...] = ()
    order: tuple[tuple[Op, ...], ...] = ()
    in_turn: bool = False
    make_room: bool = True
    deferred: tuple[float, ...] | None = None
    warmup: tuple[float, ...] | None = None
    patience: float = inf


@dataclass(frozen=True)
class Found:
    """A schedule: each rank's ops, the makespan, the longest time from a rank's first op to its last, and the largest
    part of its limit that a rank uses."""

    ranks: tuple[tuple[Op, ...], ...]
    makespan: float
    span: float
    memory: float

    @property
    def rating(self) -> tuple[float, float, float]:
        """Less is better; without the last digits' rounding noise."""
        return float(f"{self.makespan:.9g}"), float(f"{self.span:.9g}"), float(f"{self.memory:.9g}")

    def reaches(self, bounds: tuple[float, float]) -> bool:
        """Whether neither time can be bettered."""
        return self.makespan <= bounds[0] * (1 + 1e-9) and self.span <= bounds[1] * (1 + 1e-9)


@dataclass(frozen=True)
class Problem:
    """What is to be scheduled.

    homes: the rank of each stage. forward, inputs, weights: times of F, I, W of each stage. message: time of a message
    from each stage to the next (and of its gradient back). held: what a unit of each stage keeps from F to I.
    deferred: what it keeps from I to W. limit: the most each rank may keep.
    """

    microbatches: int
    homes: tuple[int, ...]
    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    weights: tuple[float, ...]
    message: tuple[float, ...]
    held: tuple[float, ...]
    deferred: tuple[float, ...]
    limit: tuple[float, ...]

    @property
    def own(self) -> list[list[int]]:
        """The stages of each rank."""
        return [[s for s, home in enumerate(self.homes) if home == rank] for rank in range(1 + max(self.homes))]

    def lower_bounds(self) -> tuple[float, float]:
        """A makespan, and a time from a rank's first op to its last, that no order can beat.

        A rank starts when the first microbatch arrives; until its first I it can run as many F as its memory holds;
        and after its last I there are the I of all stages before, beside which it has only the W it still keeps.
        """
        travel = [time if a != b else 0.0 for time, (a, b) in zip(self.message, pairwise(self.homes), strict=True)]
        # When the first F of each stage can start, and its first I; how long the I of the stages before it take.
        first, back = [0.0], [0.0]
        for s, time in enumerate(travel):
            first.append(first[-1] + self.forward[s] + time)
            back.append(back[-1] + self.inputs[s] + time)
        turn = [first[-1] + self.forward[-1]]
        for s, time in reversed(list(enumerate(travel))):
            turn.insert(0, turn[0] + self.inputs[s + 1] + time)
        makespan = span = 0.0
        for rank, stages in enumerate(self.own):
            forward, inputs, weights = (
                self.microbatches * sum(times[s] for s in stages) for times in (self.forward, self.inputs, self.weights)
            )
            early = min(forward, self._units(rank, self.held) * max(self.forward[s] for s in stages))
            late = min(weights, self._units(rank, self.deferred) * max(self.weights[s] for s in stages))
            idle = max(0.0, turn[stages[-1]] - first[stages[0]] - early)
            tail = max(0.0, back[stages[0]] + self.weights[0] - late) if stages[0] else 0.0
            span = max(span, idle + forward + inputs + weights)
            makespan = max(makespan, first[stages[0]] + idle + forward + inputs + weights + tail)
        return makespan, span

    def _units(self, rank: int, kept: tuple[float, ...]) -> float:
        """How many units the rank's memory holds at most."""
        least = min(kept[s] for s in self.own[rank])
        return self.limit[rank] // (least * (1 - 1e-9)) if least else inf


def problem(
    name: str, stages: tuple[Stage, ...], homes: tuple[int, ...], m: int, inflight: int, costs: Costs
) -> Problem:
    """Ask `costs` once for everything. inflight: the limit, in microbatches of all the stages of a rank.

    A unit whose W needs more than its I did (gradients beside activations) holds that much from the start, so that I
    never waits for memory.
    """
    empty = Program(name, stages, ((),) * (1 + max(homes)), m)

    op_time, message_time = timers(empty, costs)

    def times(kind: str) -> tuple[float, ...]:
        return tuple(op_time(Op(kind, stage, 0)) for stage in range(len(stages)))

    messages = []
    for stage in range(len(stages) - 1):
        here, there = Op("F", stage, 0), Op("F", stage + 1, 0)
        messages.append(message_time(Message(0, "activation", here, there, homes[stage], homes[stage + 1])))
    deferred = tuple(costs.deferred_stash(empty, Op("W", stage, 0)) for stage in range(len(stages)))
    held = tuple(max(costs.stash(empty, Op("F", s, 0)), deferred[s]) for s in range(len(stages)))
    limit = [0.0] * (1 + max(homes))
    for stage, home in enumerate(homes):
        limit[home] += inflight * held[stage]
    return Problem(m, homes, times("F"), times("I"), times("W"), tuple(messages), held, deferred, tuple(limit))


def greedy(given: Problem, rules: Rules) -> Found | None:
    """The schedule that the rules lead to; None when a fixed order does not fit into the memory.

    An F is started only where room remains for one unit of each later stage of the rank. So the oldest unfinished
    microbatch always finds room wherever it comes, and without a fixed order the schedule cannot get stuck.
    """
    m, homes, last = given.microbatches, given.homes, len(given.homes) - 1
    own = given.own
    unlimited = (inf,) * len(own)
    deferred_limit, warmup = rules.deferred or unlimited, rules.warmup or unlimited
    room = [0.0] * len(homes)  # what an F of the stage must find free
    for stages in own:
        for place, stage in enumerate(stages):
            room[stage] = given.held[stage] if rules.order else sum(given.held[s] for s in stages[place:])
    limit = [value * (1 + 1e-9) for value in given.limit]
    arrived_f: list[list[float]] = [[] for _ in homes]  # when the input of each microbatch's F is there, in order
    arrived_i: list[list[float]] = [[] for _ in homes]
    arrived_f[0] = [0.0] * m
    done_f, done_i = [0] * len(homes), [0] * len(homes)
    waiting: list[list[tuple[int, int]]] = [[] for _ in own]  # W to do, oldest first: (stage, microbatch)
    peak, begun = [0.0] * len(own), [inf] * len(own)
    used, alive = [0.0] * len(own), [0] * len(own)
    free, turn = [0.0] * len(own), [0] * len(own)
    link_free: dict[tuple[int, int], float] = {}
    order: list[list[Op]] = [[] for _ in own]
    preferences = [[(kind, stages[place], place) for kind, place in rules.prefer] for stages in own]
    events = [(0.0, homes[0])]

    def deliver(source: int, target: int, end: float) -> float:
        """When what `source` has made at `end` is with `target`."""
        link = homes[source], homes[target]
        if link[0] == link[1]:
            return end
        begin = max(end, link_free.get(link, 0.0))
        link_free[link] = begin + given.message[min(source, target)]
        return link_free[link]

    def choices(rank: int) -> list[tuple[str, int, int]]:
        """F and I that the rank may run next, first choice first: kind, stage and place of its stage on the rank."""
        if rules.order:
            done = sum(done_f[s] + done_i[s] for s in own[rank])
            return [(op.kind, op.stage, 1) for op in rules.order[rank][done : done + 1]]
        turns = preferences[rank]
        return turns[turn[rank] :] + turns[: turn[rank]] if turn[rank] else turns

    while events:
        now, rank = heappop(events)
        if free[rank] > now:
            continue
        kind, stage, microbatch = "", -1, -1
        held_back, soon = False, inf
        pending = waiting[rank]
        for wanted, candidate, place in choices(rank):
            arrived, at = (arrived_f, done_f[candidate]) if wanted == "F" else (arrived_i, done_i[candidate])
            if at >= len(arrived[candidate]):
                continue
            if arrived[candidate][at] > now:
                soon = min(soon, arrived[candidate][at])
            elif wanted == "F" and used[rank] + room[candidate] > limit[rank]:
                held_back = True
            elif not kind and (wanted == "I" or place or alive[rank] < warmup[rank]):
                kind, stage, microbatch = wanted, candidate, at
        if pending:
            weight = given.weights[pending[0][0]]
            if (
                len(pending) > deferred_limit[rank]
                or (held_back and (not kind or (kind == "I" and rules.make_room)))
                or (not kind and now + weight - soon <= rules.patience * weight)
            ):
                kind = "W"
        if kind == "F":
            end = now + given.forward[stage]
            done_f[stage] += 1
            used[rank] += given.held[stage]
            alive[rank] += 1
            if stage < last:
                arrived_f[stage + 1].append(deliver(stage, stage + 1, end))
                heappush(events, (arrived_f[stage + 1][-1], homes[stage + 1]))
            else:
                arrived_i[stage].append(end)
        elif kind == "I":
            end = now + given.inputs[stage]
            done_i[stage] += 1
            used[rank] += given.deferred[stage] - given.held[stage]
            alive[rank] -= 1
            pending.append((stage, microbatch))
            if stage > 0:
                arrived_i[stage - 1].append(deliver(stage, stage - 1, end))
                heappush(events, (arrived_i[stage - 1][-1], homes[stage - 1]))
        elif kind == "W":
            stage, microbatch = pending.pop(0)
            end = now + given.weights[stage]
            used[rank] -= given.deferred[stage]
        else:
            continue
        if kind != "W" and rules.in_turn:
            turn[rank] = (rules.prefer.index((kind, own[rank].index(stage))) + 1) % len(rules.prefer)
        order[rank].append(Op(kind, stage, microbatch))
        free[rank] = end
        begun[rank] = min(begun[rank], now)
        peak[rank] = max(peak[rank], used[rank])
        heappush(events, (end, rank))
    if sum(map(len, order)) < 3 * m * len(homes):
        return None
    spans = [end - start for start, end in zip(begun, free, strict=True)]
    memory = max(most / whole if whole else 0.0 for most, whole in zip(peak, given.limit, strict=True))
    return Found(tuple(map(tuple, order)), max(free), max(spans), memory)
