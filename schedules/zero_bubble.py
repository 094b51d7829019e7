"""Zero bubble schedules: the backward is split into I and W, and W fills the time a rank would idle.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024; for stages in a V see `v_shape`. Their programs are for
equal F, I and W; these are found from what F, I, W and messages take: the best of a few dozen greedy list schedules,
1F1B's own order among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from math import ceil, floor

from helixpipe.common.flags import option
from helixpipe.common.ranges import MOST_MICROBATCHES
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.planning.catalogue import Shape
from helixpipe.planning.memory.fitting import Find, Fitting, Limits
from helixpipe.planning.order.orders import one_forward_one_backward
from helixpipe.planning.order.problem import Problem, problem
from helixpipe.planning.order.zero_bubble import Order, search
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import Stage


@dataclass(frozen=True)
class ZeroBubbleOptions:
    """Options of all zero bubble schedules; each field is a flag, of `helixpipe` and of training."""

    zb_max_inflight: int | None = option(
        None,
        "zb1p, zb2p, zbv, v-half, v-min, zb-interleaved, seq1f1b-zb: microbatches whose activations a rank may keep at "
        "once, until their weight gradients are computed (default: p, 2p for zb2p, p/2 + 1 for v-half, (p+4)/3 for "
        "v-min, (p-1)/k + 1 for seq1f1b-zb, interleaved-1f1b's for zb-interleaved).",
        at_least=1,
        at_most=MOST_MICROBATCHES,
    )
    zb_recompute: bool = option(
        True,
        "zb1p, zb2p, zbv, v-half, v-min, zb-interleaved, seq1f1b-zb: under a memory limit, unless "
        "--recompute-granularity says what, layers are recomputed where that is faster than fewer microbatches in "
        "flight.",
    )


def zb1p(shape: Shape, options: ZeroBubbleOptions) -> Program:
    """Zero bubble with 1F1B's memory: at most p microbatches on every rank (ZB-H1).

    Bubble (p-1)(F+I-W) when F, I and W are equal; never more than 1F1B's.
    """
    return one_stage_a_rank("zb1p", shape, options, in_flight(shape, shape.ranks))


def zb2p(shape: Shape, options: ZeroBubbleOptions) -> Program:
    """Zero bubble with twice 1F1B's memory: at most 2p microbatches on every rank (ZB-H2).

    When F, I and W are equal no rank idles between its first op and its last; what remains of a single step is the
    (p-1)F in which the first microbatch travels to the last rank.
    """
    return one_stage_a_rank("zb2p", shape, options, in_flight(shape, 2 * shape.ranks))


def zb_interleaved(shape: Shape, options: ZeroBubbleOptions) -> Program:
    """Zero bubble with v stages a rank, stage s on rank s mod p; at most what interleaved 1F1B keeps on its first rank.

    Never more bubble than interleaved 1F1B with as many stages. Where attention, which has no W, takes most of the
    time, gradients wait less than in a V: every rank has early and late stages alike.
    """
    p, workload = shape.ranks, shape.workload
    v = shape.virtual_stages if shape.virtual_stages is not None else 2
    stages = shape.even_stages(p * v)
    costs = shape.costs or PieceTimes()
    homes = tuple(s % p for s in range(p * v))
    given = problem("zb-interleaved", stages, homes, workload, 1, costs)
    limit = inflight_limit(options, 0) or _most_kept(given, _interleaved_order(given, 2))

    def find(stages: tuple[Stage, ...], limits: Limits) -> Program:
        given = problem("zb-interleaved", stages, homes, workload, limit, costs, limits)
        return Program(
            "zb-interleaved",
            stages,
            search(given, [partial(_interleaved_order, each=each) for each in (1, 2)]).ranks,
            workload,
        )

    return fitted(find, stages, shape, options)


def one_stage_a_rank(name: str, shape: Shape, options: ZeroBubbleOptions, default: float) -> Program:
    """Return the best program found for a stage a rank, of whole microbatches or of chunks.

    default: microbatches that a rank may keep unless the options say otherwise.
    """
    p, workload = shape.ranks, shape.workload
    limit, costs = inflight_limit(options, default), shape.costs or PieceTimes()

    def find(stages: tuple[Stage, ...], limits: Limits) -> Program:
        given = problem(name, stages, tuple(range(p)), workload, limit, costs, limits)
        best = search(given, [lambda given: one_f_one_b(given, limit)])
        return Program(name, stages, best.ranks, workload)

    return fitted(find, shape.even_stages(p), shape, options)


def fitted(find: Find, stages: tuple[Stage, ...], shape: Shape, options: ZeroBubbleOptions) -> Program:
    """Return the program that the search finds within the shape's memory limit."""
    recompute = shape.recompute
    fitting = Fitting(
        find, stages, shape.ranks, shape.costs or PieceTimes(), shape.memory_limit, recompute.recompute_early
    )
    return fitting.fastest() if options.zb_recompute and recompute.granularity is None else fitting.ordered()


