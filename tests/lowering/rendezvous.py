"""Machines that run lowered streams in the worst way the theorem of `lowering.lower` allows, in random order."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from random import Random

from helixpipe.lowering.project import Action, Instruction, LoweredProgram
from helixpipe.program.message import Collective, Message
from helixpipe.program.program import Op, Unit
from tests.lowering.random_programs import needs
from tests.lowering.sharing import Sharing


class Travel:
    """What travels with messages of weights and their gradients, kept as an executor would, by instructions alone."""

    def __init__(self, lowered: LoweredProgram) -> None:
        self.graph, self.stages, self.ring = lowered.graph, lowered.program.stages, lowered.program.ring
        ranks = range(lowered.program.num_ranks)
        self.places: list[dict[Message, bool]] = [{} for _ in ranks]  # of copies: whether they were waited for
        self.sums: list[dict[Message, set[Op]]] = [{} for _ in ranks]
        self.joined = {m.follows: m for m in lowered.messages if m.kind == "weight_gradients"}
        self.payload: dict[int, set[Op]] = {}
        self.absorbed: list[Op] = []

    def receive(self, rank: int, message: Message) -> None:
        if message.kind == "weights":
            self.places[rank][message] = False
        elif message.number in self.joined:
            self.sums[rank].setdefault(self.joined[message.number], set())

    def bounded(self, rank: int) -> bool:
        """Whether what came for ring stages, or goes, has room."""
        copies, sums = (
            [m for m in each[rank] if self.stages[m.producer.stage].placement == "ring"]
            for each in (self.places, self.sums)
        )
        return max(len(copies), len(sums)) <= self.ring.slots

    def wait(self, rank: int, message: Message) -> None:
        if message.kind == "weights":
            self.places[rank][message] = True
        elif message.number in self.joined:
            own = self.sums[rank][self.joined[message.number]]
            assert not own & self.payload[message.number]
            own |= self.payload[message.number]
        else:
            assert self.stages[message.producer.stage].owner == rank
            self.absorbed += self.payload[message.number]

    def run(self, rank: int, op: Op) -> None:
        """An op on a rank that does not own its stage runs with a copy that is there, and adds to one sum."""
        if self.stages[op.stage].owner in (None, rank):
            assert op not in self.graph.weights_of and op not in self.graph.sum_of
            return
        if op.kind != "W":
            message = self.graph.weights_of[op]
            assert message.consumer.stage == op.stage and self.places[rank][message]
        if op.kind in "BW":
            self.sums[rank].setdefault(self.graph.sum_of[op], set()).add(op)

    def send(self, rank: int, message: Message) -> None:
        if message.kind == "weight_gradients":
            own = self.sums[rank].pop(message)
            assert message.producer in own
            assert message.follows < 0 or self.payload[message.follows] <= own
            self.payload[message.number] = own
        elif message.follows < 0:
            assert self.stages[message.consumer.stage].owner == rank
        else:
            passed_on = self.graph.messages[message.follows]
            assert passed_on in self.places[rank] and passed_on.consumer.stage == message.consumer.stage

    def finish(self) -> None:
        """All places are free, and every gradient has come to its owner, once."""
        assert not any(self.places) and not any(self.sums)
        assert sorted(self.absorbed) == sorted(self.graph.sum_of)


class Copies:
    """Which instructions of each unit that offloads were run, and which copies have ended. A copy in is asked for when
    the one out was; it is made when that has ended."""

    def __init__(self, lowered: LoweredProgram) -> None:
        self.graph, self.complete = lowered.graph, set[int]()
        engines = [(rank, inward) for rank in range(lowered.program.num_ranks) for inward in (False, True)]
        self.queues: dict[tuple[int, bool], deque[int]] = {engine: deque() for engine in engines}
        self.passed: dict[Unit, list[Action]] = {copy.unit: [] for copy in self.graph.copies}

    def take(self, action: Action, task: int, ran: list[Op]) -> None:
        copy = self.graph.copy(task)
        assert copy.inward == (action in (Action.FETCH, Action.BACK))
        before = self.passed[copy.unit]
        assert action not in before and Op("F", *copy.unit) in ran
        assert action is Action.OFFLOAD or Action.OFFLOAD in before
        assert action is not Action.BACK or {Action.GONE, Action.FETCH} <= set(before)
        before.append(action)
        if action in (Action.OFFLOAD, Action.FETCH):
            self.queues[copy.rank, copy.inward].append(task)

    def move(self, engine: tuple[int, bool]) -> bool:
        """The oldest copy of an engine ends; one that comes in only when it has been out."""
        queue = self.queues[engine]
        out = {self.graph.copy(task).unit for task in self.complete}
        if not queue or (engine[1] and self.graph.copy(queue[0]).unit not in out):
            return False
        self.complete.add(queue.popleft())
        return True

    def run(self, op: Op) -> None:
        """An op that reads what a unit has saved finds it."""
        if op.kind in "RBI" and op.unit in self.passed:
            assert Action.BACK in self.passed[op.unit]

    def finish(self) -> None:
        assert all(len(actions) == 4 for actions in self.passed.values())
        assert len(self.complete) == len(self.graph.copies)


class Machine:
    """Hosts issue their stream in order and stop at a WAIT whose message has not arrived; nothing is ever buffered.

    Each rank has one communication stream, in order, and a message or collective completes only when it is at the head
    of the streams of all its ranks. With `blocking`, hosts moreover stop at each of them until it is complete.
    """

    def __init__(self, lowered: LoweredProgram, rng: Random, blocking: bool = False) -> None:
        self.lowered, self.rng, self.blocking = lowered, rng, blocking
        self.position = [0] * len(lowered.streams)
        self.posted: list[deque[tuple[Action, Message | Collective]]] = [deque() for _ in lowered.streams]
        self.complete: set[Message | Collective] = set()
        self.sent: set[Message] = set()
        self.ran: list[list[Op]] = [[] for _ in lowered.streams]
        self.waited: list[set[Message]] = [set() for _ in lowered.streams]
        self.present = {op for ops in lowered.program.ranks for op in ops}
        self.travel = Travel(lowered)
        self.copies = Copies(lowered)
        self.sharing = Sharing(lowered)

    def run(self) -> bool:
        """Whether every stream comes to its end."""
        links = [(m.source, m.target) for m in self.lowered.messages]
        moves = [(self.host, rank) for rank in range(len(self.position))] + [
            (self.transfer, link) for link in set(links)
        ]
        moves += [(self.collect, group) for group in {c.ranks for c in self.lowered.graph.collectives}]
        moves += [(self.copies.move, engine) for engine in self.copies.queues]
        moves.sort(key=lambda move: str(move))
        stuck = False
        while not stuck:
            self.rng.shuffle(moves)
            stuck = True
            for step, who in moves:
                for _ in range(self.rng.choice((1, 1, 9))):  # bursts: ranks drift far apart
                    if not step(who):
                        break
                    stuck = False
        ended = all(at == len(stream) for at, stream in zip(self.position, self.lowered.streams, strict=True))
        ended = ended and set(self.lowered.graph.collectives) <= self.complete
        if ended:
            self.travel.finish()
            self.copies.finish()
            self.sharing.finish()
        return ended

    def host(self, rank: int) -> bool:
        stream, at = self.lowered.streams[rank], self.position[rank]
        if at == len(stream):
            return False
        action, op, message, collective, task = stream[at]
        if at and not self.passed(stream[at - 1]):
            return False
        if action is Action.WAIT and message not in self.complete:
            return False
        if action in (Action.GONE, Action.BACK) and task not in self.copies.complete:
            return False
        if action is Action.SCATTERED and collective not in self.complete:
            return False
        if action is Action.RUN and not self.sharing.ready(rank, op, self.complete):
            return False
        self.position[rank] += 1
        if action is Action.RUN:
            self.check_run(rank, op)
            self.ran[rank].append(op)
        elif action is Action.REDUCE:
            own = {op for op in self.lowered.program.ranks[rank] if op.stage == collective.stage}
            assert own <= set(self.ran[rank]) and rank in collective.ranks
            self.posted[rank].append((action, collective))
        elif action in (Action.GATHER, Action.SCATTER, Action.SCATTERED):
            self.sharing.take(rank, action, collective)
            if action is not Action.SCATTERED:
                self.posted[rank].append((Action.REDUCE, collective))
        elif action is Action.WAIT:
            assert message.target == rank and message not in self.waited[rank]
            self.waited[rank].add(message)
            if message.ships:
                self.travel.wait(rank, message)
        elif action is Action.FREE and message is not None:
            assert self.travel.places[rank].pop(message)
            users = [op for op, of in self.lowered.graph.weights_of.items() if of == message]
            assert set(users) <= set(self.ran[rank])
        elif action is Action.FREE:
            assert op in self.ran[rank]
        elif action in (Action.OFFLOAD, Action.GONE, Action.FETCH, Action.BACK):
            self.copies.take(action, task, self.ran[rank])
        else:
            if action is Action.SEND:
                assert message.source == rank and message not in self.sent
                assert message.producer in self.ran[rank] or message.kind == "weights"
                self.sent.add(message)
            if message.ships:
                (self.travel.send if action is Action.SEND else self.travel.receive)(rank, message)
            assert self.travel.bounded(rank)
            self.posted[rank].append((action, message))
        return True

    def passed(self, before: Instruction) -> bool:
        """Whether a host that waits there can go on after an instruction."""
        if before.action in (Action.REDUCE, Action.GATHER, Action.SCATTER):
            return before.collective in self.complete or not self.blocking
        if before.action in (Action.OFFLOAD, Action.FETCH):
            return before.task in self.copies.complete or not self.blocking
        return (
            before.message in self.complete
            or not self.blocking
            or before.action in (Action.WAIT, Action.FREE, Action.RUN, Action.GONE, Action.BACK, Action.SCATTERED)
        )

    def check_run(self, rank: int, op: Op) -> None:
        """The op is the program's next on this rank, and all it needs is there."""
        assert op == self.lowered.program.ranks[rank][len(self.ran[rank])]
        arrived = {m.producer for m in self.waited[rank] if m.consumer == op}
        assert needs(self.lowered.program, op, self.present) <= arrived.union(self.ran[rank])
        self.travel.run(rank, op)
        self.copies.run(op)
        self.sharing.run(rank, op)
        assert self.travel.bounded(rank)

    def transfer(self, link: tuple[int, int]) -> bool:
        source, target = link
        sends, receives = self.posted[source], self.posted[target]
        if not sends or not receives or sends[0][0] is not Action.SEND or receives[0][0] is not Action.RECV:
            return False
        sent = sends[0][1]
        if sent != receives[0][1]:
            return False
        if sent.follows >= 0 and self.lowered.messages[sent.follows] not in self.complete:
            return False
        sends.popleft()
        receives.popleft()
        self.complete.add(sent)
        return True

    def collect(self, group: tuple[int, ...]) -> bool:
        """All members of a group have the same collective at their head: it happens."""
        queues = [self.posted[rank] for rank in group]
        if not all(queue and queue[0][0] is Action.REDUCE for queue in queues):
            return False
        heads = {queue[0][1] for queue in queues}
        if len(heads) > 1 or {head.ranks for head in heads} != {group}:
            return False
        for queue in queues:
            queue.popleft()
        self.complete |= heads
        return True


def with_crossed_receives(lowered: LoweredProgram) -> LoweredProgram:
    """Of two ranks and two messages: the second rank posts its receives in the other order."""
    first, second = lowered.streams
    one, two = (place for place, instruction in enumerate(second) if instruction.action is Action.RECV)
    crossed = list(second)
    crossed[one], crossed[two] = second[two], second[one]
    return replace(lowered, streams=(first, tuple(crossed)))
