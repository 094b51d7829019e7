"""Multiplexed sequence partition on paper: ranks that idle at the ends of a pipeline help others with their chunks.

SPPO (Chen et al., arXiv 2503.10377, Table 3). Of N chunks stage i runs the first p-1-i on ranks i … p-1 together, which
have nothing to do yet, and the last i on ranks 0 … i, which have nothing left; tokens of the chunk are split evenly by
attention's work. The backward, which the paper leaves open, is the mirror: each chunk on the ranks that ran it forward.
The engine runs this (`multiplexed`), and simulates it with links that do not disturb each other; here is an estimate
in which a rank has one adapter, with what has to travel:

- weights of the stage to each helper at the start of the step, its sum of their gradients back after the helper's last
  backward;
- for the last chunks, keys and values of all chunks before to each helper, and the sums of their gradients back before
  the owner needs them;
- within a team, keys and values of the chunk before its attention, their gradients after it; to a team of the first
  chunks, what the owner has summed up of these;
- hidden states and their gradients from team to team.

A rank sends one message at a time and receives one, whoever the other is. What goes to all helpers passes from one to
the next in small parts, so that each link carries it once and all at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple, Protocol

from helixpipe.planning.order.multiplexed import Team, team
from helixpipe.program.timeline import bubble_of


class TeamCosts(Protocol):
    """op_time: of F or B of a chunk on a member of a team of so many. activation: seconds in which one rank sends the
    hidden states of a chunk at the end of a stage. keys_values: its keys and values in a stage. weights, gradients:
    those of a stage. All but op_time are 0 where transfers are free."""

    def op_time(self, kind: str, stage: int, chunk: int, team: int) -> float: ...

    def activation(self, chunk: int) -> float: ...

    def keys_values(self, stage: int, chunk: int, gradients: bool) -> float: ...

    def weights(self, stage: int, gradients: bool) -> float: ...


class MultiplexedTimes(NamedTuple):
    """makespan: seconds of a step. busy: of each rank, in ops, exchanges within them not included."""

    makespan: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """In seconds."""
        return bubble_of(self.busy, self.makespan) * self.makespan


def teams(ranks: int, chunks: int, left: bool, right: bool) -> dict[tuple[int, int], Team]:
    """Return who runs a stage's chunk, by (stage, chunk): its owner, or a team. left, right: with teams for the first,
    for the last chunks; where both would have it, the first."""
    places = product(range(ranks), range(chunks))
    return {(stage, chunk): team(ranks, chunks, stage, chunk, left, right) for stage, chunk in places}


def multiplexed(costs: TeamCosts, ranks: int, chunks: int, left: bool = True, right: bool = True) -> MultiplexedTimes:
    """A step of one microbatch: all forwards, then all backwards in reverse, each as early as it can be."""
    return _SimulatedStep(costs, ranks, chunks, teams(ranks, chunks, left, right)).run()


@dataclass
class _SimulatedStep:
    """free: when a rank's compute is, egress and ingress: its link out and in. done: when an op ended. there: when what
    an op needs of another had come. waiting: forwards that a rank still has to run."""

    costs: TeamCosts
    ranks: int
    chunks: int
    team: dict[tuple[int, int], Team]
    free: list[float] = field(init=False)
    egress: list[float] = field(init=False)
    ingress: list[float] = field(init=False)
    busy: list[float] = field(init=False)
    waiting: list[int] = field(init=False)
    end: float = 0.0

    def __post_init__(self) -> None:
        self.free, self.egress, self.ingress, self.busy = ([0.0] * self.ranks for _ in range(4))
        self.waiting = [sum(rank in team for team in self.team.values()) for rank in range(self.ranks)]
        self.done: dict[tuple[str, int, int], float] = {}
        self.there: dict[tuple[str, int, int], float] = {}

    def run(self) -> MultiplexedTimes:
        for stage in range(self.ranks):
            self.lend_weights(stage)
        following = [("F", stage, 0) for stage in range(self.ranks)]
        while following:
            ready = [(start, op) for op in following if (start := self.start(*op)) is not None]
            # Of those that can start first, forwards, and of these what is deepest in the pipeline's diagonal.
            start, op = min(ready, key=lambda each: (each[0], each[1][0] == "B", self.diagonal(*each[1]), each[1][1]))
            self.work(start, *op)
            following.remove(op)
            if (after := self.following(*op)) is not None:
                following.append(after)
        return MultiplexedTimes(self.end, tuple(self.busy))

    def diagonal(self, kind: str, stage: int, chunk: int) -> int:
        return stage + chunk if kind == "F" else -stage - chunk

    def following(self, kind: str, stage: int, chunk: int) -> tuple[str, int, int] | None:
        """The stage's next op."""
        if kind == "F":
            return ("F", stage, chunk + 1) if chunk + 1 < self.chunks else ("B", stage, chunk)
        return ("B", stage, chunk - 1) if chunk else None

    def start(self, kind: str, stage: int, chunk: int) -> float | None:
        """When an op can start, None as long as an op before it has not been placed."""
        team = self.team[stage, chunk]
        forward = kind == "F"
        neighbour = stage - 1 if forward else stage + 1
        if 0 <= neighbour < self.ranks and (kind, neighbour, chunk) not in self.done:
            return None
        if not forward and any(self.waiting[rank] for rank in team):
            return None
        return max(self.there.get((kind, stage, chunk), 0.0), *(self.free[rank] for rank in team))

    def work(self, start: float, kind: str, stage: int, chunk: int) -> None:
        """Place an op, then send what others need of it."""
        team, op = self.team[stage, chunk], (kind, stage, chunk)
        time = self.costs.op_time(kind, stage, chunk, len(team))
        end = start + time + self.exchange(kind, stage, chunk)
        self.done[op] = end
        for rank in team:
            self.free[rank] = end
            self.busy[rank] += time
            self.waiting[rank] -= kind == "F"
        self.end = max(self.end, end)
        after = stage + 1 if kind == "F" else stage - 1
        if 0 <= after < self.ranks:
            self.need((kind, after, chunk), self.send(team, self.team[after, chunk], self.costs.activation(chunk), end))
        if (following := self.following(*op)) is not None and following[0] == kind:
            self.need(following, end)
        self.lend(end, kind, stage, chunk)

    def need(self, op: tuple[str, int, int], time: float) -> None:
        self.there[op] = max(self.there.get(op, 0.0), time)

    # ----------------------------------------------------------------------------------------------------- what travels

    def helped(self, stage: int, right: bool) -> list[int]:
        """The stage's chunks at one end that run in teams."""
        shared = [chunk for chunk in range(self.chunks) if len(self.team[stage, chunk]) > 1]
        return [chunk for chunk in shared if (self.team[stage, chunk][0] < stage) == right]

    def exchange(self, kind: str, stage: int, chunk: int) -> float:
        """Seconds of a team's exchange of keys and values, or of gradients of those that its members made."""
        team = self.team[stage, chunk]
        if len(team) == 1:
            return 0.0
        share = (len(team) - 1) / len(team)
        if kind == "F":
            return share * self.costs.keys_values(stage, chunk, False)
        own = [each for each in self.helped(stage, team[0] < stage) if each <= chunk]
        return share * sum(self.costs.keys_values(stage, each, True) for each in own)

    def lend_weights(self, stage: int) -> None:
        """At the start of the step, to all that help."""
        for right in (False, True):
            if chunks := self.helped(stage, right):
                chain = self.chain(stage, chunks[0])
                self.need(("F", stage, chunks[0]), self.pass_on(chain, self.costs.weights(stage, False), 0.0))

    def lend(self, end: float, kind: str, stage: int, chunk: int) -> None:
        """Lend what an op makes that helpers need, or what helpers have made that the owner needs."""
        right = self.helped(stage, True)
        if right and kind == "F" and chunk < right[0]:
            chain = self.chain(stage, right[0])
            come = self.pass_on(chain, self.costs.keys_values(stage, chunk, False), end)
            self.need(("F", stage, right[0]), come)
        left = self.helped(stage, False)
        if left and kind == "B" and chunk == left[-1] + 1:  # what the owner's chunks have summed up for the team's
            seconds = sum(self.costs.keys_values(stage, each, True) for each in left)
            self.need(("B", stage, left[-1]), self.pass_on(self.chain(stage, left[-1]), seconds, end))
        if kind == "B":
            for chunks in (right, left):
                if chunks and chunk == chunks[0]:  # the last of them to come back
                    back = self.chain(stage, chunk)[::-1]
                    if chunks is right:
                        for each in reversed(range(right[0])):
                            come = self.pass_on(back, self.costs.keys_values(stage, each, True), end)
                            self.need(("B", stage, each), come)
                    self.end = max(self.end, self.pass_on(back, self.costs.weights(stage, True), end))

    def chain(self, stage: int, chunk: int) -> Team:
        """The owner, then the helpers, the nearest first."""
        return tuple(sorted(self.team[stage, chunk], key=lambda rank: abs(rank - stage)))

    def pass_on(self, chain: Sequence[int], seconds: float, ready: float) -> float:
        """Send from each to the next at the same time; returns when it has come."""
        if not seconds:
            return ready
        start = max(ready, *(self.egress[rank] for rank in chain[:-1]), *(self.ingress[rank] for rank in chain[1:]))
        for rank in chain[:-1]:
            self.egress[rank] = start + seconds
        for rank in chain[1:]:
            self.ingress[rank] = start + seconds
        return start + seconds

    def send(self, source: Team, target: Team, seconds: float, ready: float) -> float:
        """Hidden states from a team to the next, each member its part; returns when they have come."""
        if not seconds or source == target:
            return ready
        start = max(ready, *(self.egress[rank] for rank in source), *(self.ingress[rank] for rank in target))
        for rank in source:
            self.egress[rank] = start + seconds / len(source)
        for rank in target:
            self.ingress[rank] = start + seconds / len(target)
        return start + seconds / min(len(source), len(target))
