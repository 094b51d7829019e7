"""Greedy list scheduling of split backwards: a program found from what its ops take, under a memory limit.

Every rank, whenever it is free, starts the op that a few rules prefer among those whose inputs have arrived. The units
of a stage, the chunks of the microbatches, go through F in one given order and through I and W in another. W waits for
nothing but its I and nothing waits for it, so it fills the time a rank would otherwise idle, or makes room when the
memory limit holds an F back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from math import inf

from helixpipe.lowering.lower import timers
from helixpipe.planning.orders import backward_units, forward_units
from helixpipe.program.costs import Costs
from helixpipe.program.message import Message
from helixpipe.program.program import Op, Program, Stage


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


ByChunk = tuple[tuple[float, ...], ...]
"""A figure for each stage and each chunk of a microbatch."""


@dataclass(frozen=True)
class Problem:
    """What is to be scheduled.

    microbatches, chunks: chunks a microbatch is cut into, at least 1; every (microbatch, chunk) is a unit of each
    stage. homes: the rank of each stage. forward, inputs, weights: times of F, I, W. message: time of a message from
    each stage to the next (and of its gradient back). held: what a unit keeps from F to I. deferred: what it keeps
    from I to W. added: what a rank keeps more while an I runs. limit: the most each rank may keep; at least a whole
    microbatch of all its stages and the reserve. reserve: the most that an I adds (gradients beside activations) on
    each rank, which F leave free.
    """

    microbatches: int
    homes: tuple[int, ...]
    forward: ByChunk
    inputs: ByChunk
    weights: ByChunk
    message: ByChunk
    held: ByChunk
    deferred: ByChunk
    added: ByChunk
    limit: tuple[float, ...]
    reserve: tuple[float, ...]
    chunks: int = 1

    @cached_property
    def own(self) -> list[list[int]]:
        """The stages of each rank."""
        return [[s for s, home in enumerate(self.homes) if home == rank] for rank in range(1 + max(self.homes))]

    @cached_property
    def forward_units(self) -> list[tuple[int, int]]:
        """(microbatch, chunk) in the order of F: causal attention needs a sequence from its start."""
        return forward_units(self.microbatches, self.chunks)

    @cached_property
    def backward_units(self) -> list[tuple[int, int]]:
        """(microbatch, chunk) in the order of I and W: gradients of keys and values come from later chunks."""
        return backward_units(self.microbatches, self.chunks)

    def lower_bounds(self) -> tuple[float, float]:
        """A makespan, and a time from a rank's first op to its last, that no order can beat.

        A rank starts when the first chunk arrives; until its first I it can run as many F as its memory holds; and
        after its last I there are the I of all stages before, beside which it has only the W it still keeps.
        """
        crossing = [a != b for a, b in pairwise(self.homes)]
        travel = [[time * far for time in times] for times, far in zip(self.message, crossing, strict=True)]
        # When the first F of each stage can start; how long the last I of the stages before it take.
        first, back = [0.0], [0.0]
        ends = list(accumulate(self.forward[0]))  # of the first microbatch's F in one stage, then in the next
        last_unit = self.backward_units[-1][1]
        for s, times in enumerate(travel):
            first.append(first[-1] + self.forward[s][0] + times[0])
            back.append(back[-1] + self.inputs[s][last_unit] + times[last_unit])
            end = 0.0
            for chunk, time in enumerate(self.forward[s + 1]):
                ends[chunk] = end = max(end, ends[chunk] + times[chunk]) + time
        turn = [ends[-1]]  # when the first I of each stage can start
        for s, times in reversed(list(enumerate(travel))):
            turn.insert(0, turn[0] + self.inputs[s + 1][-1] + times[-1])
        makespan = span = 0.0
        for rank, stages in enumerate(self.own):
            forward, inputs, weights = (
                self.microbatches * sum(sum(times[s]) for s in stages)
                for times in (self.forward, self.inputs, self.weights)
            )
            early = min(forward, self._units(rank, self.held) * max(max(self.forward[s]) for s in stages))
            late = min(weights, self._units(rank, self.deferred) * max(max(self.weights[s]) for s in stages))
            idle = max(0.0, turn[stages[-1]] - first[stages[0]] - early)
            tail = max(0.0, back[stages[0]] + self.weights[0][last_unit] - late) if stages[0] else 0.0
            span = max(span, idle + forward + inputs + weights)
            makespan = max(makespan, first[stages[0]] + idle + forward + inputs + weights + tail)
        return makespan, span

    def _units(self, rank: int, kept: ByChunk) -> float:
        """How many units the rank's memory holds at most."""
        least = min(min(kept[s]) for s in self.own[rank])
        return self.limit[rank] // (least * (1 - 1e-9)) if least else inf


