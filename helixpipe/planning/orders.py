"""Parts of orders that several schedules share. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from helixpipe.common.errors import ScheduleError

T = TypeVar("T")


def require_multiple(schedule: str, microbatches: int, of: int, what: str) -> None:
    """Raise ScheduleError, naming the two nearest valid values, unless `microbatches` is a multiple of `of`."""
    if microbatches % of:
        below = microbatches - microbatches % of
        valid = f"{below} and {below + of}" if below else f"{of} and {2 * of}"
        raise ScheduleError(
            f"{schedule} needs a number of microbatches that is a multiple of {what} {of}, not {microbatches}; "
            f"the nearest valid values are {valid}."
        )


def forward_units(microbatches: int, chunks: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) in the order every stage runs them forward: first in first out, chunks ascending."""
    return [(microbatch, chunk) for microbatch in range(microbatches) for chunk in range(chunks)]


def backward_units(microbatches: int, chunks: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) in the order of backwards: microbatches first in first out, their chunks last in first out
    ("partially ordered queue", Seq1F1B)."""
    return [(microbatch, chunk) for microbatch in range(microbatches) for chunk in reversed(range(chunks))]


def one_forward_one_backward(forwards: Sequence[T], backwards: Sequence[T], warmup: int) -> list[T]:
    """As many forwards as the warm-up has, one forward and one backward in turn, the rest of the backwards.

    forwards, backwards: equally many, each in the order it keeps. warmup: clamped to their number.
    """
    warmup = min(warmup, len(forwards))
    order = list(forwards[:warmup])
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    return [*order, *backwards[len(forwards) - warmup :]]
