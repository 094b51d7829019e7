"""What ranks know of bits that differ, and the sentence that names the rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class CheckedValue(NamedTuple):
    """Something all replicas have alike. place: in the order in which a step makes such things, from 0; −1 for what is
    there before it. name: of what it is."""

    place: int
    name: str


class ReceivedDigest(NamedTuple):
    """A message that came. number: of the one that first carried the same."""

    number: int
    digest: int
    name: str


@dataclass(frozen=True)
class RankFindings:
    """What one rank knows of a step. name: of the rank. pipeline: which replica it is of. place: on the other axes.

    changed: what has changed in its memory that nobody changed. sent: the digests of messages by number. entries, row:
    of what it has computed in a check, and the digests. unsteady: those that came out otherwise when it computed them
    again.
    """

    name: str
    pipeline: int
    place: tuple[int, ...]
    changed: tuple[str, ...] = ()
    sent: tuple[tuple[int, int], ...] = ()
    received: tuple[ReceivedDigest, ...] = ()
    entries: tuple[CheckedValue, ...] = ()
    row: tuple[int, ...] = ()
    unsteady: tuple[CheckedValue, ...] = ()


def sentence(findings: Sequence[RankFindings], iteration: int, checked: int) -> str:
    """Return what is to be told of a step in which something differed. checked: the last iteration before whose step
    the replicas were compared, and alike; 0: none."""
    found = [*_in_memory(findings), *_in_messages(findings)]
    before = iteration - 1
    if not found:
        found, before = _computed(findings), checked - 1
    told = "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
    which = f"checkpoints up to iteration {before} are from before" if before > 0 else "no checkpoint is from before"
    return (
        f"corrupt bits at iteration {iteration}: {told}; {which} (--ckpt-step), and the rank's machine is better left "
        "out (docs/resilience.md)."
    )


def _in_memory(findings: Sequence[RankFindings]) -> list[str]:
    return [
        f"{rank.name}: {', '.join(rank.changed[:2])}{' and more' * (len(rank.changed) > 2)} changed in its memory "
        "between two updates"
        for rank in findings
        if rank.changed
    ]


def _in_messages(findings: Sequence[RankFindings]) -> list[str]:
    """The messages that did not bring what was sent, of all pipelines."""
    pipelines: dict[object, list[RankFindings]] = defaultdict(list)
    for rank in findings:
        pipelines[rank.pipeline, rank.place[1:]].append(rank)
    found = []
    for ranks in pipelines.values():
        sent = {number: value for rank in ranks for number, value in rank.sent}
        found += [
            f"{rank.name}: the {message.name} came with other bits than it was sent with"
            for rank in ranks
            for message in rank.received
            if sent[message.number] != message.digest
        ]
    return found


def _computed(findings: Sequence[RankFindings]) -> list[str]:
    """The first thing that ranks with the same work have not computed alike, and who is to blame: who made something
    else when it tried again, else the fewer, else all of them."""
    unsteady = [(min(rank.unsteady), rank.name) for rank in findings if rank.unsteady]
    if unsteady:
        first = min(unsteady)
        return [
            f"{name}: computed {entry.name} twice, with other bits" for entry, name in unsteady if entry == first[0]
        ]
    places: dict[tuple[int, ...], list[RankFindings]] = defaultdict(list)
    for rank in findings:
        if rank.row:
            places[rank.place].append(rank)
    differing = [
        (entry, index, ranks)
        for ranks in places.values()
        for index, entry in enumerate(ranks[0].entries)
        if len({rank.row[index] for rank in ranks}) > 1
    ]
    if not differing:
        return ["ranks differ, but not any more in what they remember"]
    entry, index, ranks = min(differing, key=lambda each: each[0])
    counts = Counter(rank.row[index] for rank in ranks)
    value, most = counts.most_common(1)[0]
    if 2 * most > len(ranks):
        return [
            f"{rank.name}: has {entry.name} otherwise than its replicas" for rank in ranks if rank.row[index] != value
        ]
    return [f"one of {' and '.join(rank.name for rank in ranks)}: they have {entry.name} with other bits"]
