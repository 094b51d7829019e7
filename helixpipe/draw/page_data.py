"""Prepares the data of the web page of timelines: tasks as columns, their dependencies and durations, memory.

A simulated timeline comes as its program's tasks with their times of work, and the page runs it again by itself, with
these times or others (see `simulate.js`); a measured one comes with the times that were measured. Tasks are numbered as
in the graph: ops, messages, collectives, copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from helixpipe.costs.by_hand import SPLIT_BACKWARD, PieceTimes
from helixpipe.draw.style import heading, is_chunked
from helixpipe.draw.why import why_longer
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.project import LoweredProgram
from helixpipe.lowering.validate import CircleError
from helixpipe.program.costs import Costs, Work
from helixpipe.program.program import Op
from helixpipe.program.stages import PIECE_KINDS
from helixpipe.program.tasks import Buffer
from helixpipe.program.timeline import Timeline
from helixpipe.program.transfer import TRANSFER_KINDS, Transfer, Waited
from helixpipe.simulate.curve import MemoryCurve, memory_curves
from helixpipe.simulate.simulator import Simulation
from helixpipe.simulate.streams import stream_waits
from helixpipe.simulate.transfer_costs import handling_times

Amounts = dict[str, float]
"""The amount of each rate in a task's time, by the rate's name: `F attn`, `message`, `copy`, or `rest`, whose rate is
1.
"""


def takes_no_time(kind: str) -> bool:
    """Whether transfers of the kind are left out of timelines, since nothing in a step waits for them."""
    return TRANSFER_KINDS[kind].waited is Waited.STEP


MESSAGE_KINDS = [kind for kind, row in TRANSFER_KINDS.items() if row.resource == "link"]
COLLECTIVE_KINDS = sorted(
    (kind for kind, row in TRANSFER_KINDS.items() if row.resource == "collective"), key=takes_no_time
)


def panels_data(shown: Sequence[Timeline | Simulation]) -> list[dict[str, Any]]:
    """Return the page's data of several timelines. base: the number of the earlier timeline to compare with, the first
    of its size or else the first; None for the first of all. why: the cause of the difference from it, in words.
    """
    panels = [panel_data(each) for each in shown]
    for number, panel in enumerate(panels):
        sizes = [before["size"] for before in panels[:number]]
        base = sizes.index(panel["size"]) if panel["size"] in sizes else 0 if number else None
        panel |= {"base": base, "why": "" if base is None else why_longer(shown[number], shown[base])}
    return panels


def panel_data(shown: Timeline | Simulation) -> dict[str, Any]:
    """Return the page's data of one timeline."""
    timeline = shown.timeline if isinstance(shown, Simulation) else shown
    facts = {
        "heading": heading(timeline),
        "title": timeline.title,
        "ranks": timeline.num_ranks,
        "unit": timeline.unit,
        "chunked": is_chunked(timeline),
        "measured": not isinstance(shown, Simulation),
        "size": _size(timeline.num_ranks, [event.op for event in timeline.ops]),
    }
    return facts | (_simulated(shown) if isinstance(shown, Simulation) else _measured(timeline))


def knobs(simulations: Sequence[Simulation]) -> list[dict[str, Any]]:
    """Return the costs that can be changed in the page, with their values: times given by hand are set, all others
    scaled.

    Empty if timelines do not share their costs. splits: whether the piece's backward can be done in two halves.
    """
    if not simulations or any(each.costs != simulations[0].costs for each in simulations):
        return []
    costs = simulations[0].costs
    if isinstance(costs, PieceTimes):
        rates = [
            _knob(piece, f"{piece}, forward", costs.forward.get(piece, 0.0)) | {"splits": piece in SPLIT_BACKWARD}
            for piece in PIECE_KINDS
        ]
        rates.append(_knob("ratio", "backward over forward", costs.backward_ratio) | {"least": 1})
        rates.append(_knob("overhead", "an op, beside its pieces", costs.op_overhead))
        rates.append(_knob("message", "a message", costs.message))
        copy = [_knob("copy", "a copy of a layer's microbatch", costs.copy)]
        return rates + copy * any(each.copies for each in simulations)
    rates = [_knob(piece, f"{piece} ×", 1.0) for piece in PIECE_KINDS]
    rates.append(_knob("message", "messages ×", 1.0))
    rates += [_knob("copy", "copies to the host and back ×", 1.0)] * any(each.copies for each in simulations)
    shares = any(each.timeline.collectives for each in simulations)
    return rates + [_knob("sharing", "collectives ×", 1.0)] * shares


def _knob(name: str, label: str, value: float) -> dict[str, Any]:
    return {"name": name, "label": label, "value": value}


