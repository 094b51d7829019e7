"""SPPO: one very long sequence in many chunks through the pipeline, all of them forward and then all back.

Qiaoling Chen et al., "SPPO: Efficient Long-sequence LLM Training via Adaptive Sequence Pipeline Parallel Offloading"
(arXiv 2503.10377). Between the forward of a chunk and its backward lies the rest of the microbatch, which is the time
in which its activations can leave the device and come back; the order is made for that. Chunks take equally long, so
earlier ones are longer (`--pipe-sp-strategy uniform_comp`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from helixpipe.common.errors import ScheduleError
from helixpipe.common.flags import option
from helixpipe.common.ranges import MOST_CHUNKS
from helixpipe.planning.catalogue import Shape
from helixpipe.planning.order.multiplexed import multiplexed
from helixpipe.planning.order.orders import backward_units, forward_units
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import Stage


@dataclass(frozen=True)
class SppoOptions:
    """Options of sppo; each field is a flag, of `helixpipe` and of training."""

    sppo_ahead: int = option(
        4,
        "sppo: chunks of the next microbatches, for each rank downstream, that run forward before the backwards of "
        "this one: 0 keeps one microbatch's activations and idles between microbatches.",
        at_least=0,
        at_most=MOST_CHUNKS,
    )
    sppo_multiplex: Literal["off", "left", "both"] = option(
        "off",
        "sppo: with one microbatch a step, ranks that have nothing to do yet (left), or nothing any more (both), run "
        "parts of others' first chunks, of their last too.",
    )


def sppo(shape: Shape, options: SppoOptions) -> Program:
    """Rounds of a microbatch: its chunks forward, then its chunks backward in reverse (Chen et al., SPPO, 2025).

    Bubble (p-1)(F+B)/k with chunks of equal time, once a step and not once a microbatch: rank r runs a(p-r-1) chunks of
    what comes next ahead of the backwards, one for the way down to the last rank and B/F, 2 to 3, for the way back.
    It keeps at most min(1 + a(p-r-1)/k, m) microbatches.

    The head (final norm, output layer, loss) is a stage of its own on the last rank, which runs a chunk's forward right
    before its backward: of logits and their probabilities there is one chunk at a time, and the hidden states that wait
    for it are what the chunk's backward would have kept as the head's input anyway. A head that predicts further tokens
    attends to those before, and is of the last rank's stage.
    """
    p, workload, ahead = shape.ranks, shape.workload, options.sppo_ahead
    apart = shape.head_kind == "head"
    stages = _stages(shape) if apart else shape.even_stages(p)
    head = len(stages) - 1
    if options.sppo_multiplex != "off" and p > 1:
        if not apart:
            raise ScheduleError(
                f"--sppo-multiplex {options.sppo_multiplex} runs each chunk's head, forward and backward, by itself, "
                "which one that predicts further tokens (--mtp-num-layers) cannot: give off."
            )
        return multiplexed("sppo", shape, left=True, right=options.sppo_multiplex == "both")
    forwards, backwards = forward_units(workload), backward_units(workload)
    ranks = []
    for rank in range(p):
        more = ahead * (p - rank - 1)
        order: list[Op] = []
        done = end = 0
        for chunks in workload.microbatches:
            start, end = end, end + len(chunks)
            # Step 1: k F, and a(p-r-1) F of what comes next, less those that ran in the round before
            with_head, with_layers = rank == p - 1 and apart, rank < head or not apart
            if with_layers:
                order += [Op("F", rank, *unit) for unit in forwards[done : end + more]]
            done = end + more
            # Step 2: k B, on the last rank each after F and B of the head
            for unit in backwards[start:end]:
                if with_head:
                    order += [Op("F", head, *unit), Op("B", head, *unit)]
                if with_layers:
                    order.append(Op("B", rank, *unit))
        ranks.append(tuple(order))
    return Program("sppo", stages, tuple(ranks), workload)


def _stages(shape: Shape) -> tuple[Stage, ...]:
    """Return a stage for each rank and the head, which may be all that the last rank has."""
    *first, last = shape.even_stages(shape.ranks)
    if len(last.pieces) == 1:
        return shape.recompute.stages((*first, last))
    layers, head = replace(last, pieces=last.pieces[:-1]), replace(last, pieces=last.pieces[-1:])
    return shape.recompute.stages((*first, layers, head))
