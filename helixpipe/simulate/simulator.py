"""Simulator: lowered program + costs -> timeline, bubble, memory.

Each rank runs its ops one at a time in stream order; each directed link carries its messages one at a time in stream
order; an op starts when its rank is free and all it waits for is there. Edges within a rank are free. What else a
rank's stream makes it wait for is in `streams`. Nothing here is a schedule's formula.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from helixpipe.common.collector import collector_paused
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.compiled import rank_spans, rank_work, times_of_streams
from helixpipe.lowering.order import TaskTimes, list_schedule
from helixpipe.lowering.project import LoweredProgram
from helixpipe.program.costs import Costs
from helixpipe.program.program import Program
from helixpipe.program.text import format_rows
from helixpipe.program.timeline import OpEvent, Timeline, TransferEvent, bubble_of
from helixpipe.program.transfer import TransferKind
from helixpipe.simulate.blocking import blocking_schedule
from helixpipe.simulate.needs import device_needs
from helixpipe.simulate.streams import Waits, queue_waits, stream_waits, times_as_run, transfer_orders
from helixpipe.simulate.sweep import Peak, peaks
from helixpipe.simulate.transfer_costs import (
    handling_times,
    held_up_by_copies,
    held_up_by_sharing,
    hidden_share,
    leaving,
)


@dataclass(frozen=True)
class Simulation:
    """One simulated step.

    times: of all tasks. unit, one_queue: see `simulate`.
    makespan, ideal, bubble_time: in the costs' unit; ideal = total work / ranks; bubble_time = makespan - ideal.
    busy: time in ops of each rank. peaks: of each rank's memory, in the costs' unit.
    costs: what it was simulated with. peak_activation: the most that units and keys and values keep at once on each
    rank. offloaded: what leaves each rank for its host. held_up: how long ops of each rank wait for copies alone (see
    `transfer_costs`). held_up_by_sharing: how long they wait for gathers and scatters
    alone. title: of the timeline, if not the schedule's name. hidden: the share of all copy time for which none does.
    """

    lowered: LoweredProgram
    times: TaskTimes
    unit: str
    busy: list[float]
    peaks: list[Peak]
    costs: Costs
    one_queue: bool = False
    title: str = ""

    @cached_property
    def offloaded(self) -> list[float]:
        graph = self.lowered.graph
        return leaving(graph, BoundCosts(self.lowered.program, self.costs)) if self.copies else [0.0] * len(self.busy)

    @cached_property
    def held_up(self) -> list[float]:
        zeros = [0.0] * len(self.busy)
        return held_up_by_copies(self.lowered.graph, self.times, self._waits) if self.copies else zeros

    @cached_property
    def held_up_by_sharing(self) -> list[float]:
        zeros = [0.0] * len(self.busy)
        return held_up_by_sharing(self.lowered.graph, self.times, self._waits) if self.shares else zeros

    @cached_property
    def _waits(self) -> Waits:
        return queue_waits(self.lowered) if self.one_queue else stream_waits(self.lowered)

    @property
    def makespan(self) -> float:
        return self.times.makespan

    @cached_property
    def timeline(self) -> Timeline:
        """The ops, and the transfers that belong to them, with when they run."""
        graph, start, end = self.lowered.graph, self.times.start, self.times.end
        ops = [OpEvent(graph.ranks[i], op, start[i], end[i]) for i, op in enumerate(graph.ops)]
        moved = [
            TransferEvent(each.kind, each.ranks, each.producer, each.consumer, start[i], end[i])
            for i, each in enumerate(graph.transfers, start=graph.num_ops)
            if each.producer or each.consumer
        ]
        program = self.lowered.program
        return Timeline(self.title or program.schedule, program.num_ranks, ops, moved, self.unit, self.makespan)

    @property
    def free_messages(self) -> bool:
        """Whether messages between ranks take no time."""
        return all(event.end == event.start for event in self.timeline.transfers if event.source != event.target)

    @property
    def copies(self) -> bool:
        """Whether anything leaves for the host."""
        return bool(self.lowered.graph.count(_copies))

    @property
    def shares(self) -> bool:
        """Whether weights are in parts over data-parallel ranks."""
        return bool(self.lowered.graph.count(_shares))

    @property
    def copy_time(self) -> list[float]:
        return self.timeline.copy_time()

    @property
    def sharing_time(self) -> list[float]:
        """The time of gathers and scatters over data-parallel ranks, on each rank."""
        return self.timeline.sharing_time()

    @property
    def hidden(self) -> float:
        return hidden_share(self.copy_time, self.held_up)

    @property
    def peak_host(self) -> list[float]:
        return [peak.host for peak in self.peaks]

    @property
    def peak_activation(self) -> list[float]:
        return [peak.activations for peak in self.peaks]

    @property
    def device_needs(self) -> list[float]:
        """See `needs.device_needs`."""
        return device_needs(self.lowered, self.costs, self.peaks)

    @property
    def host_needs(self) -> list[float]:
        """The same in its host's memory."""
        pieces = map(self.lowered.program.pieces_of_rank, range(len(self.peaks)))
        return [peak.host + self.costs.static_host_memory(own) for peak, own in zip(self.peaks, pieces, strict=True)]

    @property
    def ideal(self) -> float:
        return sum(self.busy) / len(self.busy)

    @property
    def bubble_time(self) -> float:
        return self.makespan - self.ideal

    @property
    def shifted_bubble_time(self) -> float:
        """The bubble when the next step of each rank may start where this one ends on that rank: the longest time
        from a rank's first op to its last, less the ideal. Papers on zero bubbles count so; a step that ends with
        something collective (the norm of all gradients) has `bubble_time` instead. Training has it with
        --enable-optimizer-post-validation."""
        spans = rank_spans(self.lowered.graph, self.times)
        return max((end - start for start, end in spans), default=-self.makespan) - self.ideal

    @property
    def bubble_ratio(self) -> float:
        return bubble_of(self.busy, self.makespan)

    def to_json(self, order: bool = False) -> dict[str, Any]:
        """Return what `helixpipe simulate --json` prints; `order` adds the program as rows of cells."""
        program = self.lowered.program
        result: dict[str, Any] = {
            "schedule": program.schedule,
            "ranks": program.num_ranks,
            "microbatches": program.num_microbatches,
            "layers": program.num_layers,
            "chunks": program.num_chunks,
            "makespan": _plain(self.makespan),
            "ideal": _plain(self.ideal),
            "bubble_time": _plain(self.bubble_time),
            "bubble_ratio": round(self.bubble_ratio, 9),
            "bubble_time_without_flush": _plain(self.shifted_bubble_time),
            "busy": [_plain(value) for value in self.busy],
            "peak_activation": [_plain(value) for value in self.peak_activation],
            "peak_activation_unit": self.costs.memory_unit,
            "messages": self.lowered.graph.count(lambda row: row.resource == "link"),
            "recomputed": {kind: round(share, 9) for kind, share in recomputed_shares(program).items()},
        }
        if self.copies:
            result |= {
                "copy_time": [_plain(value) for value in self.copy_time],
                "held_up_by_copies": [_plain(value) for value in self.held_up],
                "copy_time_hidden": round(self.hidden, 9),
                "offloaded": [_plain(value) for value in self.offloaded],
                "peak_host": [_plain(value) for value in self.peak_host],
            }
        if self.shares:
            result |= {
                "sharing_time": [_plain(value) for value in self.sharing_time],
                "held_up_by_sharing": [_plain(value) for value in self.held_up_by_sharing],
                "sharing_time_hidden": round(hidden_share(self.sharing_time, self.held_up_by_sharing), 9),
            }
        if order:
            result["order"] = format_rows(program)
        return result