def held_by(costs: Costs, program: Program, op: Op) -> float:
    """What the unit of an F keeps until its I."""
    return costs.stash(program, op) + stored_by(costs, program, op)


def stored_by(costs: Costs, program: Program, op: Op) -> float:
    """Of that, what goes only once the I has run: keys and values of a microbatch and their gradients, which live as
    long as its first chunk."""
    return sum(costs.keys_values(program, op.stage)) if op.chunk == 0 else 0.0


def problem(
    name: str,
    stages: tuple[Stage, ...],
    homes: tuple[int, ...],
    m: int,
    inflight: float,
    costs: Costs,
    chunks: int = 1,
    chunk_lengths: tuple[int, ...] | None = None,
    memory_limit: float | None = None,
) -> Problem:
    """Ask `costs` once for everything. inflight: the limit, in microbatches of all the stages of a rank, at least 1.
    memory_limit: what a rank may use in all, in the costs' unit; it is kept to as far as one microbatch allows."""
    empty = Program(name, stages, ((),) * (1 + max(homes)), m, chunks, chunk_lengths)

    def by_chunk(ask: Callable[[Op], float], kind: str, count: int = len(stages)) -> ByChunk:
        return tuple(tuple(ask(Op(kind, s, 0, chunk)) for chunk in range(chunks)) for s in range(count))

    op_time, ask_message_time = timers(empty, costs)

    def message_time(op: Op) -> float:
        target = op._replace(stage=op.stage + 1)
        return ask_message_time(Message(0, "activation", op, target, homes[op.stage], homes[target.stage]))

    held = by_chunk(lambda op: held_by(costs, empty, op), "F")
    deferred = by_chunk(lambda op: costs.deferred_stash(empty, op), "W")
    stored = by_chunk(lambda op: stored_by(costs, empty, op), "F")
    added = tuple(
        tuple(later - now + stays for later, now, stays in zip(*figures, strict=True))
        for figures in zip(deferred, held, stored, strict=True)
    )
    ranks = [[s for s, home in enumerate(homes) if home == rank] for rank in range(1 + max(homes))]
    reserve, limit = [], []
    for own in ranks:
        units = [(s, chunk) for s in own for chunk in range(chunks)]
        reserve.append(max(max(0.0, added[s][chunk]) for s, chunk in units))
        one = sum(held[s][chunk] for s, chunk in units)
        limit.append(inflight * one + reserve[-1])
        if memory_limit is not None:
            spare = memory_limit - costs.static_memory([piece for s in own for piece in stages[s].pieces])
            limit[-1] = max(one + reserve[-1], min(limit[-1], spare))
    messages = by_chunk(message_time, "F", len(stages) - 1)
    forward, inputs, weights = (by_chunk(op_time, kind) for kind in "FIW")
    return Problem(
        m, homes, forward, inputs, weights, messages, held, deferred, added, tuple(limit), tuple(reserve), chunks
    )