# ------------------------------------------------------------------------------------------------------------ simulated


def _simulated(simulation: Simulation) -> dict[str, Any]:
    lowered, graph = simulation.lowered, simulation.lowered.graph
    number = {op: task for task, op in enumerate(graph.ops)}
    classes, class_of = _classes(lowered, BoundCosts(lowered.program, simulation.costs))
    return {
        "ops": _op_columns(graph.ops, graph.ranks),
        "messages": [
            [MESSAGE_KINDS.index(m.kind), m.source, m.target, number[m.producer], number[m.consumer]]
            for m in graph.messages
            if m.producer is not None and m.consumer is not None
        ],
        "collectives": [
            [COLLECTIVE_KINDS.index(c.kind), c.ranks[0], _number_of_op(c, number), list(c.ranks)]
            for c in graph.collectives
        ],
        "copies": [[c.source, int(c.resource == "copy_in"), number[c.op]] for c in graph.copies],
        "classes": classes,
        "classOf": class_of,
        "order": list(lowered.order),
        "before": _before(lowered),
        "makespan": simulation.makespan,
        "memory": {
            "unit": simulation.costs.memory_unit,
            "ranks": [_levels(curve) for curve in memory_curves(lowered, simulation.costs)],
        },
    }


def _op_columns(ops: Sequence[Op], ranks: Sequence[int]) -> dict[str, Any]:
    return {
        "kind": "".join(op.kind for op in ops),
        "rank": list(ranks),
        "stage": [op.stage for op in ops],
        "microbatch": [op.microbatch for op in ops],
        "chunk": [op.chunk for op in ops] if any(op.chunk for op in ops) else [],
    }


def _size(ranks: int, ops: Sequence[Op]) -> str:
    """Return a key of the timeline's size. Timelines of one size have the same ops, or a recording lacks some."""
    most = (max(map(attrgetter(name), ops), default=0) for name in ("stage", "microbatch", "chunk"))
    return ",".join(map(str, (ranks, *most)))


def _before(lowered: LoweredProgram) -> list[list[int]]:
    """Return, for each task, the distances back to the tasks it waits for, without the previous one on its resource."""
    before: list[list[int]] = [[] for _ in range(lowered.graph.num_tasks)]
    for waits in (enumerate(lowered.graph.successors), stream_waits(lowered).items()):
        for task, successors in waits:
            for successor in successors:
                before[successor].append(successor - task)
    return before


def _levels(curve: MemoryCurve) -> dict[str, Any]:
    """Return one rank's memory in columns: twice the task's number, plus one at its end; host memory only if any is
    used.
    """
    levels = curve.levels
    hosted = any(level.host for level in levels)
    return {
        "at": [2 * level.task + level.at_end for level in levels],
        "device": [_short(level.device) for level in levels],
        "host": [_short(level.host) for level in levels] if hosted else [],
        "static": [_short(curve.static_device), _short(curve.static_host)],
    }