def recomputed_shares(program: Program) -> dict[str, float]:
    """Return the share of units that recompute it, for each kind of piece of which something is recomputed."""
    each_stage = sum(map(len, program.workload.microbatches))
    own = Counter(unit.stage for unit in program.activations)  # units not treated as their stage says
    all_there, again = Counter[str](), Counter[str]()
    for number, stage in enumerate(program.stages):
        for piece in stage.pieces:
            all_there[piece.kind] += each_stage
        for piece in (piece for run in stage.recompute for piece in run):
            again[piece.kind] += each_stage - own[number]
    for activations in program.activations.values():
        for piece in (piece for run in activations.recompute for piece in run):
            again[piece.kind] += 1
    return {kind: again[kind] / count for kind, count in all_there.items() if again[kind]}


@collector_paused()
def simulate(
    lowered: LoweredProgram,
    costs: Costs,
    unit: str = "",
    noise: float = 0.0,
    seed: int = 0,
    one_queue: bool = False,
    blocking: bool = False,
) -> Simulation:
    """Run a lowered program on paper.

    unit: that of the costs' times, for the timeline's axis. noise: every op takes up to this part longer or shorter
    than it should, drawn evenly with that seed; the order of ops and messages stays. one_queue: on devices that start
    work in the order it was issued in; see `streams`. blocking: no rank computes while it sends or receives; see
    `blocking`. Not both.
    """
    assert not (one_queue and blocking), "messages beside no op need no queue"
    program, graph = lowered.program, lowered.graph
    bound = BoundCosts(program, costs)
    own_time, transfer_time = bound.timers
    handling = handling_times(lowered, bound)
    op_time = (lambda op: own_time(op) + handling.get(op, 0.0)) if handling else own_time
    if noise:
        from random import Random  # takes long, and few need it

        rng = Random(seed)
        exact = op_time
        op_time = lambda op: exact(op) * (1 + noise * (2 * rng.random() - 1))  # noqa: E731
    waits = queue_waits if one_queue else stream_waits
    if noise or one_queue or blocking or (handling and lowered.compiled is None):
        run = blocking_schedule if blocking else list_schedule
        times = run(graph, op_time, transfer_time, transfer_orders(lowered), waits(lowered))
    elif handling:
        times = times_of_streams(lowered, bound, lambda op: handling.get(op, 0.0))
    else:
        times = times_as_run(lowered, costs)
    return Simulation(lowered, times, unit, rank_work(graph, times), peaks(lowered, bound), costs, one_queue)


def _copies(row: TransferKind) -> bool:
    return row.resource in ("copy_out", "copy_in")


def _shares(row: TransferKind) -> bool:
    return bool(row.group)


def _plain(value: float) -> float | int:
    """Whole numbers without `.0`, the rest without the last digits' rounding noise."""
    rounded = round(value, 9)
    return int(rounded) if rounded == int(rounded) else rounded
