"""Machines that run lowered streams in the worst way the theorem of `lowering.lower` allows, in random order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from helixpipe.lowering.project import Action, Instruction, LoweredProgram
from helixpipe.program.program import Op, Unit
from helixpipe.program.transfer import Transfer
from tests.lowering.random_programs import needs
from tests.lowering.sharing import Sharing

OUT, GONE = (Action.START, "offload"), (Action.WAIT, "offload")
IN, BACK = (Action.START, "fetch"), (Action.WAIT, "fetch")


class Travel:
    """Moves what travels with messages of weights and their gradients, kept as an executor would, by instructions
    alone."""

    def __init__(self, lowered: LoweredProgram) -> None:
        self.graph, self.stages, self.ring = lowered.graph, lowered.program.stages, lowered.program.ring
        ranks = range(lowered.program.num_ranks)
        self.places: list[dict[Transfer, bool]] = [{} for _ in ranks]  # of copies: whether they were waited for
        self.sums: list[dict[Transfer, set[Op]]] = [{} for _ in ranks]
        self.joined = {m.follows: m for m in lowered.messages if m.kind == "weight_gradients"}
        self.payload: dict[int, set[Op]] = {}
        self.absorbed: list[Op] = []

    def receive(self, rank: int, message: Transfer) -> None:
        if message.kind == "weights":
            self.places[rank][message] = False
        elif message.number in self.joined:
            self.sums[rank].setdefault(self.joined[message.number], set())

    def bounded(self, rank: int) -> bool:
        """Whether what came for ring stages, or goes, has room."""
        copies, sums = (
            [m for m in each[rank] if self.stages[m.unit.stage].placement == "ring"]
            for each in (self.places, self.sums)
        )
        return max(len(copies), len(sums)) <= self.ring.slots

    def wait(self, rank: int, message: Transfer) -> None:
        if message.kind == "weights":
            self.places[rank][message] = True
        elif message.number in self.joined:
            own = self.sums[rank][self.joined[message.number]]
            assert not own & self.payload[message.number]
            own |= self.payload[message.number]
        else:
            assert self.stages[message.unit.stage].owner == rank
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

    def send(self, rank: int, message: Transfer) -> None:
        if message.kind == "weight_gradients":
            own = self.sums[rank].pop(message)
            assert message.producer in own
            assert message.follows < 0 or self.payload[message.follows] <= own
            self.payload[message.number] = own
        elif message.follows < 0:
            assert self.stages[message.unit.stage].owner == rank
        else:
            passed_on = self.graph.transfers[message.follows]
            assert passed_on in self.places[rank] and passed_on.consumer.stage == message.consumer.stage

    def finish(self) -> None:
        """All places are free, and every gradient has come to its owner, once."""
        assert not any(self.places) and not any(self.sums)
        assert sorted(self.absorbed) == sorted(self.graph.sum_of)


class Copies:
    """Records which instructions of each unit that offloads were run, and which copies have ended. A copy in is asked
    for when the one out was; it is made when that has ended."""

    def __init__(self, lowered: LoweredProgram) -> None:
        self.graph, self.complete = lowered.graph, set[Transfer]()
        engines = [(rank, kind) for rank in range(lowered.program.num_ranks) for kind in ("offload", "fetch")]
        self.queues: dict[tuple[int, str], deque[Transfer]] = {engine: deque() for engine in engines}
        self.passed: dict[Unit, list[tuple[Action, str]]] = {copy.unit: [] for copy in self.graph.copies}

    def take(self, action: Action, copy: Transfer, ran: list[Op]) -> None:
        before, now = self.passed[copy.unit], (action, copy.kind)
        assert now not in before and Op("F", *copy.unit) in ran
        assert now == OUT or OUT in before
        assert now != BACK or {GONE, IN} <= set(before)
        before.append(now)
        if action is Action.START:
            self.queues[copy.source, copy.kind].append(copy)

    def move(self, engine: tuple[int, str]) -> bool:
        """The oldest copy of an engine ends; one that comes in only when it has been out."""
        queue = self.queues[engine]
        out = {copy.unit for copy in self.complete}
        if not queue or (engine[1] == "fetch" and queue[0].unit not in out):
            return False
        self.complete.add(queue.popleft())
        return True

    def run(self, op: Op) -> None:
        """An op that reads what a unit has saved finds it."""
        if op.kind in "RBI" and op.unit in self.passed:
            assert BACK in self.passed[op.unit]

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
        self.posted: list[deque[tuple[Action, Transfer]]] = [deque() for _ in lowered.streams]
        self.complete: set[Transfer] = set()
        self.sent: set[Transfer] = set()
        self.ran: list[list[Op]] = [[] for _ in lowered.streams]
        self.waited: list[set[Transfer]] = [set() for _ in lowered.streams]
        self.places = {op: (rank, at) for rank, ops in enumerate(lowered.program.ranks) for at, op in enumerate(ops)}
        self.present = set(self.places)
        self.travel = Travel(lowered)
        self.copies = Copies(lowered)
        self.sharing = Sharing(lowered)

    def run(self) -> bool:
        """Whether every stream comes to its end."""
        links = [(m.source, m.target) for m in self.lowered.messages]
        moves: list[tuple[Callable[[Any], bool], Any]] = [(self.host, rank) for rank in range(len(self.position))]
        moves += [(self.transfer, link) for link in set(links)]
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
        action, op, transfer, _ = stream[at]
        if at and not self.passed(stream[at - 1]):
            return False
        if action is Action.WAIT and not self.ended(transfer):
            return False
        if action is Action.RUN and not self.sharing.ready(rank, op, self.complete):
            return False
        self.position[rank] += 1
        if action is Action.RUN:
            self.check_run(rank, op)
            self.ran[rank].append(op)
        elif action is Action.FREE and transfer is not None:
            assert self.travel.places[rank].pop(transfer)
            users = [op for op, of in self.lowered.graph.weights_of.items() if of == transfer]
            assert set(users) <= set(self.ran[rank])
        elif action is Action.FREE:
            assert op in self.ran[rank]
        elif transfer.resource == "link":
            self.take_message(rank, action, transfer)
        elif transfer.resource == "collective":
            self.take_collective(rank, action, transfer)
        else:
            self.copies.take(action, transfer, self.ran[rank])
        return True

    def take_message(self, rank: int, action: Action, message: Transfer) -> None:
        if action is Action.WAIT:
            assert message.target == rank and message not in self.waited[rank]
            self.waited[rank].add(message)
            if message.of_stage:
                self.travel.wait(rank, message)
            return
        if action is Action.SEND:
            assert message.source == rank and message not in self.sent
            assert message.producer in self.ran[rank] or message.kind == "weights"
            self.sent.add(message)
        if message.of_stage:
            (self.travel.send if action is Action.SEND else self.travel.receive)(rank, message)
        assert self.travel.bounded(rank)
        self.posted[rank].append((action, message))

    def take_collective(self, rank: int, action: Action, collective: Transfer) -> None:
        if collective.kind == "replica_sum":
            own = {op for op in self.lowered.program.ranks[rank] if op.stage == collective.unit.stage}
            assert own <= set(self.ran[rank]) and rank in collective.ranks
        elif collective.kind == "turn":
            ends = next(ends for ends in self.lowered.program.turns if ends[0] == collective.producer)
            assert {op for op in ends if self.places[op][0] == rank} <= set(self.ran[rank])
        elif collective.kind.startswith("head"):
            if action is Action.START:
                assert {op for op in self.exchanged(collective) if op in self.lowered.program.ranks[rank]} <= set(
                    self.ran[rank]
                )
            else:
                assert collective not in self.waited[rank]
                self.waited[rank].add(collective)
        else:
            self.sharing.take(rank, action, collective)
        if action is Action.START:
            self.posted[rank].append((action, collective))

    def exchanged(self, collective: Transfer) -> set[Op]:
        """The ops that make what the parts of a head exchange in a collective."""
        chain, backwards = self.lowered.program.chain, [op for op in self.present if op.kind in "BI"]
        place = collective.unit[1:]
        if collective.kind == "head_input":
            return {Op("F", chain - 1, *place)}
        if collective.kind == "head_sums":
            return {Op("F", part, *place) for part in range(chain, len(self.lowered.program.stages))}
        return {op for op in backwards if op.stage >= chain and op.unit[1:] == place}

    def ended(self, transfer: Transfer) -> bool:
        return transfer in self.complete or transfer in self.copies.complete

    def passed(self, before: Instruction) -> bool:
        """Whether a host that waits there can go on after an instruction."""
        begins = before.action in (Action.SEND, Action.RECV, Action.START)
        return not begins or not self.blocking or self.ended(before.transfer)

    def check_run(self, rank: int, op: Op) -> None:
        """The op is the program's next on this rank, and all it needs is there."""
        assert op == self.lowered.program.ranks[rank][len(self.ran[rank])]
        arrived = {m.producer for m in self.waited[rank] if m.consumer == op}
        heads = [m for m in self.waited[rank] if m.kind.startswith("head") and m.unit[1:] == op.unit[1:]]
        arrived |= {made for collective in heads for made in self.exchanged(collective)}
        assert needs(self.lowered.program, op, self.present) <= arrived.union(self.ran[rank])
        for ends in self.lowered.program.turns:
            if any(self.places[op] <= self.places[end] for end in ends if self.places[end][0] == rank):
                break
            assert all(end in self.ran[self.places[end][0]] for end in ends)
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
        if sent.follows >= 0 and self.lowered.graph.transfers[sent.follows] not in self.complete:
            return False
        sends.popleft()
        receives.popleft()
        self.complete.add(sent)
        return True

    def collect(self, group: tuple[int, ...]) -> bool:
        """All members of a group have the same collective at their head: it happens."""
        queues = [self.posted[rank] for rank in group]
        if not all(queue and queue[0][0] is Action.START for queue in queues):
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
