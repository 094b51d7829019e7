"""Transfers whose place in the one order is behind an op that runs when they start.

By its start a transfer stands before the op that runs then, on each of its ranks. That op may so wait for the transfer:

- Where a device has a single hardware queue (`CUDA_DEVICE_MAX_CONNECTIONS=1`) it starts nothing before the transfer,
  which cannot start before its link or group is free. Where that is later than the op's start, the transfer goes behind
  the op if nobody needs it sooner; else it keeps its place, which costs nothing where there are more queues.
- A sum of gradients that goes round a ring waits on its rank for the one it adds (see `lower`). It goes behind the op
  if the op would wait for that longer than the sum for the op.

The first is not for programs with ring stages: what waits there keeps a rank of the ring waiting.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import inf

from helixpipe.lowering.graph import Graph
from helixpipe.lowering.order import TaskTimes


def without_holds(graph: Graph, times: TaskTimes) -> TaskTimes:
    """Return the same times with an order in which transfers that can wait hold up no op."""
    if any(stage.placement == "ring" for stage in graph.program.stages):
        behind = _late_sums(graph, times)
    elif times.crowded and (held := _held(graph, times)):
        slack = _slack(graph, times)
        behind = [(op, task) for op, task in held if times.end[op] - times.start[task] <= slack[task]]
    else:
        behind = []
    return TaskTimes(times.start, times.end, _sorted(graph, times, behind), times.crowded) if behind else times


def _late_sums(graph: Graph, times: TaskTimes) -> list[tuple[int, int]]:
    """Ops that would wait for gradients longer than the sum these are added to would for the op; with the sum."""
    late = []
    for task, total in enumerate(graph.transfers, start=graph.num_ops):
        if total.kind == "weight_gradients" and total.follows >= 0:
            start, came = times.start[task], times.end[graph.num_ops + total.follows]
            op = _begun(graph, times, total.source, start)
            if op >= 0 and came - times.start[op] >= times.end[op] - start > 0:
                late.append((op, task))
    return late


def _held(graph: Graph, times: TaskTimes) -> list[tuple[int, int]]:
    """Ops that stand behind a transfer, but began before its link or group was free; with the transfer."""
    resource, table = graph.resources()
    place = [0] * graph.num_tasks
    for at, task in enumerate(times.order):
        place[task] = at
    held = []
    for task, free in times.crowded:
        for rank in table[resource[task]].ranks:
            op = _begun(graph, times, rank, times.start[task])
            if op >= 0 and times.start[op] < free and place[op] > place[task]:
                held.append((op, task))
    return held


def _begun(graph: Graph, times: TaskTimes, rank: int, time: float) -> int:
    """The last op of a rank that began before a time; -1 where there is none."""
    ops = graph.rank_tasks[rank]
    at = bisect_left(ops, time, key=times.start.__getitem__)
    return ops[at - 1] if at else -1


def _slack(graph: Graph, times: TaskTimes) -> dict[int, float]:
    """Return for each transfer how much later it may end without any op starting later."""
    resource, _ = graph.resources()
    slack: dict[int, float] = {}
    following: dict[int, int] = {}  # of each link and group the transfer after
    for task in reversed(times.order):
        if task < graph.num_ops:
            continue
        end, least = times.end[task], inf
        for waiter in graph.successors[task]:
            least = min(least, times.start[waiter] - end + slack.get(waiter, 0.0))
        if (waiter := following.get(resource[task], -1)) >= 0:
            least = min(least, times.start[waiter] - end + slack[waiter])
        slack[task], following[resource[task]] = least, task
    return slack


def _sorted(graph: Graph, times: TaskTimes, behind: Sequence[tuple[int, int]]) -> list[int]:
    """The order anew, with these transfers behind these ops. It exists: by their starts all tasks are in such an
    order."""
    resource, table = graph.resources()
    queues: list[list[int]] = [[] for _ in table]
    for task in times.order:
        queues[resource[task]].append(task)
    more: dict[int, list[int]] = {}
    for before, task in (*behind, *(pair for queue in queues for pair in pairwise(queue))):
        more.setdefault(before, []).append(task)
    waiting = list(graph.num_dependencies)
    for waiters in more.values():
        for task in waiters:
            waiting[task] += 1
    keys = [(0.0, 0, 0)] * graph.num_tasks
    for place, task in enumerate(times.order):
        is_op = task < graph.num_ops
        keys[task] = (times.end[task] if is_op else times.start[task], int(is_op), place)
    ready = [keys[task] for task in times.order if not waiting[task]]
    heapify(ready)
    order: list[int] = []
    while ready:
        task = times.order[heappop(ready)[2]]
        order.append(task)
        for waiter in (*graph.successors[task], *more.get(task, ())):
            waiting[waiter] -= 1
            if not waiting[waiter]:
                heappush(ready, keys[waiter])
    return order
