"""Which of the snapshots that ranks hold a job goes on from: a pure function of what they offer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from helixpipe.common.host_memory import Stamp

Place = tuple[int, int]
"""Pipeline rank, tensor-parallel rank: ranks of a place hold the same weights."""


class TakenBy(NamedTuple):
    """The rank that took a snapshot. part: its number among `parts` ranks of its place, which share out the
    optimizer's state unless the snapshot is `complete`."""

    place: Place
    part: int
    parts: int
    complete: bool


class Offer(NamedTuple):
    """A whole snapshot in the memory of the rank that offers it. size: bytes. slot: where it lies, as its holder knows
    it."""

    stamp: Stamp
    by: TakenBy
    size: int
    slot: tuple[str, int]


@dataclass(frozen=True)
class NeededSnapshot:
    """A snapshot that is needed, and for each rank that holds it where."""

    size: int
    holders: Mapping[int, tuple[str, int]]


@dataclass(frozen=True)
class Choice:
    """The state that a job goes on from. sources: for each place the snapshots that make up its state."""

    stamp: Stamp
    sources: Mapping[Place, Sequence[NeededSnapshot]]


def choose(offers: Sequence[Sequence[Offer]], places: Collection[Place]) -> Choice | None:
    """Return the newest step of which the ranks together hold all places; None if there is none. offers: of each rank.

    A later life comes before a later step: it began from the newest that there was, and went its own way from there.
    """
    held: dict[Stamp, dict[Place, dict[int, list[tuple[int, Offer]]]]] = {}
    for rank, own in enumerate(offers):
        for offer in own:
            parts = held.setdefault(offer.stamp, {}).setdefault(offer.by.place, {})
            parts.setdefault(offer.by.part, []).append((rank, offer))
    for stamp in sorted(held, reverse=True):
        sources = {place: _sources(held[stamp].get(place, {})) for place in places}
        if all(sources.values()):
            return Choice(stamp, sources)
    return None


def _sources(parts: Mapping[int, Sequence[tuple[int, Offer]]]) -> list[NeededSnapshot]:
    """Return the snapshots that make up the state of a place; none if some are missing."""
    needed = sorted(parts)
    if not needed:
        return []
    first = parts[needed[0]][0][1]
    if first.by.complete:  # ranks of a place have equal states
        return [_needed([each for number in needed for each in parts[number]])]
    if needed != list(range(first.by.parts)):
        return []
    return [_needed(parts[number]) for number in needed]


def _needed(held: Sequence[tuple[int, Offer]]) -> NeededSnapshot:
    """Return the first of these snapshots, which are of equal states, with all ranks that have it in as many bytes:
    plain values may take more on one rank than on another."""
    size = held[0][1].size
    return NeededSnapshot(size, {rank: offer.slot for rank, offer in reversed(held) if offer.size == size})
