"""Schedules that cut each microbatch's sequence into k chunks, so that a unit of work is 1/k of a microbatch.

Ao Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language Model Training"
(arXiv 2406.03488); Zhuohan Li et al., "TeraPipe" (ICML 2021). Under causal attention a chunk's forward needs the keys
and values of the chunks before it, and its backward their gradients from the chunks after it. So forwards go through
the microbatches in order with chunks ascending, and backwards through the microbatches in order with chunks
descending. With k = 1 these are `1f1b`, `interleaved-1f1b`, `zb1p` and `gpipe`.
"""

from __future__ import annotations

from itertools import accumulate
from math import ceil

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.bound import BoundCosts
from helixpipe.planning.catalogue import NoOptions, Shape
from helixpipe.planning.orders import backward_units, forward_units, one_forward_one_backward
from helixpipe.planning.problem import held_by
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import Stage
from schedules.zero_bubble import ZeroBubbleOptions, one_stage_a_rank


def seq1f1b(shape: Shape, options: NoOptions) -> Program:
    """1F1B over chunks (Sun et al., Seq1F1B).

    Bubble (p-1)(F+B)/k with chunks of equal time; rank r keeps at most min((p-r-1)/k + 1, m) microbatches. Any m works.
    """
    stages = shape.even_stages(shape.ranks)
    ranks = tuple(_one_f_one_b(shape, rank) for rank in range(shape.ranks))
    return _program("seq1f1b", stages, ranks, shape)


def seq1f1b_interleaved(shape: Shape, options: NoOptions) -> Program:
    """Interleaved 1F1B over chunks: v stages a rank, stage s on rank s mod p (Sun et al., Seq1F1B).

    Bubble (p-1)(F+B)/(kv) with chunks of equal time, where m is enough for one group. A rank runs the units in groups,
    each group through its v stages in turn. The published rule, groups of p units, is well ordered only when k divides
    p: else a group ends within a microbatch, whose backward would begin before its last chunk has come forward. Here a
    group is the fewest whole microbatches that have p units or more, so no rank idles when the stage changes; where
    such groups do not divide m, some are one microbatch larger.
    """
    p, m, k = shape.ranks, shape.microbatches, shape.chunks
    v = shape.virtual_stages if shape.virtual_stages is not None else 2
    groups = _groups(m, ceil(p / k))
    ranks = []
    for rank in range(p):
        places = range(v)
        forwards = [
            Op("F", place * p + rank, *unit)
            for first, count in groups
            for place in places
            for unit in forward_units(m, k)[first * k : (first + count) * k]
        ]
        backwards = [
            Op("B", place * p + rank, *unit)
            for first, count in groups
            for place in reversed(places)
            for unit in backward_units(m, k)[first * k : (first + count) * k]
        ]
        # Steps 1 to 3: (v-1) groups, 2(p-r-1) and k-1 F; F B; the rest of B
        warmup = (v - 1) * max(count for _, count in groups) * k + 2 * (p - rank - 1) + k - 1
        ranks.append(tuple(one_forward_one_backward(forwards, backwards, warmup)))
    return _program("seq1f1b-interleaved", shape.even_stages(p * v), tuple(ranks), shape)


def seq1f1b_zero_bubble(shape: Shape, options: ZeroBubbleOptions) -> Program:
    """Seq1F1B with the backward split into I and W, found from costs as `zb1p` is, with the memory of seq1f1b.

    Every rank may keep what seq1f1b keeps on the first, (p-1)/k + 1 microbatches with chunks of equal length; the step
    never takes longer than seq1f1b's. Sun et al. draw such a schedule and publish no program for it.
    """
    kept = max(_kept(shape, rank) for rank in range(shape.ranks))
    return one_stage_a_rank("seq1f1b-zb", shape, options, max(kept, 1 + (shape.ranks - 1) / shape.chunks))


def terapipe(shape: Shape, options: NoOptions) -> Program:
    """GPipe over chunks: all forwards, then all backwards (Li et al., TeraPipe, ICML 2021).

    Bubble (p-1)(F+B)/k with chunks of equal time; every rank keeps the activations of all m microbatches.
    """
    ranks = []
    for rank in range(shape.ranks):
        # Step 1: mk F
        forwards = [Op("F", rank, *unit) for unit in forward_units(shape.microbatches, shape.chunks)]
        # Step 2: mk B
        backwards = [Op("B", rank, *unit) for unit in backward_units(shape.microbatches, shape.chunks)]
        ranks.append((*forwards, *backwards))
    return _program("terapipe", shape.even_stages(shape.ranks), tuple(ranks), shape)


def _program(name: str, stages: tuple[Stage, ...], ranks: tuple[tuple[Op, ...], ...], shape: Shape) -> Program:
    return Program(name, stages, ranks, shape.workload)


def _one_f_one_b(shape: Shape, rank: int) -> tuple[Op, ...]:
    """The order of seq1f1b on one rank."""
    forwards = [Op("F", rank, *unit) for unit in forward_units(shape.microbatches, shape.chunks)]
    backwards = [Op("B", rank, *unit) for unit in backward_units(shape.microbatches, shape.chunks)]
    # Steps 1 to 3: p-r-1 and k-1 F; F B; the rest of B
    warmup = shape.ranks - rank - 1 + shape.chunks - 1
    return tuple(one_forward_one_backward(forwards, backwards, warmup))


def _groups(microbatches: int, least: int) -> list[tuple[int, int]]:
    """First microbatch and number of microbatches of each group: as many groups of `least` as there can be, and what
    is left over spread over the last of them."""
    count = max(1, microbatches // least)
    size, more = divmod(microbatches, count)
    sizes = [size + (group >= count - more) for group in range(count)]
    return list(zip(accumulate(sizes, initial=0), sizes, strict=False))


def _kept(shape: Shape, rank: int) -> float:
    """The most that seq1f1b keeps on a rank, in microbatches of what a unit holds there: chunks differ in length."""
    stages, costs = shape.even_stages(shape.ranks), shape.costs or PieceTimes()
    bound = BoundCosts(Program("seq1f1b", stages, ((),) * shape.ranks, shape.workload), costs)
    held = [held_by(bound, Op("F", rank, 0, chunk)) for chunk in range(shape.chunks)]
    if not sum(held):
        return 0.0
    order = _one_f_one_b(shape, rank)
    return max(accumulate(held[op.chunk] if op.kind == "F" else -held[op.chunk] for op in order)) / sum(held)
