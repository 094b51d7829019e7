"""Schedules that cut each microbatch's sequence into k chunks, so that a unit of work is 1/k of a microbatch.

Ao Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language Model Training"
(arXiv 2406.03488); Zhuohan Li et al., "TeraPipe" (ICML 2021). Under causal attention a chunk's forward needs the keys
and values of the chunks before it, and its backward their gradients from the chunks after it. So forwards go through
the microbatches in order with chunks ascending, and backwards through the microbatches in order with chunks
descending. With k = 1 these are `1f1b`, `interleaved-1f1b`, `zb1p` and `gpipe`.
"""

from __future__ import annotations

from itertools import accumulate

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.bound import BoundCosts
from helixpipe.planning.catalogue import NoOptions, Shape
from helixpipe.planning.memory.held import held_by
from helixpipe.planning.order.orders import (
    backward_units,
    forward_units,
    groups_of_units,
    interleaved_one_f_one_b,
    one_forward_one_backward,
)
from helixpipe.program.program import Op, Program, Unit
from helixpipe.program.workload import Workload
from schedules.zero_bubble import ZeroBubbleOptions, one_stage_a_rank


def seq1f1b(shape: Shape, options: NoOptions) -> Program:
    """1F1B over chunks (Sun et al., Seq1F1B).

    Bubble (p-1)(F+B)/k with chunks of equal time; rank r keeps at most min((p-r-1)/k + 1, m) microbatches. Any m works.
    """
    stages, workload = shape.even_stages(shape.ranks), shape.workload
    ranks = tuple(_one_f_one_b(workload, shape.ranks, rank) for rank in range(shape.ranks))
    return Program("seq1f1b", stages, ranks, workload)


def seq1f1b_interleaved(shape: Shape, options: NoOptions) -> Program:
    """Interleaved 1F1B over chunks: v stages a rank, stage s on rank s mod p (Sun et al., Seq1F1B).

    Bubble (p-1)(F+B)/(kv) with chunks of equal time, where m is enough for one group. A rank runs the units in groups,
    each group through its v stages in turn. The published rule, groups of p units, is well ordered only when k divides
    p: else a group ends within a microbatch, whose backward would begin before its last chunk has come forward. Here a
    group is the fewest whole microbatches that have p units or more, so no rank idles when the stage changes; where
    such groups do not divide m, some are one microbatch larger.
    """
    p, workload = shape.ranks, shape.workload
    v = shape.virtual_stages if shape.virtual_stages is not None else 2
    groups = groups_of_units([len(chunks) for chunks in workload.microbatches], p)
    ranks = interleaved_one_f_one_b(workload, p, v, groups)
    return Program("seq1f1b-interleaved", shape.even_stages(p * v), ranks, workload)


def seq1f1b_zero_bubble(shape: Shape, options: ZeroBubbleOptions) -> Program:
    """Seq1F1B with the backward split into I and W, found from costs as `zb1p` is, with the memory of seq1f1b.

    Every rank may keep what seq1f1b keeps on the first, (p-1)/k + 1 microbatches with chunks of equal length; the step
    never takes longer than seq1f1b's. Sun et al. draw such a schedule and publish no program for it.
    """
    kept = max(_kept(shape, rank) for rank in range(shape.ranks))
    return one_stage_a_rank("seq1f1b-zb", shape, options, max(kept, 1 + (shape.ranks - 1) / shape.most_chunks))


def terapipe(shape: Shape, options: NoOptions) -> Program:
    """GPipe over chunks: all forwards, then all backwards (Li et al., TeraPipe, ICML 2021).

    Bubble (p-1)(F+B)/k with chunks of equal time; every rank keeps the activations of all m microbatches.
    """
    ranks, workload = [], shape.workload
    for rank in range(shape.ranks):
        # Step 1: mk F
        forwards = [Op("F", rank, *unit) for unit in forward_units(workload)]
        # Step 2: mk B
        backwards = [Op("B", rank, *unit) for unit in backward_units(workload)]
        ranks.append((*forwards, *backwards))
    return Program("terapipe", shape.even_stages(shape.ranks), tuple(ranks), workload)


def _one_f_one_b(workload: Workload, ranks: int, rank: int) -> tuple[Op, ...]:
    """Return the order of seq1f1b on one of `ranks` ranks. If microbatches differ, k is the most chunks of any: the
    first backward of such a one comes after all its forwards.
    """
    forwards = [Op("F", rank, *unit) for unit in forward_units(workload)]
    backwards = [Op("B", rank, *unit) for unit in backward_units(workload)]
    # Steps 1 to 3: p-r-1 and k-1 F; F B; the rest of B
    warmup = ranks - rank - 1 + workload.most_chunks - 1
    return tuple(one_forward_one_backward(forwards, backwards, warmup))


def _kept(shape: Shape, rank: int) -> float:
    """Return the most that seq1f1b keeps on a rank, in microbatches (the largest) of what units hold there: chunks
    differ in length.
    """
    stages, costs, workload = shape.even_stages(shape.ranks), shape.costs or PieceTimes(), shape.workload
    bound = BoundCosts(Program("seq1f1b", stages, ((),) * shape.ranks, workload), costs)
    order = _one_f_one_b(workload, shape.ranks, rank)
    held = {op.unit: held_by(bound, op) for op in order if op.kind == "F"}
    largest = max(
        sum(held[Unit(rank, number, chunk)] for chunk in range(len(chunks)))
        for number, chunks in enumerate(workload.microbatches)
    )
    if not largest:
        return 0.0
    return max(accumulate(held[op.unit] if op.kind == "F" else -held[op.unit] for op in order)) / largest