def greedy(given: Problem, rules: Rules) -> Found | None:
    """The schedule that the rules lead to; None when a fixed order does not fit into the memory.

    An F is started only where room remains for what is left of its microbatch in each later stage of the rank. So the
    oldest unfinished microbatch always finds room wherever it comes, and without a fixed order the schedule cannot get
    stuck: whatever a younger one has left to run there, it has left too. An I for whose gradients there is no room lets
    W go first; when none waits there is room, for F left the reserve free.
    """
    homes, last, own = given.homes, len(given.homes) - 1, given.own
    forwards, backwards = given.forward_units, given.backward_units
    total = len(forwards)
    place_of = {unit: number for number, unit in enumerate(forwards)}
    needed = [place_of[unit] for unit in backwards]  # the F that each I waits for in the last stage
    unlimited = (inf,) * len(own)
    deferred_limit, warmup = rules.deferred or unlimited, rules.warmup or unlimited
    # What a microbatch has left to run in a stage after some of its chunks, and the later stages of a stage's rank.
    left = [[*reversed(list(accumulate(reversed(held), initial=0.0)))] for held in given.held]
    later = [[] if rules.order else [s for s in own[home] if s > stage] for stage, home in enumerate(homes)]
    limit = [value * (1 + 1e-9) for value in given.limit]
    arrived_f: list[list[float]] = [[] for _ in homes]  # when the input of each unit's F is there, in order
    arrived_i: list[list[float]] = [[] for _ in homes]
    arrived_f[0] = [0.0] * total
    done_f, done_i = [0] * len(homes), [0] * len(homes)
    waiting: list[list[tuple[int, int, int]]] = [[] for _ in own]  # W to do, oldest first: (stage, microbatch, chunk)
    peak, begun = [0.0] * len(own), [inf] * len(own)
    used, alive = [0.0] * len(own), [0] * len(own)
    free, turn = [0.0] * len(own), [0] * len(own)
    link_free: dict[tuple[int, int], float] = {}
    order: list[list[Op]] = [[] for _ in own]
    preferences = [[(kind, stages[place], place) for kind, place in rules.prefer] for stages in own]
    events = [(0.0, homes[0])]

    def deliver(source: int, target: int, chunk: int, end: float) -> float:
        """When what `source` has made of a chunk at `end` is with `target`."""
        link = homes[source], homes[target]
        if link[0] == link[1]:
            return end
        begin = max(end, link_free.get(link, 0.0))
        link_free[link] = begin + given.message[min(source, target)][chunk]
        return link_free[link]

    def choices(rank: int) -> list[tuple[str, int, int]]:
        """F and I that the rank may run next, first choice first: kind, stage and place of its stage on the rank."""
        if rules.order:
            done = sum(done_f[s] + done_i[s] for s in own[rank])
            return [(op.kind, op.stage, 1) for op in rules.order[rank][done : done + 1]]
        turns = preferences[rank]
        return turns[turn[rank] :] + turns[: turn[rank]] if turn[rank] else turns

    def room(stage: int, at: int) -> float:
        """What the F of that place in the order must find free."""
        microbatch, chunk = forwards[at]
        needs = given.held[stage][chunk]
        for other in later[stage]:
            done = min(max(done_f[other] - microbatch * given.chunks, 0), given.chunks)
            needs += left[other][done]
        return needs

    while events:
        now, rank = heappop(events)
        if free[rank] > now:
            continue
        kind, stage, number = "", -1, -1
        held_back, crowded, soon = False, False, inf
        pending = waiting[rank]
        for wanted, candidate, place in choices(rank):
            arrived, at = (arrived_f, done_f[candidate]) if wanted == "F" else (arrived_i, done_i[candidate])
            if at >= len(arrived[candidate]):
                continue
            if arrived[candidate][at] > now:
                soon = min(soon, arrived[candidate][at])
            elif wanted == "F" and used[rank] + room(candidate, at) + given.reserve[rank] > limit[rank]:
                held_back = True
            elif wanted == "I" and pending and used[rank] + given.added[candidate][backwards[at][1]] > limit[rank]:
                crowded = held_back = True
            elif not kind and (wanted == "I" or place or alive[rank] < warmup[rank]):
                kind, stage, number = wanted, candidate, at
        if pending:
            weight = given.weights[pending[0][0]][pending[0][2]]
            if (
                len(pending) > deferred_limit[rank]
                or crowded
                or (held_back and (not kind or (kind == "I" and rules.make_room)))
                or (not kind and now + weight - soon <= rules.patience * weight)
            ):
                kind = "W"
        if kind == "F":
            microbatch, chunk = forwards[number]
            end = now + given.forward[stage][chunk]
            done_f[stage] += 1
            used[rank] += given.held[stage][chunk]
            alive[rank] += 1
            if stage < last:
                arrived_f[stage + 1].append(deliver(stage, stage + 1, chunk, end))
                heappush(events, (arrived_f[stage + 1][-1], homes[stage + 1]))
            else:
                while len(arrived_i[stage]) < total and needed[len(arrived_i[stage])] <= number:
                    arrived_i[stage].append(end)
        elif kind == "I":
            microbatch, chunk = backwards[number]
            end = now + given.inputs[stage][chunk]
            done_i[stage] += 1
            peak[rank] = max(peak[rank], used[rank] + given.added[stage][chunk])
            used[rank] += given.deferred[stage][chunk] - given.held[stage][chunk]
            alive[rank] -= 1
            pending.append((stage, microbatch, chunk))
            if stage > 0:
                arrived_i[stage - 1].append(deliver(stage, stage - 1, chunk, end))
                heappush(events, (arrived_i[stage - 1][-1], homes[stage - 1]))
        elif kind == "W":
            stage, microbatch, chunk = pending.pop(0)
            end = now + given.weights[stage][chunk]
            used[rank] -= given.deferred[stage][chunk]
        else:
            continue
        if kind != "W" and rules.in_turn:
            turn[rank] = (rules.prefer.index((kind, own[rank].index(stage))) + 1) % len(rules.prefer)
        order[rank].append(Op(kind, stage, microbatch, chunk))
        free[rank] = end
        begun[rank] = min(begun[rank], now)
        peak[rank] = max(peak[rank], used[rank])
        heappush(events, (end, rank))
    if sum(map(len, order)) < 3 * total * len(homes):
        return None
    spans = [end - start for start, end in zip(begun, free, strict=True)]
    memory = max(most / whole if whole else 0.0 for most, whole in zip(peak, given.limit, strict=True))
    return Found(tuple(map(tuple, order)), max(free), max(spans), memory)
