"""WeiPipe: every rank runs whole microbatches, and the weights travel.

Junfeng Lin, Ziming Liu, Yang You, Jun Wang, Weihao Zhang, Rong Zhao, "WeiPipe: Weight Pipeline Parallelism for
Communication-Effective Long-Context Large Model Training", PPoPP 2025, doi 10.1145/3710848.3710869. Microbatch i runs
on rank i mod p, through all stages, so activations stay where they are; weights go round the ring of ranks, and
gradients of weights with them. A microbatch of long sequences has more activations than a stage has weights: a layer's
12 h^2 weights cross the network once for each use, where other pipelines send b s h activations. Any m will do; ranks
are equally busy where it is a multiple of p.

The layers are cut into p stages of L/p layers (uneven: they differ by one). The optimizer's state of a stage is on its
owner alone. Embedding and head are on every rank, and the head's backward follows its forward at once, so that logits
are never kept. How weights travel is derived (`lowering.borrowed`); a schedule is the order of the ops and no more.

Below, F, B = I + W are times of a stage, t that of a message with its weights. The last rank starts when the first
stage has come to it, after (p-1)t, and never waits again if messages keep up; its last gradients take one message more.

Published (`--no-weipipe-eager`), the ring works in turns. In each turn all ranks compute while the weights for the next
travel, and no rank begins a turn before all have ended the one before. Rank r is r turns behind rank 0, and a turn
takes as long as its slowest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, takewhile, zip_longest
from typing import Literal

from helixpipe.common.flags import option
from helixpipe.common.ranges import MOST_LAYERS
from helixpipe.lowering.lower import scheduled
from helixpipe.planning.catalogue import Shape
from helixpipe.planning.memory.early import peak_memory
from helixpipe.program.costs import Costs
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import RingOptions, ring_stages

DEFAULT_SLOTS = 3
"""The number of buffers in the paper."""


@dataclass(frozen=True)
class WeipipeOptions:
    """Options of the WeiPipe family."""

    weipipe_eager: bool = option(
        True,
        "WeiPipe: a rank runs on as soon as its weights have come; without, all ranks begin each turn together, as in "
        "the paper.",
    )
    weipipe_grad_dtype: Literal["fp32", "bf16"] = option(
        "fp32", "WeiPipe: what travelling gradients of weights are summed and sent in; bf16 halves their messages."
    )
    weipipe_slots: int | None = option(
        None,
        "WeiPipe: stages whose weights, and stages whose gradients, a rank has room for beside its own; the more, the "
        "less is sent, until the ranks of a ring less one send each weight once a step. By default what is fastest of "
        "3, 6, 12 ... that fit, where costs and a memory limit are known, and else 3.",
        at_least=1,
        at_most=MOST_LAYERS,
    )


def weipipe_naive(shape: Shape, options: WeipipeOptions) -> Program:
    """Forward of all stages, then backward of all, one microbatch after another (WeiPipe-Naive).

    Bubble pt; turn by turn (p-1)F + n(p-1)(B-F) where m = np and B is no shorter than F, since nearly every turn has a
    rank in its backward. A rank keeps one microbatch of all layers. A forward moves a stage's weights, a backward its
    weights and gradients.
    """

    def turns(p: int, own: Sequence[int]) -> Iterator[list[Op]]:
        for microbatch in own:
            # Step 1: p F
            yield from (_forward(p, [stage], microbatch) for stage in range(p))
            # Step 2: p B
            yield from (_backward("B", [stage], microbatch) for stage in reversed(range(p)))

    return _program("weipipe-naive", shape, options, turns)


def weipipe(shape: Shape, options: WeipipeOptions) -> Program:
    """WeiPipe-Interleave: each turn runs the backward of stage p-1-j of the older microbatch and the forward of stage j
    of the newer.

    Bubble pt; turn by turn 1F1B's, (p-1)(F+B), for any m > p. A rank keeps one microbatch of all layers: what the
    backward frees the forward takes. A turn moves the weights of two stages and the gradients of one at most, spread
    evenly over the time.
    """

    def turns(p: int, own: Sequence[int]) -> Iterator[list[Op]]:
        # Step 1: p F. Step 2, for each microbatch but the first: p times B F. Step 3: p B
        for older, newer in _neighbours(own):
            for j in range(p):
                backward = _backward("B", [p - 1 - j], older) if older is not None else []
                yield backward + (_forward(p, [j], newer) if newer is not None else [])

    return _program("weipipe", shape, options, turns)


def wzb1(shape: Shape, options: WeipipeOptions) -> Program:
    """Interleaved, with B split: turns of I and forward, W and forward, until the older microbatch is half way back;
    then of I and I, W and W (WZB1).

    Bubble pt; turn by turn 2(p-1)F where F = I = W, m is a multiple of p and p one of 4. A rank keeps one microbatch
    and a half of all layers. Every op moves the weights or the gradients of one stage at most.
    """

    def turns(p: int, own: Sequence[int]) -> Iterator[list[Op]]:
        for older, newer in _neighbours(own):
            half = p // 2 if older is not None and newer is not None else 0
            if newer is not None:
                # Step 1: p/2 times I F W F (an odd p: one F more); for the first microbatch p F
                for j in range(p):
                    both = older is not None and j < 2 * half
                    backward = _backward("IW"[j % 2], [p - 1 - j // 2], older) if older is not None and both else []
                    yield backward + _forward(p, [j], newer)
            if older is not None:
                # Step 2: p/4 times I I W W; for the last microbatch p/2 times
                rest = range(p - 1 - half, -1, -1)
                for at in range(0, len(rest), 2):
                    yield _backward("I", rest[at : at + 2], older)
                    yield _backward("W", rest[at : at + 2], older)

    return _program("wzb1", shape, options, turns)


def wzb2(shape: Shape, options: WeipipeOptions) -> Program:
    """Forward, I and W of all stages in sequence, one microbatch after another, W in the order of forward (WZB2).

    Bubble (p-1)t; turn by turn (p-1)F where F = I = W and m is a multiple of p. A rank keeps one microbatch of all
    layers. Gradients become complete stage by stage in the order in which the next step needs the weights. Stage c
    belongs to rank c (turn by turn to that of the others): when it ends its step, the stage's gradients are all
    there, if t is at most half a W. So where steps follow each other without a flush (`--enable-optimizer-post-
    validation`) there is no bubble but the first's.
    """

    def turns(p: int, own: Sequence[int]) -> Iterator[list[Op]]:
        for microbatch in own:
            # Step 1: p F
            yield from (_forward(p, [stage], microbatch) for stage in range(p))
            # Step 2: p I
            yield from (_backward("I", [stage], microbatch) for stage in reversed(range(p)))
            # Step 3: p W, first stage first
            yield from (_backward("W", [stage], microbatch) for stage in range(p))

    return _program("wzb2", shape, options, turns, direction=1 if options.weipipe_eager else -1)


def _forward(p: int, stages: Iterable[int], microbatch: int) -> list[Op]:
    """Return F of these stages of the ring, numbered from 0; with the first the embedding's, with the last all of the
    head.
    """
    ops: list[Op] = []
    for stage in stages:
        ops += [Op("F", 0, microbatch)] * (stage == 0)
        ops.append(Op("F", stage + 1, microbatch))
        ops += [Op(kind, p + 1, microbatch) for kind in "FB" if stage == p - 1]
    return ops


def _backward(kind: str, stages: Iterable[int], microbatch: int) -> list[Op]:
    """Return B, I or W of these stages of the ring; after the B or I of the first the embedding's B."""
    ops: list[Op] = []
    for stage in stages:
        ops.append(Op(kind, stage + 1, microbatch))
        ops += [Op("B", 0, microbatch)] * (stage == 0 and kind != "W")
    return ops


