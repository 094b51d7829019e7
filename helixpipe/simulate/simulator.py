"""Simulator: lowered program + costs -> timeline, bubble, memory. No torch here.

Each rank runs its ops one at a time in stream order; each directed link carries its messages one at a time in stream
order; an op starts when its rank is free and all it waits for is there. Edges within a rank are free. Nothing here is
a schedule's formula.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from helixpipe.lowering.graph import collector_paused, list_schedule
from helixpipe.lowering.lower import Action, LoweredProgram, timers
from helixpipe.program.costs import Costs
from helixpipe.program.program import format_rows
from helixpipe.program.timeline import MessageEvent, OpEvent, Timeline
from helixpipe.simulate.stash import StashWalk


@dataclass(frozen=True)
class Simulation:
    """One simulated step.

    makespan, ideal, bubble_time: in the costs' unit; ideal = total work / ranks; bubble_time = makespan - ideal.
    busy: time in ops of each rank. peak_activation: most stashed at once on each rank, in the costs' unit of memory.
    """

    lowered: LoweredProgram
    timeline: Timeline
    makespan: float
    busy: list[float]
    peak_activation: list[float]
    memory_unit: str = "microbatch-layers"

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
        first, last = [self.makespan] * len(self.busy), [0.0] * len(self.busy)
        for event in self.timeline.ops:
            first[event.rank] = min(first[event.rank], event.start)
            last[event.rank] = max(last[event.rank], event.end)
        return max(end - start for start, end in zip(first, last, strict=True)) - self.ideal

    @property
    def bubble_ratio(self) -> float:
        return self.bubble_time / self.makespan if self.makespan else 0.0

    def to_json(self, order: bool = False) -> dict[str, Any]:
        """What `helixpipe simulate --json` prints; `order` adds the program as rows of cells."""
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
            "peak_activation_unit": self.memory_unit,
            "messages": len(self.lowered.messages),
        }
        if order:
            result["order"] = format_rows(program)
        return result


@collector_paused()
def simulate(lowered: LoweredProgram, costs: Costs, unit: str = "") -> Simulation:
    """Run a lowered program on paper. unit: that of the costs' times, for the timeline's axis."""
    program, graph = lowered.program, lowered.graph
    first_message = len(graph.ops)
    link_orders: dict[tuple[int, int], list[int]] = {}
    for stream in lowered.streams:
        for instruction in stream:
            if instruction.action is Action.SEND and instruction.message is not None:
                message = instruction.message
                link_orders.setdefault((message.source, message.target), []).append(first_message + message.number)
    times = list_schedule(graph, *timers(program, costs), link_orders)
    ops = [OpEvent(graph.ranks[i], op, times.start[i], times.end[i]) for i, op in enumerate(graph.ops)]
    messages = [
        MessageEvent(m.kind, m.source, m.target, m.producer, m.consumer, times.start[i], times.end[i])
        for i, m in enumerate(graph.messages, start=first_message)
    ]
    timeline = Timeline(program.schedule, program.num_ranks, ops, messages, unit)
    peaks = [_peak_stash(lowered, rank, costs) for rank in range(program.num_ranks)]
    return Simulation(lowered, timeline, times.makespan, timeline.busy(), peaks, costs.memory_unit)


def _peak_stash(lowered: LoweredProgram, rank: int, costs: Costs) -> float:
    """Most stashed at once; ops of a rank never overlap, so the stream is enough."""
    walk, peak = StashWalk(lowered.program, costs, rank), 0.0
    for action, op, _ in lowered.streams[rank]:
        if op is not None and action is Action.RUN:
            peak = max(peak, walk.run(op), walk.now)
        elif op is not None:
            walk.free(op)
    return peak


def _plain(value: float) -> float | int:
    """Whole numbers without `.0`, the rest without the last digits' rounding noise."""
    rounded = round(value, 9)
    return int(rounded) if rounded == int(rounded) else rounded
