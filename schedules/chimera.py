"""Chimera: two pipelines in opposite directions over the same ranks, each of which holds two stages."""

from __future__ import annotations

from dataclasses import replace

from helixpipe.common.errors import ScheduleError
from helixpipe.planning.catalogue import NoOptions, Shape
from helixpipe.planning.order.orders import near_multiples, require_multiple, wave_order
from helixpipe.program.program import Program


def chimera(shape: Shape, options: NoOptions) -> Program:
    """Even microbatches go down the ranks, odd ones up (Li and Hoefler, "Chimera", SC'21).

    Stages r and p-1-r are on rank r, so every stage is on two ranks: twice the weights, and a sum of gradients once a
    step. For m >= p the bubble is (p-2)max(F,B). That is the paper's ratio (p-2)/(2m+p-2) where F = B, and its
    (p-2)/(3m/2+p-2) where B = 2F and m = p. The paper concatenates groups of p microbatches, which adds (p-2)|B-F| for
    each further group, unless it doubles forwards or halves backwards; here the order of the first group goes on
    instead of starting anew, which adds nothing. For m < p the bubble is more, and at most 1F1B's. A rank keeps at most
    p microbatches; p/2 + 1 + min(r, p-1-r) where m = p. Needs an even p and an even m.
    """
    p, m = shape.ranks, shape.microbatches
    if p % 2:
        raise ScheduleError(
            f"chimera needs an even --pipeline-model-parallel-size, not {p}; "
            f"the nearest valid values are {near_multiples(p, 2)}."
        )
    require_multiple("chimera", m, 2, "its pipelines,")
    stages = tuple(replace(stage, placement="replicated") for stage in shape.even_stages(p))
    ranks = []
    for rank in range(p):
        # Down: F and B of stage r, of the even microbatches in every other slot
        down = [rank], range(0, m, 2)
        # Up: the same of stage p-1-r, of the odd ones in the slots between
        up = [p - 1 - rank], range(1, m, 2)
        ranks.append(wave_order(p, shape.workload, [down, up], lambda unit: 2 * unit))
    return Program("chimera", stages, tuple(ranks), shape.workload)
