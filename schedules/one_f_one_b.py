"""1F1B and its interleaved form: a backward as soon as there is one, so that few microbatches are alive."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

from helixpipe.common.errors import ScheduleError
from helixpipe.common.flags import option
from helixpipe.common.ranges import MOST_MICROBATCHES
from helixpipe.planning.catalogue import NoOptions, Shape
from helixpipe.planning.order.orders import groups_of_units, interleaved_one_f_one_b, require_multiple
from helixpipe.program.program import Op, Program


def one_f_one_b(shape: Shape, options: NoOptions) -> Program:
    """1F1B (Fan et al., DAPPLE, PPoPP 2021; Narayanan et al., PipeDream-flush, ICML 2021; Megatron-LM's default).

    Bubble (p-1)(F+B); rank r keeps at most min(p-r, m) microbatches. Any m works: the warm-up is clamped to m.
    """
    p, m = shape.ranks, shape.microbatches
    return Program("1f1b", shape.even_stages(p), one_f_one_b_order(p, m), shape.workload)


def one_f_one_b_order(p: int, m: int) -> tuple[tuple[Op, ...], ...]:
    """Return the ops of each of p ranks with one stage each."""
    ranks = []
    for rank in range(p):
        warmup = min(p - rank - 1, m)
        order: list[Op] = []
        # Step 1 (warm-up): (p-r-1) F
        order += [Op("F", rank, i) for i in range(warmup)]
        # Step 2 (steady): (m-warmup) F B
        for i in range(m - warmup):
            order += [Op("F", rank, warmup + i), Op("B", rank, i)]
        # Step 3 (cool-down): the rest of B
        order += [Op("B", rank, i) for i in range(m - warmup, m)]
        ranks.append(tuple(order))
    return tuple(ranks)


@dataclass(frozen=True)
class InterleavedOptions:
    """Options of interleaved-1f1b."""

    microbatch_group_size_per_virtual_pipeline_stage: int | None = option(
        None,
        "interleaved-1f1b: microbatches that a stage runs in turn; larger ones keep more, and take steps of other "
        "numbers of microbatches (default: the pipeline size).",
        at_least=1,
        at_most=MOST_MICROBATCHES,
    )


def interleaved(shape: Shape, options: InterleavedOptions) -> Program:
    """Interleaved 1F1B: v stages a rank, stage s on rank s mod p (Narayanan et al., SC 2021).

    Bubble (p-1)(F+B)/v; a rank runs the microbatches in groups of g = p, each group through its v stages in turn. With
    larger groups messages have more time, and what is left over, p or more, is a group of its own (Megatron-LM). Of
    chunks a group has as few whole microbatches as have p of them or more, see `seq1f1b_interleaved`.
    """
    p, m, g = shape.ranks, shape.microbatches, options.microbatch_group_size_per_virtual_pipeline_stage
    v = shape.virtual_stages if shape.virtual_stages is not None else 2
    counts = [len(chunks) for chunks in shape.workload.microbatches]
    if g is None and shape.most_chunks == 1:
        require_multiple("interleaved-1f1b", m, p, "the pipeline size")
    least = -(-p // min(counts))
    if g is not None and (g < least or 0 < m % g < least):
        size = f"the pipeline size {p}" if least == p else f"{least}, for the pipeline size {p} in chunks,"
        raise ScheduleError(
            f"--microbatch-group-size-per-virtual-pipeline-stage {g} must be at least {size}, and leave none or as "
            f"many of the {m} microbatches over."
        )
    ends = [*accumulate(counts, initial=0)]
    cuts = [] if g is None else [*ends[::g], *ends[-1:] * (m % g > 0)]
    groups = groups_of_units(counts, p) if g is None else [slice(*cut) for cut in pairwise(cuts)]
    ranks = interleaved_one_f_one_b(shape.workload, p, v, groups)
    return Program("interleaved-1f1b", shape.even_stages(p * v), ranks, shape.workload)
