"""Splits the time of a step into work of each kind and waits of each kind, averaged over ranks.

The time of a rank is cut at its ops. Each op is work. Each gap before an op is cut where the last message came that the
op waited for; what it waited beyond that is for weights, beyond those for copies from the host, as in
`transfer_costs`. So the parts of a step add up to its makespan, and the differences between the parts of two steps to
that of their makespans.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from helixpipe.lowering.bound import BoundCosts
from helixpipe.program.program import Op
from helixpipe.program.tasks import OF_WEIGHTS
from helixpipe.program.timeline import OpEvent, Timeline
from helixpipe.program.transfer import TRANSFER_KINDS
from helixpipe.simulate.simulator import Simulation
from helixpipe.simulate.transfer_costs import handling_times

MESSAGES, WEIGHTS, COPIES = "waiting for messages", "waiting for weights", "waiting for copies"

WORK = {"F": "forward", "B": "backward", "I": "backward", "W": "backward", "R": "recomputation"}

Parts = dict[str, float]
"""The time of each part, by its name."""


class _Arrival(NamedTuple):
    """The arrival of data that an op waited for. ready: when it could have left; the wait until then is for another
    rank."""

    end: float
    ready: float


def step_parts(shown: Sequence[Simulation | Timeline]) -> list[Parts]:
    """Return the parts of each makespan. What a backward recomputes is a part of its own if all are simulations: a
    recording does not know it."""
    simulated = all(isinstance(each, Simulation) for each in shown)
    split = []
    for each in shown:
        parts = _of_timeline(each.timeline if isinstance(each, Simulation) else each)
        if simulated and isinstance(each, Simulation):
            for kind, name, time in _inside_ops(each):
                parts[WORK[kind]] -= time
                parts[name] += time
        split.append(dict(parts))
    return split


def _of_timeline(timeline: Timeline) -> Parts:
    parts: Parts = defaultdict(float)
    arrivals, makespan = _arrivals(timeline), timeline.makespan
    of_rank: list[list[OpEvent]] = [[] for _ in range(timeline.num_ranks)]
    for event in timeline.ops:
        of_rank[event.rank].append(event)
    for own in of_rank:
        now = 0.0
        for event in sorted(own, key=itemgetter(2, 3)):
            if event.start > now:
                for name, time in _cut(now, event.start, arrivals.get(event.op, {})):
                    parts[name] += time / timeline.num_ranks
            parts[WORK[event.op.kind]] += (event.end - event.start) / timeline.num_ranks
            now = event.end
        parts["idle time after the last op"] += (makespan - now) / timeline.num_ranks
    return parts


def _arrivals(timeline: Timeline) -> dict[Op, dict[str, list[_Arrival]]]:
    """Return the arrivals that each op waited for, by part of the step."""
    arrivals: dict[Op, dict[str, list[_Arrival]]] = {}

    def add(op: Op, name: str, arrival: _Arrival) -> None:
        arrivals.setdefault(op, {MESSAGES: [], WEIGHTS: [], COPIES: []})[name].append(arrival)

    ends = {event.op: event.end for event in timeline.ops}
    for event in timeline.transfers:
        if event.consumer is None or event.kind == "weight_gradients":  # no op waits for it
            continue
        moves = TRANSFER_KINDS[event.kind].moves
        if moves in OF_WEIGHTS or moves == "offloaded":
            add(event.consumer, WEIGHTS if moves in OF_WEIGHTS else COPIES, _Arrival(event.end, 0.0))
        else:
            ready = event.start if event.producer is None else ends.get(event.producer, event.start)
            add(event.consumer, MESSAGES, _Arrival(event.end, ready))
    return arrivals


def _cut(begin: float, end: float, arrivals: Mapping[str, Sequence[_Arrival]]) -> list[tuple[str, float]]:
    """The parts of a gap in a rank's ops, from `begin` to `end`."""
    parts = []
    for name, own in arrivals.items():
        came, ready = max((each for each in own if begin < each.end <= end), default=(begin, begin))
        left = min(max(ready, begin), came)
        parts += [("waiting for other ranks", left - begin), (name, came - left)]
        begin = came
    return [*parts, ("other waits", end - begin)]


def _inside_ops(simulation: Simulation) -> list[tuple[str, str, float]]:
    """(kind of op, part, time) for what is done in ops beside what they are named after."""
    lowered, bound = simulation.lowered, BoundCosts(simulation.lowered.program, simulation.costs)
    ranks, inside = simulation.timeline.num_ranks, defaultdict[tuple[str, str], float](float)
    for op in lowered.graph.ops:
        if bound.recomputes_inside(op):
            inside[op.kind, "recomputation"] += bound.recompute_time(op)
    for op, time in handling_times(lowered, bound).items():
        inside[op.kind, "handling of transfers"] += time
    return [(kind, name, time / ranks) for (kind, name), time in inside.items()]
