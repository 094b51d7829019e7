"""AdaPipe: 1F1B with uneven stages that each recompute what the memory of their rank asks for.

Sun et al., "AdaPipe: Optimizing Pipeline Parallelism with Adaptive Recomputation and Partitioning", ASPLOS 2024. The
first ranks of 1F1B keep the most microbatches and so recompute the most; they get fewer layers in return.
"""

from __future__ import annotations

from helixpipe.common.collector import collector_paused
from helixpipe.common.errors import ScheduleError
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.planning.catalogue import NoOptions, Shape
from helixpipe.planning.order.adapipe import LayoutSearch
from helixpipe.program.program import Program
from schedules.one_f_one_b import one_f_one_b_order


def adapipe(shape: Shape, options: NoOptions) -> Program:
    """1F1B whose stages have as many whole layers, and recompute as much, as makes the step shortest (AdaPipe).

    Each layer recomputes nothing, its MLP, core attention, all but that, or all. Rank r keeps min(p-r, m) microbatches
    within `Shape.memory_limit`. Bubble: at most that of 1F1B with even stages, where those fit. Raises ScheduleError
    for fewer layers than ranks, when nothing fits (with what is needed), and when told what to recompute.
    """
    p = shape.ranks
    if shape.recompute.granularity is not None:
        flag = "activations" if shape.recompute.recompute_activations else "granularity"
        raise ScheduleError(
            f"adapipe chooses itself what each stage recomputes, by --memory-limit or the GPU's memory: leave "
            f"--recompute-{flag} out."
        )
    if shape.layers < p:
        raise ScheduleError(
            f"--num-layers {shape.layers} is too few for adapipe on {p} pipeline ranks, which each have at least one "
            f"whole layer; valid are {p} and more."
        )
    with collector_paused():
        return LayoutSearch(
            "adapipe", shape, shape.costs or PieceTimes(), one_f_one_b_order(p, shape.microbatches)
        ).best()
