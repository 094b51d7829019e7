"""Compares what the ranks of a job asked their process groups for: they must all ask for the same, in one order.

- Ranks of a group name the same members, and ask it for the same collectives: kind, sizes, dtype, root. Where ranks
  send and receive unequally many, each receives from each other one what that sends it.
- What a rank sends another is what that one receives, message by message.
- Ranks' sequences over all groups are parts of one order: else each of two could wait in a collective or message for
  the other, where NCCL's kernels fill the device or share a hardware queue.
- A group's collectives are all asked for on one stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, zip_longest
from typing import NamedTuple

MESSAGES = ("send", "recv")
TOGETHER = ("start", "end")
"""Between them NCCL starts messages and collectives together."""


class GroupCall(NamedTuple):
    """What a process group was asked for. numbers: elements of each tensor; peer: the rank of the group that sends,
    receives or is the root, -1 for none; sent, received: elements to and from each rank of the group in a collective
    whose parts may differ, else empty."""

    group: str
    kind: str
    numbers: tuple[int, ...]
    dtype: str
    peer: int
    stream: int
    thread: int
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()

    def __str__(self) -> str:
        elements = " + ".join(map(str, self.numbers))
        peer = f" with its rank {self.peer}" if self.peer >= 0 else ""
        return f"{self.kind} of {elements} {self.dtype}{peer}" if self.dtype else self.kind + peer


@dataclass(frozen=True)
class Calls:
    """All calls of a rank in order, and the ranks of each group it is in."""

    rank: int
    groups: Mapping[str, tuple[int, ...]]
    calls: Sequence[GroupCall]


def differences(ranks: Sequence[Calls]) -> list[str]:
    """Return a sentence on each thing that does not match. ranks: of some ranks of a job, or of all of them."""
    if strangers := list(_members(ranks)):  # whose calls are not to be compared
        return strangers
    found = [*_collectives(ranks), *_parts(ranks), *_messages(ranks), *_streams(ranks)]
    return found or list(_order(ranks))  # calls that do not match have no order


def _members(ranks: Sequence[Calls]) -> Iterator[str]:
    first: dict[str, tuple[int, tuple[int, ...]]] = {}
    for each in ranks:
        for name, members in each.groups.items():
            rank, theirs = first.setdefault(name, (each.rank, members))
            if theirs != members:
                yield f"group {name} has the ranks {theirs} for rank {rank} and {members} for rank {each.rank}."


def _collectives(ranks: Sequence[Calls]) -> Iterator[str]:
    first: dict[str, tuple[int, list[GroupCall]]] = {}
    for each in ranks:
        asked = _collectives_of(each)
        for name, members in each.groups.items():
            rank, theirs = first.setdefault(name, (each.rank, asked[name]))
            for number, (one, other) in enumerate(zip_longest(theirs, asked[name])):
                if _matched(one) != _matched(other):
                    yield (
                        f"collective {number} of group {name} (ranks {_few(members)}) is {one or 'none'} on rank "
                        f"{rank} and {other or 'none'} on rank {each.rank}."
                    )
                    break


def _collectives_of(rank: Calls) -> defaultdict[str, list[GroupCall]]:
    """Return the collectives that a rank asks each group for."""
    asked = defaultdict(list)
    for call in rank.calls:
        if call.kind not in MESSAGES + TOGETHER:
            asked[call.group].append(call)
    return asked


def _matched(call: GroupCall | None) -> tuple[object, ...]:
    """Return what must be the same on all ranks: sizes where all send and receive as many."""
    return () if call is None else (call.kind, () if call.sent else call.numbers, call.dtype, call.peer)


def _parts(ranks: Sequence[Calls]) -> Iterator[str]:
    """Compare, where ranks send and receive unequally many, what each two of them send and expect."""
    asked: dict[str, dict[int, list[GroupCall]]] = defaultdict(dict)
    members: dict[str, tuple[int, ...]] = {}
    for each in ranks:
        members.update(each.groups)
        for name, calls in _collectives_of(each).items():
            asked[name][each.rank] = [call for call in calls if call.sent]
    for name, of_ranks in asked.items():
        for source, target in permutations(of_ranks, 2):
            of, by = members[name].index(target), members[name].index(source)
            for number, (one, other) in enumerate(zip(of_ranks[source], of_ranks[target], strict=False)):
                if one.sent[of] != other.received[by]:
                    yield (
                        f"{one.kind} {number} of group {name}: rank {source} sends {one.sent[of]} elements to rank "
                        f"{target}, which takes {other.received[by]}."
                    )
                    break


def _messages(ranks: Sequence[Calls]) -> Iterator[str]:
    ways: dict[tuple[str, int, int], dict[str, list[GroupCall]]] = {}
    present = {each.rank for each in ranks}
    for each in ranks:
        for call in each.calls:
            if call.kind in MESSAGES:
                peer = each.groups[call.group][call.peer]
                way = (each.rank, peer) if call.kind == "send" else (peer, each.rank)
                ways.setdefault((call.group, *way), {kind: [] for kind in MESSAGES})[call.kind].append(call)
    for (group, source, target), calls in ways.items():
        if not {source, target} <= present:
            continue
        for number, (sent, received) in enumerate(zip_longest(calls["send"], calls["recv"])):
            if sent is None or received is None or (sent.numbers, sent.dtype) != (received.numbers, received.dtype):
                yield (
                    f"message {number} from rank {source} to rank {target} in group {group} is {sent or 'not sent'} "
                    f"and {received or 'not received'}."
                )
                break


def _streams(ranks: Sequence[Calls]) -> Iterator[str]:
    for each in ranks:
        used = defaultdict(set)
        for call in each.calls:
            if call.kind not in MESSAGES + TOGETHER + ("barrier",):
                used[call.group].add(call.stream)
        for name, streams in used.items():
            if len(streams) > 1:
                yield f"rank {each.rank} asks group {name} for collectives on {len(streams)} streams."


Node = tuple[object, ...]


def _order(ranks: Sequence[Calls]) -> Iterator[str]:
    """Say so if the calls have no order of which each rank's are a part."""
    after: dict[Node, set[Node]] = defaultdict(set)
    before: dict[Node, int] = defaultdict(int)
    for each in ranks:
        last: list[Node] = []
        for nodes in _steps(each):
            for node in nodes:
                for earlier in last:
                    if node not in after[earlier]:
                        after[earlier].add(node)
                        before[node] += 1
            last = nodes
    nodes_left = {*after, *before}
    ready = [node for node in nodes_left if not before[node]]
    while ready:
        node = ready.pop()
        nodes_left.discard(node)
        for later in after[node]:
            before[later] -= 1
            if not before[later]:
                ready.append(later)
    if nodes_left:
        yield f"ranks would wait for each other: {' before '.join(_circle(nodes_left, after))}."


