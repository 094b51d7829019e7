"""Zero bubble schedules with two stages a rank in a V, s and 2p-1-s on one rank, within several limits of memory.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024 (ZB-V), and "Pipeline Parallelism with Controllable Memory",
NeurIPS 2024 (V-Min, V-Half): a building block, the F, I and W of one microbatch on all ranks, is repeated for each
microbatch as soon as a rank has run its six ops. How long the block's activations wait says how many microbatches are
kept. Their programs are for equal F, I and W; these are found from what F, I, W and messages take, as `zb1p` is, the
published orders among those that are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.planning.catalogue import Shape
from helixpipe.planning.memory.fitting import Limits
from helixpipe.planning.order.list_scheduling import ListSchedule, Rules, greedy
from helixpipe.planning.order.problem import Problem, problem
from helixpipe.planning.order.zero_bubble import Order, Orders, search
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import Stage
from schedules.zero_bubble import ZeroBubbleOptions, fits, fitted, in_flight, inflight_limit, one_f_one_b

PERIOD = 6
"""Slots from one unit to the next on a rank: F, I and W of its two stages."""

STEPS = ((1, 1), (1, 2))
"""Slots from a rank to the next, down the ranks and back up: of V-Min and of V-Half."""

AHEAD = (2, 3)
"""Ops of a published order that a rank chooses from: while it would wait for one, the next may find room."""


def zbv(shape: Shape, options: ZeroBubbleOptions) -> Program:
    """Zero bubble with two stages a rank in a V: s and 2p-1-s on one rank; 1F1B's memory, on every rank alike (ZB-V).

    When F, I and W are equal no rank idles between its first op and its last; what remains of a single step is
    (p-1)F/2. A microbatch takes twice as many messages as in 1F1B; where those are so slow that 1F1B would be faster,
    the stages lie in a line instead (2r and 2r+1 on rank r); but never where each step has microbatches of its own.
    """
    p, workload = shape.ranks, shape.workload
    limit = inflight_limit(options, in_flight(shape, p))
    costs = shape.costs or PieceTimes()
    in_line = tuple(s // 2 for s in range(2 * p))

    def find(stages: tuple[Stage, ...], limits: Limits) -> Program:
        best = _in_a_v("zbv", stages, shape, limit, limits)
        if shape.ragged is not None:  # steps are unlike each other, and none may decide where weights are
            return Program("zbv", stages, best.ranks, workload)
        line = problem("zbv", stages, in_line, workload, limit, costs, limits)
        straight = greedy(line, Rules(order=one_f_one_b(line, limit), deferred=(0.0,) * p))
        if straight is not None and straight.rating[0] < best.rating[0]:
            best = min(straight, search(line, [lambda given: one_f_one_b(given, limit)]), key=lambda one: one.rating)
        return Program("zbv", stages, best.ranks, workload)

    return fitted(find, shape.even_stages(2 * p), shape, options)


def v_half(shape: Shape, options: ZeroBubbleOptions) -> Program:
    """zbv's V with half of its memory: p/2 + 1 microbatches on every rank (V-Half)."""
    return _limited("v-half", shape, options, shape.ranks / 2 + 1)


def v_min(shape: Shape, options: ZeroBubbleOptions) -> Program:
    """zbv's V with a third of its memory: (p+4)/3 microbatches on every rank (V-Min)."""
    return _limited("v-min", shape, options, (shape.ranks + 4) / 3)


def _limited(name: str, shape: Shape, options: ZeroBubbleOptions, default: float) -> Program:
    """Return the best program found in a V. default: microbatches that a rank may keep unless the options say."""
    limit = inflight_limit(options, in_flight(shape, min(default, shape.ranks)))

    def find(stages: tuple[Stage, ...], limits: Limits) -> Program:
        return Program(name, stages, _in_a_v(name, stages, shape, limit, limits).ranks, shape.workload)

    return fitted(find, shape.even_stages(2 * shape.ranks), shape, options)


