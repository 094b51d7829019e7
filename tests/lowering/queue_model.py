"""An explicit-state model of ranks, queues and rendezvous: every state that can be reached is visited.

It is written in terms of three things alone. A rank issues steps in order: it posts its end of a transfer to one of its
queues, which it never waits for, or waits until a transfer has ended. A transfer can end when its ends are at the heads
of their queues on all its ranks, and what it passes on has ended; nothing is buffered. That is all there is of time:
any transfer that can end may be the next to do so, and takes its place at the heads until then.

Three models say which transfers share a queue of a rank: all those with one other rank or group (`pair`: NCCL's
communicator of two ranks), those in one direction of that (`direction`), all there are (`rank`).

Which states are visited. A step of a rank takes away nothing that another step or the end of a transfer needs: posting
makes transfers able to end, waiting asks for what has ended. So hosts go on at once as far as they can, and what
remains to choose is which transfer ends next (a partial-order reduction with such steps as persistent sets, Godefroid
1996, chapter 4). A state is then the set of transfers that have ended; from each, all that can end next are tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from helixpipe.lowering.project import Action, LoweredProgram
from helixpipe.program.text import parse_cell
from tests.torch_pipelining.queues import ends

QueueModel = Literal["pair", "direction", "rank"]
MODELS: tuple[QueueModel, ...] = ("pair", "direction", "rank")
Step = tuple[Literal["post", "wait"], int, object]
"""What a rank does, the transfer, and of a post the queue by `direction`: (others, way)."""


@dataclass(frozen=True)
class System:
    """steps: of each rank. members: of each transfer the ranks that post it. passes_on: the transfer that must have
    ended before, where there is one."""

    steps: tuple[tuple[Step, ...], ...]
    members: Mapping[int, tuple[int, ...]]
    passes_on: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """states: how many were visited. stopped: the positions of the ranks in a state that nothing leaves and that is not
    the end; None where there is no such state."""

    states: int
    stopped: tuple[int, ...] | None


def explore(system: System, model: QueueModel) -> Verdict:
    """Visit every state."""
    numbers = sorted(system.members)
    bit = {number: 1 << place for place, number in enumerate(numbers)}
    everything = (1 << len(numbers)) - 1
    start = (0, _hosts(system, bit, (0,) * len(system.steps), 0))
    seen, pending = {0}, [start]
    while pending:
        ended, positions = pending.pop()
        following = [ended | bit[number] for number in _can_end(system, model, bit, positions, ended)]
        at_end = all(at == len(steps) for at, steps in zip(positions, system.steps, strict=True))
        if not following and not (at_end and ended == everything):
            return Verdict(len(seen), positions)
        for state in following:
            if state not in seen:
                seen.add(state)
                pending.append((state, _hosts(system, bit, positions, state)))
    return Verdict(len(seen), None)


def _hosts(system: System, bit: Mapping[int, int], positions: tuple[int, ...], ended: int) -> tuple[int, ...]:
    """Where the ranks stand when each has gone on as far as it can."""
    found = []
    for steps, at in zip(system.steps, positions, strict=True):
        while at < len(steps) and (steps[at][0] == "post" or ended & bit[steps[at][1]]):
            at += 1
        found.append(at)
    return tuple(found)


def _can_end(
    system: System, model: QueueModel, bit: Mapping[int, int], positions: tuple[int, ...], ended: int
) -> list[int]:
    """The transfers that are at the heads of queues on all their ranks."""
    at_head: dict[int, int] = {}
    for steps, position in zip(system.steps, positions, strict=True):
        heads: dict[object, int] = {}
        for word, number, queue in steps[:position]:
            if word == "post" and not ended & bit[number]:
                heads.setdefault(_queue(model, queue), number)
        for number in heads.values():
            at_head[number] = at_head.get(number, 0) + 1
    return [
        number
        for number, count in at_head.items()
        if count == len(system.members[number])
        and (number not in system.passes_on or ended & bit[system.passes_on[number]])
    ]


def _queue(model: QueueModel, queue: object) -> object:
    assert isinstance(queue, tuple)
    others, way = queue
    return {"pair": others, "direction": (others, way), "rank": None}[model]


def of_lowered(lowered: LoweredProgram) -> System:
    """The streams of a lowered program. Copies to the host and back are transfers of one rank."""
    steps: list[list[Step]] = []
    for stream in lowered.streams:
        own: list[Step] = []
        for action, _, transfer, _ in stream:
            if action in (Action.SEND, Action.RECV, Action.START):
                kind = transfer.resource if transfer.resource.startswith("copy") else ""
                queue = (tuple(sorted(transfer.ranks)), (action is Action.SEND, kind))
                own.append(("post", transfer.number, queue))
            elif action is Action.WAIT:
                own.append(("wait", transfer.number, None))
        steps.append(own)
    members = {each.number: each.ranks for each in lowered.graph.transfers}
    passed = {each.number: each.follows for each in lowered.graph.transfers if each.follows >= 0}
    return System(tuple(map(tuple, steps)), members, passed)


def of_torch(rows: Sequence[Sequence[str]]) -> System:
    """The actions of torch's runtime: an op waits for what was received for it."""
    home = {op.stage: rank for rank, row in enumerate(rows) for cell in row for op in parse_cell(cell)}
    numbers: dict[object, int] = {}
    members: dict[int, tuple[int, ...]] = {}
    steps: list[tuple[Step, ...]] = []
    for rank, row in enumerate(rows):
        own: list[Step] = []
        received: set[int] = set()
        for cell in row:
            for op in parse_cell(cell):
                brought = numbers.get(("F" if op.kind == "F" else "B", op.stage, op.microbatch), -1)
                if op.kind != "W" and brought in received:
                    own.append(("wait", brought, None))
            if "SEND" in cell or "RECV" in cell:
                message, other, sends = ends(cell)
                number = numbers.setdefault(message, len(numbers))
                members[number] = (rank, home[other])
                own.append(("post", number, ((home[other],), sends)))
                received |= set() if sends else {number}
        steps.append(tuple(own))
    return System(tuple(steps), members)