def _circle(nodes: set[Node], after: Mapping[Node, set[Node]]) -> list[str]:
    """Return a circle among nodes that all have another of them before and some after."""
    earlier = {later: node for node in nodes for later in after.get(node, ()) if later in nodes}
    path, node = [], next(iter(nodes & set(earlier)))
    while node not in path:
        path.append(node)
        node = earlier[node]
    circle = [node, *reversed(path[path.index(node) :])]
    return [" ".join(map(str, each)) for each in circle]


def _steps(rank: Calls) -> Iterator[list[Node]]:
    """Yield what a rank asks for at once: one collective or message, or several together."""
    numbers: dict[Node, int] = defaultdict(int)
    together: list[Node] | None = None
    for call in rank.calls:
        if call.kind in TOGETHER:
            if together:
                yield together
            together = [] if call.kind == "start" else None
            continue
        own = rank.groups[call.group].index(rank.rank)
        way: tuple[int, ...] = ()
        if call.kind in MESSAGES:
            way = (own, call.peer) if call.kind == "send" else (call.peer, own)
        what: Node = ("message" if way else "collective", "of group", call.group, *way)
        node = (*what, "number", numbers[what])
        numbers[what] += 1
        if together is None:
            yield [node]
        else:
            together.append(node)


def _few(members: Sequence[int]) -> str:
    shown = ", ".join(map(str, members[:8]))
    return f"{shown}, …" if len(members) > 8 else shown
