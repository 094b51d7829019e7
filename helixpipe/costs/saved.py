"""What a unit keeps for its backward, from the sizes of named tensors. No torch here."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from helixpipe.program.stages import Segment

Name = TypeVar("Name", bound=Hashable)


def kept(
    segments: Sequence[Segment],
    whole: Sequence[Mapping[Name, float]],
    inputs: Sequence[Mapping[Name, float]],
    kind: str,
) -> float:
    """What a unit keeps once its op of that kind has run, from the sizes of named tensors; one that several keep
    counts once.

    whole, inputs: for each segment all it keeps, and its inputs alone. F: of what is recomputed the inputs, of what
    gets its inputs again all else. R: all. B and I: the most while a backward runs that recomputes segment by segment,
    from the last to the first.
    """
    after_forward: list[Mapping[Name, float]] = []
    for segment, every, own in zip(segments, whole, inputs, strict=True):
        if segment.inputs_again:
            after_forward.append({name: size for name, size in every.items() if name not in own})
        else:
            after_forward.append(own if segment.recomputed else every)
    if kind == "R":
        moments = [[*after_forward, *whole]]
    elif kind == "F":
        moments = [after_forward]
    else:
        started = [index - segment.inputs_again for index, segment in enumerate(segments)]
        moments = [[*after_forward[:first], *whole[first : index + 1]] for index, first in enumerate(started)]
    return max(sum({name: size for tensors in each for name, size in tensors.items()}.values()) for each in moments)