def _neighbours(own: Sequence[int]) -> Iterator[tuple[int | None, int | None]]:
    """Yield (None, first), (first, second), ... (last, None)."""
    return zip_longest((None, *own), own)


def _program(
    name: str,
    shape: Shape,
    options: WeipipeOptions,
    turns: Callable[[int, Sequence[int]], Iterator[list[Op]]],
    direction: int = -1,
) -> Program:
    """Build a WeiPipe program. turns: the ops in each turn of a rank that runs these microbatches, for p ranks.
    direction: of the stages' owners.
    """
    slots = options.weipipe_slots
    p = shape.ranks
    stages = shape.recompute.stages(ring_stages(shape.layer_kinds, p, direction))
    of_rank = [[ops for ops in turns(p, range(rank, shape.microbatches, p)) if ops] for rank in range(p)]
    ring = RingOptions(
        slots=DEFAULT_SLOTS if slots is None else slots,
        gradient_bytes=4 if options.weipipe_grad_dtype == "fp32" else 2,
    )
    ranks = tuple(tuple(chain.from_iterable(own)) for own in of_rank)
    together = () if options.weipipe_eager or p == 1 else tuple(_ends(of_rank))
    program = shape.in_chunks(Program(name, stages, ranks, shape.workload, ring=ring, turns=together))
    if slots is not None or shape.costs is None or shape.memory_limit is None:
        return program
    return _fastest_that_fits(program, shape.costs, shape.memory_limit)


def _ends(of_rank: Sequence[Sequence[list[Op]]]) -> Iterator[tuple[Op, ...]]:
    """Yield the last op of each rank in each turn of the ring. Rank r has its first turn when rank 0 has turn r."""
    for turn in range(max(rank + len(own) for rank, own in enumerate(of_rank) if own)):
        yield tuple(own[turn - rank][-1] for rank, own in enumerate(of_rank) if 0 <= turn - rank < len(own))


def _fastest_that_fits(program: Program, costs: Costs, limit: float) -> Program:
    """Return the fastest number of slots that fits: the default, twice that and so on up to p - 1. Of equally fast ones
    the least is taken; the default if none fits.
    """
    p = program.num_ranks
    counts = takewhile(lambda slots: slots < p - 1, (DEFAULT_SLOTS << doublings for doublings in count()))
    candidates = [replace(program, ring=replace(program.ring, slots=slots)) for slots in (*counts, p - 1) if slots]
    fitting = [each for each in candidates if max(peak_memory(each, costs)) <= limit]
    return min(fitting, key=lambda each: _makespan(each, costs), default=program)


def _makespan(program: Program, costs: Costs) -> float:
    return scheduled(program, costs).makespan