def _classes(lowered: LoweredProgram, bound: BoundCosts) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the classes of tasks that take the same time for the same reason, with that time and its amounts; and the
    class of each task.
    """
    rates, graph, handling = _Rates(bound), lowered.graph, handling_times(lowered, bound)
    numbers: dict[tuple[Any, ...], int] = {}
    classes: list[dict[str, Any]] = []
    class_of = []

    def add(time: float, amounts: Amounts) -> None:
        key = (time, *amounts.items())
        if key not in numbers:
            numbers[key] = len(classes)
            classes.append({"time": time, "amounts": amounts})
        class_of.append(numbers[key])

    for op in graph.ops:
        amounts = rates.op(op)
        if more := handling.get(op, 0.0):
            amounts = amounts | {"rest": amounts.get("rest", 0.0) + more}
        add(bound.op_time(op) + more, amounts)
    for transfer in graph.transfers:
        time = bound.transfer_time(transfer)
        add(time, rates.transfer(transfer, time))
    return classes, class_of


def _number_of_op(transfer: Transfer, number: Mapping[Op, int]) -> int:
    """Return the number of the op that a collective belongs to; -1 if it belongs to a stage."""
    return -1 if transfer.producer is None and transfer.consumer is None else number[transfer.op]


class _Rates:
    """The amounts of ops. by_hand: of a piece's rate a share of a microbatch; else seconds, and the rates are 1."""

    def __init__(self, bound: BoundCosts):
        self.bound, self.by_hand = bound, isinstance(bound.costs, PieceTimes)
        self._units: dict[str, Costs] = {piece: PieceTimes({piece: 1.0}, 1.0) for piece in PIECE_KINDS}
        self._known: dict[Work, Amounts] = {}

    def op(self, op: Op) -> Amounts:
        amounts = dict(self._work(self.bound.work(op)))
        if self.bound.recomputes_inside(op):
            for rate, amount in self._work(self.bound.work(op._replace(kind="R"))).items():
                amounts[rate] = amounts.get(rate, 0.0) + amount
        return amounts

    def transfer(self, transfer: Transfer, time: float) -> Amounts:
        """Return the costs of a transfer that takes `time`. With times by hand a collective takes a message's time."""
        row = TRANSFER_KINDS[transfer.kind]
        if takes_no_time(transfer.kind):
            return {}
        if row.moves == "offloaded":
            size = self.bound.size(Buffer("offloaded", transfer.source, *transfer.unit))
            return {"copy": size if self.by_hand else time}
        if self.by_hand:
            return {"message": 1.0}
        return {"message" if row.resource == "link" else "sharing": time}

    def _work(self, work: Work) -> Amounts:
        if work not in self._known:
            own = self._shares(work) if self.by_hand else self._seconds(work)
            self._known[work] = {rate: amount for rate, amount in own.items() if amount}
        return self._known[work]

    def _shares(self, work: Work) -> Amounts:
        forward = work._replace(kind="F")
        amounts = {f"{work.kind} {piece}": self._units[piece].op_time(forward) for piece in _roles(work)}
        return amounts if work.kind == "R" else amounts | {"overhead": 1.0}

    def _seconds(self, work: Work) -> Amounts:
        """Return the time that each kind of piece adds to an op without pieces; the rest does not depend on pieces."""
        costs, alone = self.bound.costs, work._replace(receives=None, sends=None)
        nothing = costs.op_time(alone._replace(pieces=()))
        amounts = {}
        for role in _roles(work):
            pieces = tuple(piece for piece in work.pieces if piece.role == role)
            amounts[f"{work.kind} {role}"] = costs.op_time(alone._replace(pieces=pieces)) - nothing
        took, apart = costs.op_time(work), sum(amounts.values())
        if apart > took * (1 + 1e-9):  # pieces hide part of one another's collectives
            return {name: amount * took / apart for name, amount in amounts.items()}
        return amounts | {"rest": took - apart}


def _roles(work: Work) -> Iterable[str]:
    return dict.fromkeys(piece.role for piece in work.pieces)


# ------------------------------------------------------------------------------------------------- measured, and stuck


def _measured(timeline: Timeline) -> dict[str, Any]:
    """Return the page's data of a measured timeline. Messages and copies of ops that were not recorded are left out."""
    ops = sorted(timeline.ops, key=lambda event: (event.rank, event.start, event.end))
    number = {event.op: task for task, event in enumerate(ops)}
    messages, sharing, copies = (
        [event for event in events if all(op in number for op in (event.producer, event.consumer) if op is not None)]
        for events in (timeline.messages, timeline.collectives, timeline.copies)
    )
    times = [(event.start, event.end) for events in (ops, messages, sharing, copies) for event in events]
    return {
        "ops": _op_columns([event.op for event in ops], [event.rank for event in ops]),
        "messages": [
            [MESSAGE_KINDS.index(m.kind), m.source, m.target, number[m.producer], number[m.consumer]]
            for m in messages
            if m.producer is not None and m.consumer is not None
        ],
        "collectives": [
            [COLLECTIVE_KINDS.index(event.kind), event.source, number[event.op], list(event.ranks)] for event in sharing
        ],
        "copies": [[event.source, int(event.resource == "copy_in"), number[event.op]] for event in copies],
        "start": [_short(start) for start, _ in times],
        "end": [_short(end) for _, end in times],
        "makespan": timeline.makespan,
    }


def circle_data(error: CircleError) -> dict[str, Any]:
    """Return the page's data of a program that deadlocks: each rank's ops in order, which of them can end, and the
    cycle.
    """
    program = error.program
    ops = [op for own in program.ranks for op in own]
    ranks = [rank for rank, own in enumerate(program.ranks) for _ in own]
    number = {op: task for task, op in enumerate(ops)}
    return {
        "heading": f"{program.schedule}: cannot run",
        "title": program.schedule,
        "ranks": program.num_ranks,
        "unit": "",
        "chunked": any(op.chunk for op in ops),
        "size": _size(program.num_ranks, ops),
        "ops": _op_columns(ops, ranks),
        "circle": [[number[op], number[target], int(direct)] for op, target, direct in error.circle],
        "ended": [int(op in error.ended) for op in ops],
        "reason": str(error),
    }


def _short(value: float) -> float:
    return float(f"{value:.10g}")
