"""How much of the time that copies to the host and back take is hidden behind ops. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.graph import Graph
from helixpipe.lowering.order import Times
from helixpipe.program.tasks import Buffer
from helixpipe.simulate.streams import Waits


def hidden_share(copy_time: Sequence[float], held_up: Sequence[float]) -> float:
    """The share of the ranks' copy time for which no op waits, 0 to 1; 1 where copies take no time."""
    total = sum(copy_time)
    return max(0.0, 1 - sum(held_up) / total) if total else 1.0


def held_up_by_copies(graph: Graph, times: Times, waits: Waits) -> list[float]:
    """For each rank how long its ops start later than the op before them and all they wait for but copies would have
    let them. Meanwhile the rank is idle, and an engine of it copies: it is never more than its copies take."""
    held_up, start, end = [0.0] * len(graph.rank_tasks), times.start, times.end
    after_copy: set[int] = set()
    for copy in range(graph.first_copy, graph.num_tasks):
        after_copy.update(task for task in (*graph.successors[copy], *waits.get(copy, ())) if task < graph.num_ops)
    if not after_copy:
        return held_up
    ready = dict.fromkeys(after_copy, 0.0)
    for tasks in graph.rank_tasks:
        for before, task in pairwise(tasks):
            if task in ready:
                ready[task] = end[before]
    for before in range(graph.first_copy):
        for task in (*graph.successors[before], *waits.get(before, ())):
            if task in ready and end[before] > ready[task]:
                ready[task] = end[before]
    for task, time in ready.items():
        held_up[graph.ranks[task]] += max(0.0, start[task] - time)
    return held_up


def leaving(graph: Graph, costs: BoundCosts) -> list[float]:
    """For each rank what it copies to the host in a step, in the costs' unit of memory."""
    left = [0.0] * len(graph.rank_tasks)
    for copy in graph.copies:
        if not copy.inward:
            left[copy.rank] += costs.size(Buffer("offloaded", copy.rank, *copy.unit))
    return left
