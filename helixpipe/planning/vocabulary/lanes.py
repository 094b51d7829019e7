"""Orders in which forwards run further ahead of backwards than in a given one.

Where a gradient comes back later than a schedule's order supposes, ranks wait at every turn. Here the ops of a rank are
lanes: forwards, backwards, weight gradients, forwards of heads and their backwards, each in the order given; which lane
goes next is decided anew, by what has arrived and by a preference. A forward still waits for the backwards, and weight
gradients, that came before it in the given order, but for the last few of them: as many more microbatches may be in
flight. All these constraints hold in the given order as well, so no choice can deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf

from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.build import graph_of
from helixpipe.lowering.graph import Graph
from helixpipe.program.costs import Costs
from helixpipe.program.program import Program

HEAD_BACKWARDS, HEADS, FORWARDS, BACKWARDS, WEIGHTS = "head's backward", "head", "forward", "backward", "weights"

_LANE = {"F": FORWARDS, "B": BACKWARDS, "I": BACKWARDS, "R": BACKWARDS, "W": WEIGHTS}


class _Lanes:
    """The lanes of a rank in the making.

    lanes: the tasks of each. done: how many of each have been started. needs: of each forward how many backwards and
    weight gradients must have been started before it. order: the tasks started so far.
    """

    def __init__(self, graph: Graph, rank: int, heads: range, prefer: Sequence[str], ahead: float):
        self.lanes: dict[str, list[int]] = {name: [] for name in prefer}
        self.done = dict.fromkeys(prefer, 0)
        self.needs: list[tuple[float, float]] = []
        self.order: list[int] = []
        self.busy = False
        for task in graph.rank_tasks[rank]:
            op = graph.ops[task]
            lane = _LANE[op.kind]
            if op.stage in heads and (op.kind != "W" or len(heads) == 1):
                lane = HEADS if op.kind == "F" else HEAD_BACKWARDS
            if lane == FORWARDS:
                self.needs.append((len(self.lanes[BACKWARDS]) - ahead, len(self.lanes[WEIGHTS]) - ahead))
            self.lanes[lane].append(task)

    def next(self, waiting: Sequence[int]) -> int | None:
        """Take the op that starts now; None where there is none."""
        for name, tasks in self.lanes.items():
            at = self.done[name]
            if at == len(tasks) or waiting[tasks[at]]:
                continue
            if name == FORWARDS:
                backwards, weights = self.needs[at]
                if self.done[BACKWARDS] < backwards or self.done[WEIGHTS] < weights:
                    continue
            self.done[name] += 1
            self.order.append(tasks[at])
            return tasks[at]
        return None


def reordered(program: Program, costs: Costs, heads: range, prefer: Sequence[str], ahead: float = inf) -> Program:
    """Return the program with the ops of every rank in the order in which they start if each rank that is free takes
    the first of the lanes, in the order of `prefer`, whose next op can start.

    heads: the last stages, whose ops are in lanes of their own; weight gradients of one that is whole, which keeps its
    logits' gradients for them, directly follow its backwards. ahead: how many backwards (and weight gradients) fewer
    than in the given order may come before a forward; all forwards keep their order, and so do all backwards.
    """
    graph, bound = graph_of(program), BoundCosts(program, costs)
    durations = [*map(bound.op_time, graph.ops), *map(bound.transfer_time, graph.transfers)]
    ranks = [_Lanes(graph, rank, heads, prefer, ahead) for rank in range(program.num_ranks)]
    waiting, (resource, table) = list(graph.num_dependencies), graph.resources()
    queues, occupied = [deque[int]() for _ in table], [False] * len(table)
    completions: list[tuple[float, int, int]] = []  # (time, turn, task)
    turn = 0

    def start(number: int, now: float) -> None:
        nonlocal turn
        if occupied[number]:
            return
        if number < len(ranks):
            task = ranks[number].next(waiting)
        else:
            task = queues[number].popleft() if queues[number] else None
        if task is not None:
            occupied[number] = True
            turn += 1
            heappush(completions, (now + durations[task], turn, task))

    for task in range(graph.num_ops, graph.num_tasks):
        if not waiting[task]:
            queues[resource[task]].append(task)
    for number in range(len(table)):
        start(number, 0.0)
    while completions:
        now, _, _ = completions[0]
        touched: dict[int, None] = {}
        while completions and completions[0][0] == now:  # what ends at one time is known before anyone chooses
            task = heappop(completions)[2]
            occupied[resource[task]] = False
            touched[resource[task]] = None
            for successor in graph.successors[task]:
                waiting[successor] -= 1
                if not waiting[successor]:
                    touched[resource[successor]] = None
                    if successor >= graph.num_ops:
                        queues[resource[successor]].append(successor)
        for number in touched:
            start(number, now)
    orders = tuple(tuple(graph.ops[task] for task in rank.order) for rank in ranks)
    return replace(program, ranks=orders)
