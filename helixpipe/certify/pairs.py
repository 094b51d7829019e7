"""What ops take at least where forwards may run beside backwards of other units (`Program.pairs`).

A pair starts when both of its ops could, and ends with both; it takes less than the two one after the other. All that
it takes less is counted as the forward's, whatever backward it runs beside. So a pair is no shorter than the least time
of its forward followed by that of its backward, and in these two parts of its time both have what they wait for, and
what waits for them comes later: any program with pairs, with each pair so taken apart, is one without pairs of ops that
take their least times. What holds for all those, such as a bound, holds for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from helixpipe.costs.model_costs import ModelCosts
from helixpipe.lowering.bound import BoundCosts
from helixpipe.program.program import Op

BACKWARDS = ("B", "I")
"""What forwards run beside."""

MOST_PAIRS = 50_000
"""Pairs of unlike ops of a rank that are timed; where there are more, forwards may take no time beside backwards."""


class OpTime(NamedTuple):
    """The least an op takes, and what it takes beside no other."""

    least: float
    alone: float


def op_times(bound: BoundCosts) -> dict[Op, OpTime]:
    """Return the times of all ops of a program without pairs."""
    program, times = bound.program, dict[Op, OpTime]()
    for ops in program.ranks:
        times |= {op: OpTime(time, time) for op in ops for time in [bound.op_time(op)]}
        if isinstance(bound.costs, ModelCosts) and bound.costs.layout.pairs and not program.forward_only:
            times |= _beside(bound, ops, times)
    return times


def _beside(bound: BoundCosts, ops: Sequence[Op], times: Mapping[Op, OpTime]) -> dict[Op, OpTime]:
    """Return the times of a rank's forwards and backwards. A backward that could be shorter in a pair than alone is
    taken to be so alone, too."""
    program = bound.program
    alike: dict[bool, dict[tuple[object, ...], list[Op]]] = {False: defaultdict(list), True: defaultdict(list)}
    for op in ops:
        if op.kind in ("F", *BACKWARDS):
            extents, activations = program.workload.extents[op.microbatch][op.chunk], program.activations.get(op.unit)
            alike[op.kind == "F"][op.kind, op.stage, extents, activations, bound.recomputes_inside(op)].append(op)
    forwards, backwards = alike[True].values(), alike[False].values()
    if len(forwards) * len(backwards) > MOST_PAIRS:
        return {op: OpTime(0.0, times[op].alone) for own in forwards for op in own}
    pairs = [[bound.pair_time(own[0], other[0]) for other in backwards] for own in forwards]
    least = [min([times[other[0]].alone, *(row[at] for row in pairs)]) for at, other in enumerate(backwards)]
    found = {op: OpTime(time, time) for other, time in zip(backwards, least, strict=True) for op in other}
    for own, row in zip(forwards, pairs, strict=True):
        alone = times[own[0]].alone
        time = min([alone, *(max(both - back, 0.0) for both, back in zip(row, least, strict=True))])
        found |= {op: OpTime(time, alone) for op in own}
    return found


def apart(
    pairs: Mapping[int, int], spans: Mapping[int, tuple[float, float]], least: Sequence[float]
) -> dict[int, tuple[float, float]]:
    """Return the spans of ops in pairs, each pair's in turn, the backward's its least time long. pairs: by number, the
    second op of each first. spans: of all ops, as simulated."""
    own = {}
    for first, second in pairs.items():
        start, end = spans[first][0], spans[second][1]
        own[first], own[second] = (start, end - least[second]), (end - least[second], end)
    return own
