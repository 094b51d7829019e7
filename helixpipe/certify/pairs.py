"""What ops take at least where forwards may run beside backwards of other units (`Program.pairs`).

A pair starts when both of its ops could, and ends with both; it takes less than the two one after the other. What it
takes less is no more than what its forward and its backward are given each, whatever they run beside: by a linear
program, so that all ops of a rank are given least (few backwards that hide much, as I among B, then have what they hide
more themselves, and the forwards do not all count as if beside one of these). So a pair is no shorter than the least
time of its forward followed by that of its backward, and in these two parts of its time both have what they wait for,
and what waits for them comes later: any program with pairs, with each pair so taken apart, is one without pairs of ops
that take their least times. What holds for all those, such as a bound, holds for it.
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


ROUNDING = 1e-9
"""Part of a number by which it may be too small."""

PREFERENCE = 1e-4
"""By which part more a backward is to take less for a forward to take more: chains of backwards then stay long."""


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
    """Return the times of a rank's forwards and backwards. A backward that is given some of what a pair saves is taken
    to be so much shorter alone, too."""
    program = bound.program
    alike: dict[bool, dict[tuple[object, ...], list[Op]]] = {False: defaultdict(list), True: defaultdict(list)}
    for op in ops:
        if op.kind in ("F", *BACKWARDS):
            extents, activations = program.workload.extents[op.microbatch][op.chunk], program.activations.get(op.unit)
            alike[op.kind == "F"][op.kind, op.stage, extents, activations, bound.recomputes_inside(op)].append(op)
    forwards, backwards = alike[True].values(), alike[False].values()
    if len(forwards) * len(backwards) > MOST_PAIRS:
        return {op: OpTime(0.0, times[op].alone) for own in forwards for op in own}
    saved = [
        [times[own[0]].alone + times[other[0]].alone - bound.pair_time(own[0], other[0]) for other in backwards]
        for own in forwards
    ]
    groups = [*forwards, *backwards]
    counts = [len(own) * (1.0 if own[0].kind == "F" else 1 + PREFERENCE) for own in groups]
    given = _given(saved, counts, [times[own[0]].alone for own in groups])
    found: dict[Op, OpTime] = {}
    for own, less in zip(groups, given, strict=True):
        alone = times[own[0]].alone
        time = max(alone - less * (1 + ROUNDING), 0.0)
        found |= {op: OpTime(time, alone if op.kind == "F" else time) for op in own}
    return found


def _given(saved: Sequence[Sequence[float]], counts: Sequence[float], most: Sequence[float]) -> list[float]:
    """Return numbers of rows, then of columns, of which each row's and each column's together are no less than what
    `saved` has there, with the least sum, each number `counts` times. most: of each number."""
    import numpy as np
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    rows, columns = len(saved), len(saved[0]) if saved else 0
    if not rows or not columns:
        return [0.0] * len(counts)
    places = np.arange(rows * columns)
    own = np.concatenate([places // columns, rows + places % columns])
    both = csr_array((-np.ones(2 * len(places)), (np.tile(places, 2), own)), shape=(len(places), rows + columns))
    least = -np.asarray(saved).ravel()
    solution = linprog(np.asarray(counts, float), both, least, bounds=[(0.0, each) for each in most])
    number = np.zeros(len(counts)) if solution.x is None else np.maximum(solution.x, 0.0)
    number[:rows] = np.maximum(number[:rows], (-least.reshape(rows, columns) - number[rows:]).max(axis=1))
    return [float(each) for each in number]


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
