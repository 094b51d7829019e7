"""Parts of orders that several schedules share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from helixpipe.common.errors import ScheduleError
from helixpipe.program.program import Op
from helixpipe.program.workload import Workload

T = TypeVar("T")


def require_multiple(schedule: str, microbatches: int, of: int, what: str) -> None:
    """Raise ScheduleError, naming the two nearest valid values, unless `microbatches` is a multiple of `of`."""
    if microbatches % of:
        raise ScheduleError(
            f"{schedule} needs a number of microbatches that is a multiple of {what} {of}, not {microbatches}; "
            f"the nearest valid values are {near_multiples(microbatches, of)}."
        )


def near_multiples(value: int, of: int) -> str:
    """Return the positive multiples of `of` below and above a value that is none, or the first two: `4 and 8`."""
    below = max(value - value % of, of)
    return f"{below} and {below + of}"


def forward_units(workload: Workload) -> list[tuple[int, int]]:
    """Return (microbatch, chunk) in the order every stage runs them forward: first in first out, chunks ascending."""
    return list(workload.units())


def backward_units(workload: Workload) -> list[tuple[int, int]]:
    """Return (microbatch, chunk) in the order of backwards: microbatches first in first out, their chunks last in first
    out ("partially ordered queue", Seq1F1B).
    """
    return [
        (number, chunk) for number, chunks in enumerate(workload.microbatches) for chunk in reversed(range(len(chunks)))
    ]


def one_forward_one_backward(forwards: Sequence[T], backwards: Sequence[T], warmup: int) -> list[T]:
    """Return `warmup` forwards, then one forward and one backward in turn, then the remaining backwards.

    forwards, backwards: equally many, each in the order it keeps. warmup: clamped to their number.
    """
    warmup = min(warmup, len(forwards))
    order = list(forwards[:warmup])
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += [forward, backward]
    return [*order, *backwards[len(forwards) - warmup :]]


def wave_order(num_stages: int, units: Iterable[tuple[int, int, int]]) -> tuple[Op, ...]:
    """Return the F and B of a rank's units, given as (turn, stage, microbatch), in the order of slots that have room
    for an F and then a B.

    turn: the slot in which the microbatch is in the last stage. In every stage before it F is as many slots earlier,
    and B as many later, as stages lie between: forwards and backwards run through the ranks as waves. What an op needs
    has an earlier slot, or the same one where F and B of the last stage meet, so no choice of turns can deadlock.
    """
    slots: list[tuple[int, int, Op]] = []
    for turn, stage, microbatch in units:
        distance = num_stages - 1 - stage
        slots += [(turn - distance, 0, Op("F", stage, microbatch)), (turn + distance, 1, Op("B", stage, microbatch))]
    return tuple(op for _, _, op in sorted(slots))


def grouped_one_f_one_b(workload: Workload, groups: Iterable[Sequence[int]], ahead: int) -> list[tuple[str, int, int]]:
    """Return 1F1B over the chunks of microbatches in groups, as (F or B, microbatch, chunk): no flush between groups.

    Forwards go through the groups and their microbatches in the order given, chunks ascending, backwards the same with
    chunks descending. Before a backward there have been as many forwards more than backwards as the microbatch of its
    group with the most chunks has, and `ahead` more. So the warm-up of a group of N chunks at most is N - 1 + ahead.
    Where a group of fewer follows, several backwards in a row make up the difference, and with equal times no rank
    idles for it; where one of more follows, several forwards do, which ranks wait for.
    """
    units: list[tuple[int, int]] = []
    order: list[tuple[str, int, int]] = []
    sizes = []
    for group in groups:
        counts = [len(workload.chunks(number)) for number in group]
        units += [(number, chunk) for number, count in zip(group, counts, strict=True) for chunk in range(count)]
        sizes += [(max(counts), number, count) for number, count in zip(group, counts, strict=True)]
    forwards = backwards = 0
    for most, number, count in sizes:
        for chunk in reversed(range(count)):
            until = max(forwards, min(backwards + most + ahead, len(units)))
            order += [("F", *unit) for unit in units[forwards:until]]
            order.append(("B", number, chunk))
            forwards, backwards = until, backwards + 1
    return order
