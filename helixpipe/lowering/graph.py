"""Dependencies derived from a program, and the list scheduler that times them. No torch here.

`build_graph` turns a program into tasks: its ops, and one message for every dependency that crosses ranks. The rules
are those of the mathematics, written once for every schedule:

- activation: F(s, m, c) -> F(s+1, m, c);  gradient: B|I(s+1, m, c) -> B|I(s, m, c);  own: F -> (R ->) B|I -> W;
- causal attention over chunks, for a stage with attention: F(s, m, c) -> F(s, m, c+1) (keys and values) and
  B|I(s, m, c+1) -> B|I(s, m, c) (their gradients). Keys and values stay on the rank, so these never become messages;
- weights of a shipped or ring stage before the ops that run with a copy of them, and their gradients after the ops that
  make them: all of these are messages, and `transfers` says which there are and what they wait for.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush

from helixpipe.lowering.borrowed import Turn, transfers
from helixpipe.program.message import Message
from helixpipe.program.program import Op, Program


@dataclass(frozen=True)
class Graph:
    """Tasks and dependencies of a program. Tasks 0..len(ops)-1 are ops, the others messages, in that order.

    rank_tasks: for each rank its op tasks in program order. successors: for each task the tasks that wait for it (rank
    order is not included). num_dependencies: for each task how many tasks it waits for.
    weights_of: for each op that runs with a copy of its stage's weights, the message that brought it. sum_of: for each
    op whose weight gradient leaves its rank, the message it leaves in.
    """

    program: Program
    ops: list[Op]
    ranks: list[int]
    messages: list[Message]
    rank_tasks: list[range]
    successors: list[list[int]]
    num_dependencies: list[int]
    weights_of: dict[Op, Message]
    sum_of: dict[Op, Message]

    @property
    def num_tasks(self) -> int:
        return len(self.ops) + len(self.messages)

    def message(self, task: int) -> Message:
        return self.messages[task - len(self.ops)]

    def is_message(self, task: int) -> bool:
        return task >= len(self.ops)


def dependencies(program: Program) -> Callable[[Op], list[tuple[Op, str]]]:
    """A function from an op to the ops it waits for, each with the kind of the dependency.

    Kinds: `activation`, `gradient` (these become messages between ranks), `kv` and `own` (always within a rank).
    """
    last_stage = len(program.stages) - 1
    last_chunk = program.num_chunks - 1
    attention = [stage.has_attention for stage in program.stages]
    splits = {op.unit for ops in program.ranks for op in ops if op.kind == "I"}
    recomputed = {op.unit for ops in program.ranks for op in ops if op.kind == "R"}

    def backward_of(stage: int, microbatch: int, chunk: int) -> Op:
        return Op("I" if splits and (stage, microbatch, chunk) in splits else "B", stage, microbatch, chunk)

    def of(op: Op) -> list[tuple[Op, str]]:
        kind, stage, microbatch, chunk = op
        if kind == "F":
            needed = [(Op("F", stage - 1, microbatch, chunk), "activation")] if stage > 0 else []
            if chunk > 0 and attention[stage]:
                needed.append((Op("F", stage, microbatch, chunk - 1), "kv"))
            return needed
        if kind == "R":
            return [(Op("F", stage, microbatch, chunk), "own")]
        if kind == "W":
            return [(Op("I", stage, microbatch, chunk), "own")]
        start = "R" if recomputed and (stage, microbatch, chunk) in recomputed else "F"
        needed = [(Op(start, stage, microbatch, chunk), "own")]
        if stage < last_stage:
            needed.append((backward_of(stage + 1, microbatch, chunk), "gradient"))
        if chunk < last_chunk and attention[stage]:
            needed.append((backward_of(stage, microbatch, chunk + 1), "kv"))
        return needed

    return of


def build_graph(program: Program) -> Graph:
    """Tasks and dependencies of a complete program (one that has every op its ops wait for; see `validate`)."""
    ops: list[Op] = []
    ranks: list[int] = []
    rank_tasks: list[range] = []
    for rank, order in enumerate(program.ranks):
        rank_tasks.append(range(len(ops), len(ops) + len(order)))
        ops.extend(order)
        ranks.extend([rank] * len(order))
    task_of = {op: task for task, op in enumerate(ops)}
    successors: list[list[int]] = [[] for _ in ops]
    num_dependencies = [0] * len(ops)
    messages: list[Message] = []
    waits_for = dependencies(program)
    for task, op in enumerate(ops):
        for producer_op, kind in waits_for(op):
            producer = task_of[producer_op]
            num_dependencies[task] += 1
            if ranks[producer] == ranks[task]:
                successors[producer].append(task)
                continue
            messages.append(Message(len(messages), kind, producer_op, op, ranks[producer], ranks[task]))
            successors[producer].append(len(successors))
            successors.append([task])
            num_dependencies.append(1)
    graph = Graph(program, ops, ranks, messages, rank_tasks, successors, num_dependencies, {}, {})
    if any(stage.owner is not None for stage in program.stages):
        _add_transfers(graph, task_of)
    # Ops were given the first numbers; messages got theirs in the order found, after all ops.
    return graph


def _add_transfers(graph: Graph, task_of: Mapping[Op, int]) -> None:
    """Add the messages of shipped and ring stages to a graph that has all others.

    Their turns: what every rank would run if any op took one time and no message any. Where ops wait for each other in
    a circle some never have a turn, and then there is nothing to add to.
    """
    first = len(graph.messages)
    order = list_schedule(graph, lambda op: 1.0, lambda message: 0.0).order
    if len(order) < graph.num_tasks:
        return
    turns = [Turn(graph.ops[task], graph.ranks[task]) for task in order if not graph.is_message(task)]
    found = transfers(graph.program, turns)
    for place, transfer in enumerate(found):
        end = transfer.ops[0 if transfer.kind == "weights" else -1]
        follows = first + transfer.follows if transfer.follows >= 0 else -1
        message = Message(first + place, transfer.kind, end, end, transfer.source, transfer.target, follows)
        graph.messages.append(message)
        graph.successors.append([])
        graph.num_dependencies.append(0)
        of = graph.weights_of if transfer.kind == "weights" else graph.sum_of
        of.update(dict.fromkeys(transfer.ops, message))
    for task, transfer in enumerate(found, start=len(graph.ops) + first):
        for waited in transfer.after:
            before = task_of[waited] if isinstance(waited, Op) else len(graph.ops) + first + waited
            graph.successors[before].append(task)
            graph.num_dependencies[task] += 1
        for op in transfer.before:
            graph.successors[task].append(task_of[op])
            graph.num_dependencies[task_of[op]] += 1


@dataclass(frozen=True)
class Times:
    """Start and end of every task, and `order`: the tasks by start time, always a linear extension of the
    dependencies."""

    start: list[float]
    end: list[float]
    order: list[int]

    @property
    def makespan(self) -> float:
        return max(self.end, default=0.0)


def list_schedule(
    graph: Graph,
    op_time: Callable[[Op], float],
    message_time: Callable[[Message], float],
    link_orders: Mapping[tuple[int, int], Sequence[int]] | None = None,
) -> Times:
    """Run the tasks as early as their dependencies and resources allow: each rank runs its ops in program order, one
    at a time; each directed link (source, target) carries one message at a time.

    link_orders: for each link its message tasks in the order to send them; without it, first ready, first sent.
    Tasks that can never start (a cyclic program) are absent from `order`. Time is O(n log n) in the number of tasks.
    """
    # Every task occupies one resource: an op its rank, a message its link.
    links: dict[tuple[int, int], int] = {}
    first_link = len(graph.rank_tasks)
    resource = list(graph.ranks)
    for message in graph.messages:
        resource.append(first_link + links.setdefault((message.source, message.target), len(links)))
    queues = [deque(tasks) for tasks in graph.rank_tasks]
    queues.extend(deque(link_orders[link]) if link_orders is not None else deque() for link in links)

    durations = [op_time(op) for op in graph.ops] + [message_time(message) for message in graph.messages]
    start, end = [0.0] * graph.num_tasks, [0.0] * graph.num_tasks
    order: list[int] = []
    waiting = list(graph.num_dependencies)
    busy = [False] * len(queues)
    completions: list[tuple[float, int, int]] = []  # (time, place in `order`, task)

    def try_start(resource: int, now: float) -> None:
        queue = queues[resource]
        if queue and not busy[resource] and not waiting[queue[0]]:
            task = queue.popleft()
            busy[resource] = True
            start[task], end[task] = now, now + durations[task]
            heappush(completions, (end[task], len(order), task))
            order.append(task)

    if link_orders is None:
        for task in range(len(graph.ops), graph.num_tasks):
            if not waiting[task]:
                queues[resource[task]].append(task)
    for number in range(len(queues)):
        try_start(number, 0.0)
    while completions:
        now, _, task = heappop(completions)
        for successor in graph.successors[task]:
            waiting[successor] -= 1
            if not waiting[successor]:
                if link_orders is None and resource[successor] >= first_link:
                    queues[resource[successor]].append(successor)
                try_start(resource[successor], now)
        busy[resource[task]] = False
        try_start(resource[task], now)
    return Times(start, end, order)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector: graphs are many small objects without cycles, which it would visit again and
    again, so that time would no longer grow linearly with the number of ops."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
