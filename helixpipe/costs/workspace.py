"""Computes what an op needs beside what is kept, from what there is while each of its pieces runs.

A forward fills its unit's memory piece by piece and a backward frees it, so what a piece needs counts with what is
saved by then: a large need near the end of a backward, as of the embedding's gradient, may be the most there is, or lie
in memory that was freed before. Of a pair of both (`helixpipe/model/steps.py`), one frees while the other fills.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from typing import NamedTuple

from helixpipe.costs.saved import Named, kept_after_forward
from helixpipe.program.stages import Segment


@dataclass(frozen=True)
class SavedInUnit:
    """What a unit saves, whatever op runs: its segments, the inputs of each, and the tensors of each of its pieces."""

    segments: Sequence[Segment]
    inputs: Sequence[Mapping[Named, float]]
    pieces: Sequence[Sequence[Mapping[Named, float]]]

    @cached_property
    def whole(self) -> list[Mapping[Named, float]]:
        """All that each segment keeps."""
        return [_union([own, *run]) for own, run in zip(self.inputs, self.pieces, strict=True)]

    @cached_property
    def growing(self) -> list[list[float]]:
        """Bytes of each segment's tensors that there are after each of its pieces, if there is nothing else."""
        return [[*map(_Grown(own).add, run)] for own, run in zip(self.inputs, self.pieces, strict=True)]

    @property
    def plain(self) -> bool:
        """Whether it is one segment, of which nothing is recomputed."""
        return len(self.segments) == 1 and not self.segments[0].recomputed and not self.segments[0].inputs_again


class AtPiece(NamedTuple):
    """What is known of a piece of a unit beside what it saves: bytes that its op needs beside that and the gradients
    that come to it, of these gradients, and of what its I leaves to W; how often it pauses in a pair, and what it needs
    outside of its pauses (`PieceKind.outside_pauses`)."""

    needs: float
    comes: float
    deferred: float
    pauses: int
    outside: float


class InUnit(NamedTuple):
    """What a unit saves, and its pieces for an op, segment by segment."""

    saved: SavedInUnit
    pieces: Sequence[Sequence[AtPiece]]

    def between_pauses(self, moments: Sequence[float], backward: bool = False) -> list[float]:
        """Return the most between two pauses, from the most at each piece in the order of the forward."""
        pieces = [*chain.from_iterable(self.pieces)]
        outside = [most - each.needs + each.outside for most, each in zip(moments, pieces, strict=True)]
        pauses = [each.pauses for each in pieces]
        if backward:
            return between_pauses(moments[::-1], pauses[::-1], ends=outside[::-1])
        return between_pauses(moments, pauses, starts=outside)


def forward_moments(unit: InUnit) -> tuple[list[float], float]:
    """Return the most bytes there are of a unit while F runs each of its pieces, and all that it has saved in the end.
    What a piece saves that is recomputed is there while it runs."""
    known = unit.saved
    if known.plain:
        (there,), (pieces,), (whole,) = known.growing, unit.pieces, known.whole
        return [now + each.needs for now, each in zip(there, pieces, strict=True)], sum(whole.values())
    held, moments = dict[Named, float](), list[float]()
    left = kept_after_forward(known.segments, known.whole, known.inputs)
    of_segments = zip(known.segments, known.inputs, known.pieces, unit.pieces, left, strict=True)
    for segment, own, saved, run, stays in of_segments:
        grown = _Grown(held, own)
        for tensors, each in zip(saved, run, strict=True):
            beside = grown.with_also(tensors) if segment.recomputed else grown.add(tensors)
            moments.append(beside + each.needs)
        held |= stays
    return moments, sum(held.values())


def backward_moments(unit: InUnit, op: str, inside: bool) -> list[float]:
    """Return the most bytes there are of a unit while B or I runs each of its pieces, in the order of the forward.
    inside: whether it recomputes segment by segment; else all has been."""
    known = unit.saved
    every = known.whole
    before = kept_after_forward(known.segments, every, known.inputs) if inside else every
    deferred, moments = 0.0, list[float]()
    for index in reversed(range(len(every))):
        if known.plain:
            there = known.growing[index]
        else:
            held = _union(before[:index])
            if known.segments[index].inputs_again:
                held |= every[index - 1]
            there = [*map(_Grown(held, known.inputs[index]).add, known.pieces[index])]
        for saved, each in zip(reversed(there), reversed(unit.pieces[index]), strict=True):
            moments.append(saved + each.comes + each.needs + deferred)
            deferred += each.deferred if op == "I" else 0.0
    return moments[::-1]


def pair_most(forward: Sequence[float], backward: Sequence[float], leads: bool) -> float:
    """Return the most bytes of both units of a pair, from the most of each between two of its pauses. leads: whether
    the forward takes its first step before the backward begins; it takes one in each of the backward's pauses, and
    those that are left at the end."""
    most, taken = 0.0, 0
    if leads:
        most, taken = forward[0] + backward[0], 1
    for there, following in zip_longest(backward, backward[1:]):
        resting = forward[min(taken, len(forward)) - 1] if taken else 0.0
        most = max(most, there + resting)
        if following is not None:  # in the pause between the two there is no more than in either
            running = forward[taken] if taken < len(forward) else 0.0
            most, taken = max(most, min(there, following) + running), taken + 1
    return max(most, *forward[min(taken, len(forward)) :], 0.0)


def between_pauses(
    moments: Sequence[float],
    pauses: Sequence[int],
    starts: Sequence[float] | None = None,
    ends: Sequence[float] | None = None,
) -> list[float]:
    """Return the most between two pauses, from the most at each piece, in the order in which they run, and how often
    it pauses. starts, ends: of each piece that pauses, what there is before its first pause, and after its last."""
    most = [0.0]
    for there, times, start, end in zip(moments, pauses, starts or moments, ends or moments, strict=True):
        most[-1] = max(most[-1], start if times else there)
        if times:
            most += [*[there] * (times - 1), end]
    return most


class _Grown:
    """Bytes of tensors that there are, as more come; one of a name counts once."""

    def __init__(self, *there: Mapping[Named, float]):
        self._there = _union(there)
        self.bytes = sum(self._there.values())

    def add(self, tensors: Mapping[Named, float]) -> float:
        """Add those that are not there, and return the bytes of all."""
        self.bytes = self.with_also(tensors)
        self._there |= tensors
        return self.bytes

    def with_also(self, tensors: Mapping[Named, float]) -> float:
        """Return the bytes of all, were these there too."""
        there = self._there
        return self.bytes + sum([size for name, size in tensors.items() if name not in there])


def _union(every: Sequence[Mapping[Named, float]]) -> dict[Named, float]:
    return {name: size for tensors in every for name, size in tensors.items()}