def inflight_limit(options: ZeroBubbleOptions, default: float) -> float:
    """Return the number of microbatches a rank may keep."""
    return default if options.zb_max_inflight is None else options.zb_max_inflight


def in_flight(shape: Shape, whole: float) -> float:
    """Return the microbatches that a rank may keep where it may keep `whole` uncut ones: of k chunks each, as many
    chunks, and k - 1 for the first gradient, which comes after all of its microbatch's F. Longer ones count for more.
    """
    workload = shape.workload
    units = ceil(whole * (1 - 1e-9)) + workload.most_chunks - 1
    lengths = [workload.tokens(number) for number in range(len(workload))]
    tokens = list(chain.from_iterable(lengths))
    most = max(sum(tokens[start : start + units]) for start in range(max(1, len(tokens) - units + 1)))
    return max(1.0, most / max(map(sum, lengths))) if workload.most_chunks > 1 else whole


# ------------------------------------------------------------------------------------------------------- fixed orders


def one_f_one_b(given: Problem, limit: float) -> Order:
    """Return 1F1B of a pipeline in a line, each rank's stages one after the other; warm-ups fit into the limit, in
    microbatches.
    """
    own, chunks = given.own, given.workload.most_chunks
    fitting = floor(limit * chunks * (1 + 1e-9))
    ranks = []
    for rank, stages in enumerate(own):
        forwards = [[Op("F", stage, *unit) for stage in stages] for unit in given.forward_units]
        inputs = [[Op("I", stage, *unit) for stage in reversed(stages)] for unit in given.backward_units]
        warmup = min(len(own) - rank - 1 + chunks - 1, fitting - 1)
        ranks.append(tuple(chain.from_iterable(one_forward_one_backward(forwards, inputs, warmup))))
    return tuple(ranks)


def _interleaved_order(given: Problem, each: int) -> Order:
    """Return F and I of interleaved 1F1B. each: F of its warm-up for each rank downstream: 2 as published, or 1, as a
    gradient comes back sooner without W.

    Microbatches go through the stages of a rank in groups of p; of chunks, of the fewest microbatches that have p. The
    last group may be smaller.
    """
    workload, own = given.workload, given.own
    p, v = len(own), len(own[0])
    size = -(-p // min(map(len, workload.microbatches)))
    cuts = [*given.starts[:-1:size], given.starts[-1]]
    groups = [slice(*cut) for cut in pairwise(cuts)]
    largest = max(p, *(group.stop - group.start for group in groups))
    ranks = []
    for rank, stages in enumerate(own):
        forwards, backwards = (
            [Op(kind, stage, *unit) for group in groups for stage in order for unit in units[group]]
            for kind, order, units in (
                ("F", stages, given.forward_units),
                ("I", stages[::-1], given.backward_units),
            )
        )
        # Steps 1 to 3: p-r-1 or 2(p-r-1), (v-1)p and k-1 F; F I; the rest of I
        warmup = each * (p - rank - 1) + (v - 1) * largest + workload.most_chunks - 1
        ranks.append(tuple(one_forward_one_backward(forwards, backwards, warmup)))
    return tuple(ranks)


def fits(given: Problem, order: Order) -> bool:
    """Return whether every rank's memory holds what a fixed order of F and I keeps."""
    kept = (most + reserve for most, reserve in zip(_kept(given, order), given.reserve, strict=True))
    return all(most <= limit * (1 + 1e-9) for most, limit in zip(kept, given.limit, strict=True))


def _most_kept(given: Problem, order: Order) -> float:
    """Return the most that any rank keeps in a fixed order of F and I, in microbatches of all its stages."""
    units = [slice(*ends) for ends in pairwise(given.starts)]
    wholes = [max(sum(sum(given.held[stage][own]) for stage in stages) for own in units) for stages in given.own]
    return max(kept / whole if whole else 1.0 for kept, whole in zip(_kept(given, order), wholes, strict=True))


def _kept(given: Problem, order: Order) -> list[float]:
    """Return the most that units keep on each rank in a fixed order of F and I."""
    return [
        max(accumulate(given.held[op.stage][given.place(*op[2:])] * (1 if op.kind == "F" else -1) for op in ops))
        for ops in order
    ]
