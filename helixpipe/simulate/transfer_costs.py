"""Computes what transfers take of the ranks: the time of ops that wait for them, and compute time beside that of ops.

On a GPU a transfer takes no compute time, but a collective slows down what it runs beside. On a CPU weights are
packed, sent, received and added up by the cores that compute, and what leaves for the host is copied by them. That is
charged to the op that comes next on the rank, or to its last one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.compiled import transfer_samples
from helixpipe.lowering.graph import Graph
from helixpipe.lowering.order import TaskTimes
from helixpipe.lowering.project import Action, LoweredProgram
from helixpipe.program.program import Op
from helixpipe.program.tasks import Buffer
from helixpipe.program.transfer import TRANSFER_KINDS
from helixpipe.simulate.streams import Waits

_HANDLED, _STARTED = frozenset({Action.SEND, Action.WAIT}), frozenset({Action.START})
"""What a rank does itself for a message, and for a copy."""


def handling_times(lowered: LoweredProgram, bound: BoundCosts) -> dict[Op, float]:
    """Return the compute time of transfers by the op that it is charged to; empty where no transfer takes any."""
    samples = transfer_samples(lowered.graph)
    handled = [transfer for transfer in samples if TRANSFER_KINDS[transfer.kind].beside_ops]
    if not any(bound.handling_time(transfer, sends) for transfer in handled for sends in (True, False)):
        return {}
    times: dict[Op, float] = {}
    for rank in range(lowered.program.num_ranks):
        waiting, last = 0.0, None
        for op, time in _stream(lowered, bound, rank):
            waiting += time
            if op is not None:
                times[op] = times.get(op, 0.0) + waiting
                waiting, last = 0.0, op
        if last is not None:
            times[last] += waiting
    return times


def _stream(lowered: LoweredProgram, bound: BoundCosts, rank: int) -> Iterator[tuple[Op | None, float]]:
    """The rank's instructions: an op, or None and what its transfer takes."""
    for action, op, transfer, _ in lowered.streams[rank]:
        if action is Action.RUN:
            yield op, 0.0
        elif transfer is not None and action in (_HANDLED if transfer.resource == "link" else _STARTED):
            yield None, bound.handling_time(transfer, action is not Action.WAIT)


def hidden_share(copy_time: Sequence[float], held_up: Sequence[float]) -> float:
    """The share of the ranks' copy time for which no op waits, 0 to 1; 1 where copies take no time."""
    total = sum(copy_time)
    return max(0.0, 1 - sum(held_up) / total) if total else 1.0


def held_up_by_copies(graph: Graph, times: TaskTimes, waits: Waits) -> list[float]:
    """Return for each rank how long its ops wait for copies alone. Meanwhile the rank is idle, and an engine of it
    copies: it is never more than its copies take."""
    return _held_up(graph, times, waits, [graph.task(copy) for copy in graph.copies])


def held_up_by_sharing(graph: Graph, times: TaskTimes, waits: Waits) -> list[float]:
    """Return for each rank how long its ops wait for gathers and scatters alone, and these last after its last op."""
    shared = [graph.task(each) for each in graph.collectives if TRANSFER_KINDS[each.kind].group]
    held_up = _held_up(graph, times, waits, shared)
    over = [times.end[tasks[-1]] if tasks else 0.0 for tasks in graph.rank_tasks]
    last = list(over)
    for task in shared:
        for rank in graph.transfer(task).ranks:
            last[rank] = max(last[rank], times.end[task])
    return [held + end - begin for held, end, begin in zip(held_up, last, over, strict=True)]


def _held_up(graph: Graph, times: TaskTimes, waits: Waits, transfers: Collection[int]) -> list[float]:
    """For each rank how long its ops start later than the op before them and all they wait for but these transfers
    would have let them."""
    held_up, start, end = [0.0] * len(graph.rank_tasks), times.start, times.end
    after: set[int] = set()
    for transfer in transfers:
        after.update(task for task in (*graph.successors[transfer], *waits.get(transfer, ())) if task < graph.num_ops)
    if not after:
        return held_up
    ready, transfers = dict.fromkeys(after, 0.0), frozenset(transfers)
    for tasks in graph.rank_tasks:
        for before, task in pairwise(tasks):
            if task in ready:
                ready[task] = end[before]
    for before in range(graph.num_tasks):
        if before in transfers:
            continue
        for task in (*graph.successors[before], *waits.get(before, ())):
            if task in ready and end[before] > ready[task]:
                ready[task] = end[before]
    for task, time in ready.items():
        held_up[graph.ranks[task]] += max(0.0, start[task] - time)
    return held_up


def leaving(graph: Graph, costs: BoundCosts) -> list[float]:
    """Return how much each rank copies to the host in a step, in the costs' unit of memory."""
    left = [0.0] * len(graph.rank_tasks)
    for copy in graph.copies:
        if copy.resource == "copy_out":
            left[copy.source] += costs.size(Buffer("offloaded", copy.source, *copy.unit))
    return left
