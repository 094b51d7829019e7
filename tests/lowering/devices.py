"""GPUs that run lowered streams: hosts that run ahead, hardware queues, and a number of multiprocessors (SMs).

What a device does is progress alone; what the streams carry `rendezvous` looks after.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from helixpipe.lowering.project import Action, LoweredProgram

Lane = tuple[str, tuple[int, ...]]
"""A stream of a device: its compute, one direction of a link, a group, or copies in one direction."""
COMPUTE: Lane = ("compute", ())


@dataclass(frozen=True)
class Hardware:
    """queues: that a device has, among which its streams are dealt out at random; None: one for each stream. sms:
    multiprocessors. ctas: how many of them a message or collective holds from its start to its end; an op needs one.
    ahead: ops that a host may have issued and its device not ended; None: as many as there are."""

    queues: int | None = None
    sms: int = 1 << 30
    ctas: int = 1
    ahead: int | None = None


@dataclass(frozen=True)
class Kernel:
    """One instruction on a device. ops: of its rank that must have ended before. tasks: transfers that must have."""

    action: Action
    task: int
    lane: Lane
    ops: int
    tasks: frozenset[int]


class Devices:
    """Hosts issue their streams in order. A device starts the kernels of each queue in the order issued, each when the
    one before it in its stream has ended, all it waits for is there and enough multiprocessors are free. A message or a
    collective ends only when all its ranks have started it, and holds its multiprocessors until then.

    in_place: receives wait for their place, the ops before them; if not, they start as soon as they are issued.
    """

    def __init__(self, lowered: LoweredProgram, rng: Random, hardware: Hardware, in_place: bool = True):
        self.lowered, self.rng, self.hardware, self.in_place = lowered, rng, hardware, in_place
        graph, ranks = lowered.graph, range(lowered.program.num_ranks)
        self.first = graph.num_ops
        self.number = {op: place for order in lowered.program.ranks for place, op in enumerate(order)}
        self.members = [each.ranks for each in graph.transfers]
        self.lanes: list[Lane] = [(each.resource, each.ranks) for each in graph.transfers]
        self.out = {copy.unit: graph.task(copy) for copy in graph.copies if copy.resource == "copy_out"}
        self.gathers = [graph.task(each) for each in graph.collectives if each.kind == "gather"]
        self.position = [0 for _ in ranks]
        self.issued = [0 for _ in ranks]  # ops
        self.ended = [0 for _ in ranks]
        self.waited: list[set[int]] = [set() for _ in ranks]  # by the next op
        self.free = [hardware.sms for _ in ranks]
        self.running: list[int | None] = [None for _ in ranks]  # the op that runs
        self.busy: set[tuple[int, Lane]] = set()
        self.entered: dict[int, int] = defaultdict(int)
        self.done: set[int] = set()  # transfers
        self.queue_of: dict[tuple[int, Lane], int] = {}
        self.queues: dict[tuple[int, int], deque[Kernel]] = defaultdict(deque)

    def run(self) -> bool:
        """Whether every device comes to the end of its stream."""
        moved = True
        while moved:
            moved = False
            moves: list[tuple[Callable[[Any], bool], Any]] = [(self.issue, rank) for rank in range(len(self.position))]
            moves += [(self.end_op, rank) for rank in range(len(self.position))]
            moves += [(self.start, queue) for queue in self.queues]
            moves += [(self.end_transfer, task) for task in list(self.entered)]
            self.rng.shuffle(moves)
            for step, who in moves:
                for _ in range(self.rng.choice((1, 1, 9))):  # bursts: ranks drift far apart
                    if not step(who):
                        break
                    moved = True
        streams = self.lowered.streams
        issued = all(at == len(stream) for at, stream in zip(self.position, streams, strict=True))
        transfers = range(self.first, self.first + len(self.members))
        return issued and not any(self.queues.values()) and not any(self.busy) and self.done == set(transfers)

    def issue(self, rank: int) -> bool:
        """The host puts its next instruction into the queue of its stream."""
        stream, at = self.lowered.streams[rank], self.position[rank]
        if at == len(stream):
            return False
        action, _, transfer, task = stream[at]
        ahead = self.hardware.ahead
        if action is Action.RUN and ahead is not None and self.issued[rank] - self.ended[rank] >= ahead:
            return False
        self.position[rank] += 1
        if action is Action.WAIT:
            self.waited[rank].add(task)
        elif action is Action.RUN:
            gathers = (each for each in self.gathers if task in self.lowered.graph.successors[each])
            self.put(rank, Kernel(action, task, COMPUTE, 0, frozenset(self.waited[rank].union(gathers))))
            self.issued[rank] += 1
            self.waited[rank].clear()
        elif action is Action.START and transfer.resource != "collective":
            # after all that the stream that computes was given
            own = {self.out[transfer.unit]} if transfer.kind == "fetch" else set()
            tasks = frozenset(self.waited[rank] | own)
            self.put(rank, Kernel(action, task, self.lanes[task - self.first], self.issued[rank], tasks))
        elif action is not Action.FREE:
            ops, tasks = self.issued[rank], frozenset[int]()
            if action is Action.RECV and not self.in_place:
                ops = 0
            if action is Action.SEND:
                if transfer.kind == "weight_gradients":  # the sum is made in the stream that computes
                    tasks = frozenset(self.waited[rank])
                elif transfer.kind != "weights":
                    assert transfer.producer is not None
                    ops = self.number[transfer.producer] + 1
                elif transfer.follows >= 0:
                    tasks = frozenset((self.first + transfer.follows,))
            self.put(rank, Kernel(action, task, self.lanes[task - self.first], ops, tasks))
        return True

    def ctas(self, task: int) -> int:
        """Multiprocessors that a transfer holds: a copy none."""
        return self.hardware.ctas if self.lanes[task - self.first][0] in ("link", "collective") else 0

    def put(self, rank: int, kernel: Kernel) -> None:
        queues = self.hardware.queues
        if (rank, kernel.lane) not in self.queue_of:
            new = len(self.queue_of) if queues is None else self.rng.randrange(queues)
            self.queue_of[rank, kernel.lane] = new
        self.queues[rank, self.queue_of[rank, kernel.lane]].append(kernel)

    def start(self, queue: tuple[int, int]) -> bool:
        """The kernel at the head of a queue, if it can."""
        rank, kernels = queue[0], self.queues[queue]
        if not kernels:
            return False
        kernel = kernels[0]
        needed = 1 if kernel.action is Action.RUN else self.ctas(kernel.task)
        if (rank, kernel.lane) in self.busy or self.ended[rank] < kernel.ops or not kernel.tasks <= self.done:
            return False
        if self.free[rank] < needed:
            return False
        kernels.popleft()
        self.busy.add((rank, kernel.lane))
        self.free[rank] -= needed
        if kernel.action is Action.RUN:
            self.running[rank] = kernel.task
        else:
            self.entered[kernel.task] += 1
        return True

    def end_op(self, rank: int) -> bool:
        if self.running[rank] is None:
            return False
        self.running[rank] = None
        self.ended[rank] += 1
        self.free[rank] += 1
        self.busy.remove((rank, COMPUTE))
        return True

    def end_transfer(self, task: int) -> bool:
        """A message or collective that all its ranks have started."""
        members = self.members[task - self.first]
        if self.entered.get(task) != len(members):
            return False
        del self.entered[task]
        self.done.add(task)
        for rank in members:
            self.free[rank] += self.ctas(task)
            self.busy.remove((rank, self.lanes[task - self.first]))
        return True


def most_lanes(lowered: LoweredProgram) -> int:
    """Streams with messages and collectives of the rank that has most."""
    graph = lowered.graph
    lanes = {(each.resource, each.ranks) for each in (*graph.messages, *graph.collectives)}
    return max(sum(rank in ranks for _, ranks in lanes) for rank in range(lowered.program.num_ranks))
