"""GPipe and plain gradient accumulation."""

from __future__ import annotations

from helixpipe.common.errors import ScheduleError
from helixpipe.planning.catalogue import NoOptions, Shape
from helixpipe.program.program import Op, Program


def gpipe(shape: Shape, options: NoOptions) -> Program:
    """GPipe: all forwards, then all backwards (Huang et al., GPipe, NeurIPS 2019).

    Bubble (p-1)(F+B); every rank keeps the activations of all m microbatches.
    """
    stages = shape.even_stages(shape.ranks)
    ranks = []
    for rank in range(shape.ranks):
        # Step 1: mF
        forwards = [Op("F", rank, microbatch) for microbatch in range(shape.microbatches)]
        # Step 2: mB
        backwards = [Op("B", rank, microbatch) for microbatch in range(shape.microbatches)]
        ranks.append((*forwards, *backwards))
    return Program("gpipe", stages, tuple(ranks), shape.workload)


def no_pipeline(shape: Shape, options: NoOptions) -> Program:
    """Gradient accumulation on one rank: each microbatch forward and backward in turn. No bubble."""
    if shape.ranks != 1:
        raise ScheduleError(
            f"schedule none runs on one pipeline rank, not {shape.ranks}; "
            "set --pipeline-model-parallel-size 1 or choose another schedule."
        )
    order = [Op(kind, 0, microbatch) for microbatch in range(shape.microbatches) for kind in "FB"]
    return Program("none", shape.even_stages(1), (tuple(order),), shape.workload)
