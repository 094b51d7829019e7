"""Hanayo: waves. Stages lie on the ranks back and forth, so that a microbatch turns around instead of starting over."""

from __future__ import annotations

from helixpipe.common.errors import ScheduleError
from helixpipe.planning.catalogue import NoOptions, Shape
from helixpipe.planning.order.orders import near_multiples, wave_order
from helixpipe.program.program import Program


def hanayo(shape: Shape, options: NoOptions) -> Program:
    """v/2 waves: stages on ranks 0 … p-1, p-1 … 0, and again for each further wave (Liu et al., "Hanayo", SC'23).

    Groups of p microbatches fill the slots of a rank as Chimera's two pipelines do, with one copy of the weights. Where
    m is a multiple of p the bubble is 2(p-1)max(F,B)/v, for F and B of all v stages of a rank. No order of stages so
    placed has less than (p-1)(F+B)/v, which is the same where F = B and 3/4 of it where B = 2F. Any m works, and the
    bubble is at most 1F1B's; with one wave (v = 2) it is the same for every m >= p, with more waves larger where the
    last group is not full. Rank r keeps at most min(p, m) microbatches; p - (p-1-r)/v where m = p.
    """
    p, m = shape.ranks, shape.microbatches
    v = shape.virtual_stages if shape.virtual_stages is not None else 2
    if v % 2:
        raise ScheduleError(
            f"hanayo needs an even --num-virtual-stages-per-pipeline-rank, two for each wave, not {v}; "
            f"the nearest valid values are {near_multiples(v, 2)}."
        )

    def turn(unit: int) -> int:
        """A group's p units take every other slot; the next group follows when each of its v stages a rank has had p"""
        return p * v * (unit // p) + 2 * (unit % p)

    ranks = []
    for rank in range(p):
        # Each wave comes by twice: on its way up the ranks and on its way back
        own = [2 * p * wave + place for wave in range(v // 2) for place in (rank, 2 * p - 1 - rank)]
        ranks.append(wave_order(p * v, shape.workload, [(own, range(m))], turn))
    return Program("hanayo", shape.even_stages(p * v), tuple(ranks), shape.workload)
