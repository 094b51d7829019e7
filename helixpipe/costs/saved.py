"""Computes the activations that a unit saves for its backward from the sizes of named tensors."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import TypeVar

from helixpipe.costs.piece_kinds import KINDS
from helixpipe.program.costs import Leaving
from helixpipe.program.stages import Piece, Segment

Name = TypeVar("Name", bound=Hashable)
Named = tuple[str, int]
"""A tensor's name and layer."""


def kept(
    segments: Sequence[Segment],
    whole: Sequence[Mapping[Name, float]],
    inputs: Sequence[Mapping[Name, float]],
    kind: str,
) -> float:
    """Return what a unit keeps once its op of that kind has run, from the sizes of named tensors; one that several keep
    counts once.

    whole, inputs: for each segment all it keeps, and its inputs alone. F: of what is recomputed the inputs, of what
    gets its inputs again all else. R: all. B and I: the most while a backward runs that recomputes segment by segment,
    from the last to the first.
    """
    after_forward = kept_after_forward(segments, whole, inputs)
    if kind == "R":
        moments = [[*after_forward, *whole]]
    elif kind == "F":
        moments = [after_forward]
    else:
        started = [index - segment.inputs_again for index, segment in enumerate(segments)]
        moments = [[*after_forward[:first], *whole[first : index + 1]] for index, first in enumerate(started)]
    return max(sum({name: size for tensors in each for name, size in tensors.items()}.values()) for each in moments)


def kept_after_forward(
    segments: Sequence[Segment], whole: Sequence[Mapping[Name, float]], inputs: Sequence[Mapping[Name, float]]
) -> list[Mapping[Name, float]]:
    """Return what each segment keeps after F."""
    after_forward: list[Mapping[Name, float]] = []
    for segment, every, own in zip(segments, whole, inputs, strict=True):
        if segment.inputs_again:
            after_forward.append({name: size for name, size in every.items() if name not in own})
        else:
            after_forward.append(own if segment.recomputed else every)
    return after_forward


def offloaded(
    segments: Sequence[Segment],
    saved: Callable[[Piece, Sequence[Piece]], Mapping[Name, float]],
    inputs: Sequence[Mapping[Name, float]],
    leaving: Leaving,
    stays: Container[Name],
) -> float:
    """Return what of that leaves the device after F. saved: by a piece that has one graph with others. inputs: of each
    segment, as for `kept`. stays: what does not leave, whatever is to. A tensor belongs to the first piece that saves
    it; the inputs of a segment to its first piece."""
    owners: dict[Name, tuple[Piece, float]] = {}
    for segment, own in zip(segments, inputs, strict=True):
        if not segment.inputs_again:
            for name, size in own.items():
                owners.setdefault(name, (segment.pieces[0], size))
        for piece in () if segment.recomputed else segment.pieces:
            for name, size in saved(piece, segment.pieces).items():
                if not (segment.inputs_again and name in own):
                    owners.setdefault(name, (piece, size))
    total = 0.0
    for run, share in leaving.runs:
        sizes = [
            size
            for name, (piece, size) in owners.items()
            if piece in run and name not in stays and size >= leaving.min_bytes
        ]
        total += sum(sizes[place] for place in leaving_share(sizes, share))
    return total


def leaving_share(sizes: Sequence[float], share: float) -> list[int]:
    """Of tensors of these sizes, the places of those that leave of a run: whole ones, the largest first, while they are
    within a share of all."""
    room, places = sum(sizes) * share * (1 + 1e-9), []
    for place in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        if sizes[place] <= room:
            room -= sizes[place]
            places.append(place)
    return places


def staying(before: Piece | None, after: Piece | None) -> set[tuple[str, int]]:
    """Of the tensors of a stage between two pieces, by name and layer, those that pieces beyond its cuts hold as well:
    what crosses the cut after it, and of what crosses the cut before it that which the piece there saves. Letting go of
    them on one side would free nothing."""
    names = set()
    if before is not None:
        kind = KINDS[before.kind]
        names |= {(name, before.layer) for name in (*kind.inputs, *kind.saved_outputs)}
    if after is not None:
        names |= {(name, after.layer) for name in KINDS[after.kind].inputs}
    return names