def _in_a_v(name: str, stages: tuple[Stage, ...], shape: Shape, limit: float, limits: Limits) -> ListSchedule:
    homes = (*range(shape.ranks), *reversed(range(shape.ranks)))
    given = problem(name, stages, homes, shape.workload, limit, shape.costs or PieceTimes(), limits)
    return search(given, _v_orders(given), AHEAD)


# ------------------------------------------------------------------------------------------------------- fixed orders


def _v_orders(given: Problem) -> Orders:
    """Return ZB-V as published where the memory holds what it keeps, else the building blocks that it holds."""
    if fits(given, _zb_v(given)):
        return [_zb_v]
    blocks = {_repeated(given, block): block for block in _blocks(len(given.own))}
    return [partial(_repeated, block=block) for order, block in blocks.items() if fits(given, order)]


def _zb_v(given: Problem) -> Order:
    """Return F and I of ZB-V. a is the stage on the way down, b the one on the way back."""
    p, more, count = len(given.own), given.workload.most_chunks - 1, len(given.forward_units)
    ranks = []
    for rank, (a, b) in enumerate(given.own):
        left = {
            (kind, stage): iter([Op(kind, stage, *unit) for unit in units])
            for kind, units in (("F", given.forward_units), ("I", given.backward_units))
            for stage in (a, b)
        }
        order: list[Op] = []

        def add(
            count: int,
            *steps: tuple[str, int],
            left: dict[tuple[str, int], Iterator[Op]] = left,
            order: list[Op] = order,
        ) -> None:
            for _ in range(count):
                order.extend(op for step in steps if (op := next(left[step], None)) is not None)

        # Step 1 (down): 2(p-r)-1 Fa
        add(2 * (p - rank) - 1, ("F", a))
        # Step 2 (the first come back, of all the first microbatch's chunks): r+k-1 Fb Fa
        add(rank + more, ("F", b), ("F", a))
        # Step 3 (the first gradients): (p-r) Fb Ib
        add(p - rank, ("F", b), ("I", b))
        # Step 4 (steady): Fa Ia Fb Ib until there are no more F
        add(count - min(p, count), ("F", a), ("I", a), ("F", b), ("I", b))
        # Step 5 (cool-down): the rest of I
        add(count, ("I", a), ("I", b))
        ranks.append(tuple(order))
    return tuple(ranks)


def _blocks(p: int) -> Iterator[list[tuple[int, int, int, int]]]:
    """Yield building blocks: for each rank the slots of F of its first stage and of its second, of I of the second and
    of the first, no two of which meet when the block is repeated. Blocks of one kind differ in how long a unit waits
    where it turns."""
    for (down, up), turns in product(STEPS, product(range(1, PERIOD + 1), repeat=3)):
        block = []
        for rank in range(p):
            forth, back = rank * down, (p - 1 - rank) * up
            second = (p - 1) * down + turns[0]
            inputs = second + (p - 1) * up + turns[1]
            last = inputs + (p - 1) * down + turns[2]
            block.append((forth, second + back, inputs + forth, last + back))
        if all(len({slot % PERIOD for slot in slots}) == 4 for slots in block):
            yield block


def _repeated(given: Problem, block: list[tuple[int, int, int, int]]) -> Order:
    """Return F and I of a block for every unit; with chunks each I is as many units later as wait for the first."""
    later = PERIOD * (given.workload.most_chunks - 1)
    ranks = []
    for (a, b), (down, up, back, last) in zip(given.own, block, strict=True):
        placed = (
            *((Op("F", a, *unit), down, number) for number, unit in enumerate(given.forward_units)),
            *((Op("F", b, *unit), up, number) for number, unit in enumerate(given.forward_units)),
            *((Op("I", b, *unit), back + later, number) for number, unit in enumerate(given.backward_units)),
            *((Op("I", a, *unit), last + later, number) for number, unit in enumerate(given.backward_units)),
        )
        ranks.append(tuple(op for op, _, _ in sorted(placed, key=lambda each: each[1] + PERIOD * each[2])))
    return tuple(ranks)
