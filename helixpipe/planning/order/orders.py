"""Parts of orders that several schedules share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, pairwise
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


def interleaved_one_f_one_b(workload: Workload, p: int, v: int, groups: Sequence[slice]) -> tuple[tuple[Op, ...], ...]:
    """Return 1F1B of v stages on each of p ranks, stage s on rank s mod p: units run in groups, each group through the
    v stages of a rank in turn. groups: slices of the units, of whole microbatches each.
    """
    forward, backward = forward_units(workload), backward_units(workload)
    largest = max(group.stop - group.start for group in groups)
    ranks = []
    for rank in range(p):
        own = [place * p + rank for place in range(v)]
        forwards = [Op("F", stage, *unit) for group in groups for stage in own for unit in forward[group]]
        backwards = [Op("B", stage, *unit) for group in groups for stage in reversed(own) for unit in backward[group]]
        # Steps 1 to 3: (v-1) groups, 2(p-r-1) and k-1 F; F B; the rest of B
        warmup = (v - 1) * largest + 2 * (p - rank - 1) + workload.most_chunks - 1
        ranks.append(tuple(one_forward_one_backward(forwards, backwards, warmup)))
    return tuple(ranks)


def groups_of_units(chunks: Sequence[int], least: int) -> list[slice]:
    """Return each group of microbatches as a slice of the units; chunks: of each microbatch. There are as many groups
    of `least` units or more as possible. Microbatches left over are spread over the last groups if all microbatches
    have equally many chunks, else added to the last one.
    """
    ends = [0, *accumulate(chunks)]
    cuts = [0]
    for end in ends:
        if end >= cuts[-1] + least:
            cuts.append(end)
    count = max(1, len(cuts) - 1)
    if len(set(chunks)) == 1:
        size, more = divmod(len(chunks), count)
        cuts = [ends[at] for at in accumulate((size + (group >= count - more) for group in range(count)), initial=0)]
    cuts = [*cuts[:count], ends[-1]]
    return [slice(*cut) for cut in pairwise(cuts)]


def wave_order(
    num_stages: int,
    workload: Workload,
    waves: Iterable[tuple[Iterable[int], Iterable[int]]],
    turn_of: Callable[[int], int],
) -> tuple[Op, ...]:
    """Return the F and B of a rank's units in the order of slots that have room for an F and then a B.

    waves: for each, stages of the rank and the microbatches that run through them. turn_of: the slot in which a wave's
    unit of this number is in the last stage; ascending. In every stage before it F is as many slots earlier, and B as
    many later, as stages lie between: forwards and backwards run through the ranks as waves. Backwards take the slots
    in their own order, chunks last first, as many turns later as the first waits for: k-1. What an op needs has an
    earlier slot, or the same one where F and B of the last stage meet, so no choice of turns can deadlock.
    """
    forwards, backwards, later = forward_units(workload), backward_units(workload), workload.most_chunks - 1
    slots: list[tuple[int, int, Op]] = []
    for stages, own in waves:
        microbatches = set(own)
        down, up = ([unit for unit in units if unit[0] in microbatches] for units in (forwards, backwards))
        for stage in stages:
            away = num_stages - 1 - stage
            slots += [(turn_of(at) - away, 0, Op("F", stage, *unit)) for at, unit in enumerate(down)]
            slots += [(turn_of(at + later) + away, 1, Op("B", stage, *unit)) for at, unit in enumerate(up)]
    return tuple(op for _, _, op in sorted(slots))


def grouped_one_f_one_b(workload: Workload, groups: Iterable[Sequence[int]], aheads: Sequence[int]) -> list[list[int]]:
    """Return 1F1B over the chunks of microbatches in groups for each of `aheads`, without a flush between groups: n for
    F of the workload's unit number n, ~n for its B.

    Forwards go through the groups and their microbatches in the order given, chunks ascending, backwards the same with
    chunks descending. Before a backward there have been as many forwards more than backwards as the microbatch of its
    group with the most chunks has, and `ahead` more. So the warm-up of a group of N chunks at most is N - 1 + ahead.
    Where a group of fewer follows, several backwards in a row make up the difference, and with equal times no rank
    idles for it; where one of more follows, several forwards do, which ranks wait for.
    """
    starts = [0, *accumulate(map(len, workload.microbatches))]
    rows = [[range(starts[number], starts[number + 1]) for number in group] for group in groups]
    units = [unit for group in rows for row in group for unit in row]
    backwards = [[~unit for row in group for unit in reversed(row)] for group in rows]
    longest = [max(map(len, group)) for group in rows]
    orders = []
    for ahead in aheads:
        order: list[int] = []
        forwards = done = 0
        for most, own in zip(longest, backwards, strict=True):
            until = done + most + ahead
            order += units[forwards:until]
            forwards = max(forwards, min(until, len(units)))
            alone = max(forwards - until + 1, 0)
            paired = units[forwards : forwards + max(len(own) - alone, 0)]
            order += own[:alone]
            order += chain.from_iterable(zip(paired, own[alone:], strict=False))
            order += own[alone + len(paired) :]
            forwards, done = forwards + len(paired), done + len(own)
        orders.append(order)
    return orders
