"""Orders in which forwards run further ahead of backwards than in a given one.

Where a gradient comes back later than a schedule's order supposes, ranks wait at every turn. Here the ops of a rank are
lanes: forwards, backwards, weight gradients, forwards of heads and their backwards, each in the order given; which lane
goes next is decided anew, by what has arrived and by a preference. A forward still waits for the backwards, and weight
gradients, that came before it in the given order, but for the last few of them: as many more microbatches may be in
flight. All these constraints hold in the given order as well, so no choice can deadlock.

Instead a rank may have a number of units in flight at most. Then forwards may wait for each other in a circle, and the
order ends before all ops are in it.

A backward may take along the forward that could start as well: both then run at the same time (`Program.pairs`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from math import inf

from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.build import graph_of
from helixpipe.lowering.graph import Graph
from helixpipe.program.costs import Costs
from helixpipe.program.program import Op, Program

HEAD_BACKWARDS, HEADS, FORWARDS, BACKWARDS, WEIGHTS = "head's backward", "head", "forward", "backward", "weights"

_LANE = {"F": FORWARDS, "B": BACKWARDS, "I": BACKWARDS, "R": BACKWARDS, "W": WEIGHTS}


class _Lanes:
    """The lanes of a rank in the making.

    lanes: the tasks of each. done: how many of each have been started. needs: of each forward how many backwards and
    weight gradients must have been started before it. order: the tasks started so far. may_pair: whether a forward and
    a backward may run at the same time; None: none may.
    """

    def __init__(
        self, graph: Graph, rank: int, heads: range, prefer: Sequence[str], ahead: float,
        may_pair: Callable[[int, int], bool] | None, most: int | None,
    ):  # fmt: skip
        self.lanes: dict[str, list[int]] = {name: [] for name in prefer}
        self.done = dict.fromkeys(prefer, 0)
        self.needs: list[tuple[float, float]] = []
        self.order: list[int] = []
        self.may_pair = may_pair
        for task in graph.rank_tasks[rank]:
            op = graph.ops[task]
            lane = _LANE[op.kind]
            if op.stage in heads and (op.kind != "W" or len(heads) == 1):
                lane = HEADS if op.kind == "F" else HEAD_BACKWARDS
            if lane == FORWARDS:
                self.needs.append((len(self.lanes[BACKWARDS]) - ahead, len(self.lanes[WEIGHTS]) - ahead))
            self.lanes[lane].append(task)
        if most is not None:
            ended = range(1 - most, 1 - most + len(self.needs))
            self.needs = [(count, count if self.lanes[WEIGHTS] else 0) for count in ended]

    def next(self, waiting: Sequence[int]) -> tuple[int, ...]:
        """Take the op that starts now, or the forward and the backward; () where there is none."""
        for name in self.lanes:
            task = self._first(name, waiting)
            if task is None:
                continue
            self.done[name] += 1
            tasks = (task,) if self.may_pair is None else self._beside(name, task, waiting)
            self.order += tasks
            return tasks
        return ()

    def _beside(self, name: str, task: int, waiting: Sequence[int]) -> tuple[int, ...]:
        """The op that has been taken from a lane, and the one that starts at the same time; the forward comes first."""
        others = {FORWARDS: BACKWARDS, BACKWARDS: FORWARDS}.get(name)
        other = None if others is None else self._first(others, waiting)
        if others is None or other is None:
            return (task,)
        pair = (task, other) if name == FORWARDS else (other, task)
        if self.may_pair is None or not self.may_pair(*pair):
            return (task,)
        self.done[others] += 1
        return pair

    def _first(self, name: str, waiting: Sequence[int]) -> int | None:
        """The next op of a lane, if it can start."""
        tasks, at = self.lanes[name], self.done[name]
        if at == len(tasks) or waiting[tasks[at]]:
            return None
        if name == FORWARDS:
            backwards, weights = self.needs[at]
            if self.done[BACKWARDS] < backwards or self.done[WEIGHTS] < weights:
                return None
        return tasks[at]


MayPair = Callable[[int, Op, Op], bool]
"""Whether a forward and a backward of a rank may run at the same time."""


def reordered(
    program: Program, costs: Costs, heads: range, prefer: Sequence[str], ahead: float = inf,
    may_pair: MayPair | None = None, most: int | None = None,
) -> Program:  # fmt: skip
    """Return the program with the ops of every rank in the order in which they start if each rank that is free takes
    the first of the lanes, in the order of `prefer`, whose next op can start.

    heads: the last stages, whose ops are in lanes of their own; weight gradients of one that is whole, which keeps its
    logits' gradients for them, directly follow its backwards. ahead: how many backwards (and weight gradients) fewer
    than in the given order may come before a forward; all forwards keep their order, and so do all backwards.
    may_pair: which forwards run beside backwards. most: instead of ahead; with few in flight the order may lack ops.
    """
    graph, bound = graph_of(program), BoundCosts(program, costs)
    durations = [*map(bound.op_time, graph.ops), *map(bound.transfer_time, graph.transfers)]
    ranks = [
        _Lanes(graph, rank, heads, prefer, ahead, _of_tasks(graph, rank, may_pair), most)
        for rank in range(program.num_ranks)
    ]
    waiting, (resource, table) = list(graph.num_dependencies), graph.resources()
    queues, occupied = [deque[int]() for _ in table], [False] * len(table)
    completions: list[tuple[float, int, int]] = []  # (time, turn, task)
    turns, pairs = count(), set[Op]()

    def start(number: int, now: float) -> None:
        if occupied[number]:
            return
        if number < len(ranks):
            tasks = ranks[number].next(waiting)
        else:
            tasks = (queues[number].popleft(),) if queues[number] else ()
        if not tasks:
            return
        occupied[number] = True
        ops = [graph.ops[task] for task in tasks if task < graph.num_ops]
        pairs.update(ops[:-1])
        end = now + (bound.pair_time(*ops) if len(ops) == 2 else durations[tasks[0]])
        for task in tasks:
            heappush(completions, (end, next(turns), task))

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
    return replace(program, ranks=_orders(graph, ranks), pairs=frozenset(pairs), turns=())


def _orders(graph: Graph, ranks: Sequence[_Lanes]) -> tuple[tuple[Op, ...], ...]:
    return tuple(tuple(graph.ops[task] for task in rank.order) for rank in ranks)


def _of_tasks(graph: Graph, rank: int, may_pair: MayPair | None) -> Callable[[int, int], bool] | None:
    """Return whether two tasks of a rank may run at the same time; None: none may."""
    if may_pair is None:
        return None
    return lambda forward, backward: (
        graph.ops[backward].kind != "R" and may_pair(rank, graph.ops[forward], graph.ops[backward])
    )
