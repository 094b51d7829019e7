"""Zero bubble schedules: the backward is split into I and W, and W fills the time a rank would idle.

Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024; the V-shaped placement is their ZB-V. Their programs are for
equal F, I and W; these are found from what F, I, W and messages take: the best of a few dozen greedy list schedules,
1F1B's own order among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, chain, permutations, product
from math import ceil, floor, inf

from helixpipe.common.errors import ScheduleError
from helixpipe.common.flags import option
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.graph import collector_paused
from helixpipe.planning.catalogue import Shape
from helixpipe.planning.list_scheduling import Found, Problem, Rules, greedy, problem
from helixpipe.planning.orders import one_forward_one_backward
from helixpipe.program.program import Op, Program

Orders = Callable[[Problem], list[tuple[tuple[Op, ...], ...]]]
"""Fixed orders of F and I on every rank that are worth a try."""

Maker = Callable[[Problem], Rules]
"""Rules for a problem; a fixed order depends on the number of microbatches."""

FINALISTS = 4
"""Rules that are refined, and of which the best is chosen at full size."""

BUDGET = 1_000_000
"""Ops that are scheduled to compare rules: some seconds. Only pipelines of more than 16 ranks come to the end of it."""


@dataclass(frozen=True)
class ZeroBubbleOptions:
    """Options of zb1p, zb2p, zbv, zb-interleaved, seq1f1b-zb; each field is a flag, of `helixpipe` and of training."""

    zb_max_inflight: int | None = option(
        None,
        "zb1p, zb2p, zbv, zb-interleaved, seq1f1b-zb: microbatches whose activations a rank may keep at once, until "
        "their weight gradients are computed (default: p, 2p for zb2p, (p-1)/k + 1 for seq1f1b-zb, interleaved-1f1b's "
        "for zb-interleaved).",
    )


def zb1p(shape: Shape, options: ZeroBubbleOptions) -> Program:
    """Zero bubble with 1F1B's memory: at most p microbatches on every rank (ZB-H1).

    Bubble (p-1)(F+I-W) when F, I and W are equal; never more than 1F1B's.
    """
    return one_stage_a_rank("zb1p", shape, options, shape.ranks)


def zb2p(shape: Shape, options: ZeroBubbleOptions) -> Program:
    """Zero bubble with twice 1F1B's memory: at most 2p microbatches on every rank (ZB-H2).

    When F, I and W are equal no rank idles between its first op and its last; what remains of a single step is the
    (p-1)F in which the first microbatch travels to the last rank.
    """
    return one_stage_a_rank("zb2p", shape, options, 2 * shape.ranks)


def zbv(shape: Shape, options: ZeroBubbleOptions) -> Program:
    """Zero bubble with two stages a rank in a V: s and 2p-1-s on one rank; 1F1B's memory, on every rank alike (ZB-V).

    When F, I and W are equal no rank idles between its first op and its last; what remains of a single step is
    (p-1)F/2. A microbatch takes twice as many messages as in 1F1B; where those are so slow that 1F1B would be faster,
    the stages lie in a line instead (2r and 2r+1 on rank r).
    """
    p, m = shape.ranks, shape.microbatches
    limit = inflight_limit(options, p)
    costs = shape.costs or PieceTimes()
    stages = shape.even_stages(2 * p)
    v = problem("zbv", stages, (*range(p), *reversed(range(p))), m, limit, costs, memory_limit=shape.memory_limit)
    line = problem("zbv", stages, tuple(s // 2 for s in range(2 * p)), m, limit, costs, memory_limit=shape.memory_limit)
    with collector_paused():
        found = _search(v, _v_orders)
        straight = greedy(line, Rules(order=_one_f_one_b(line, limit), deferred=(0.0,) * p))
        if straight is not None and straight.rating[0] < found.rating[0]:
            found = min(straight, _search(line, lambda given: [_one_f_one_b(given, limit)]), key=lambda one: one.rating)
    return Program("zbv", stages, found.ranks, m)


def zb_interleaved(shape: Shape, options: ZeroBubbleOptions) -> Program:
    """Zero bubble with v stages a rank, stage s on rank s mod p; at most what interleaved 1F1B keeps on its first rank.

    Never more bubble than interleaved 1F1B with as many stages. Where attention, which has no W, takes most of the
    time, gradients wait less than in a V: every rank has early and late stages alike.
    """
    p, m = shape.ranks, shape.microbatches
    v = shape.virtual_stages if shape.virtual_stages is not None else 2
    stages = shape.even_stages(p * v)
    costs = shape.costs or PieceTimes()
    homes = tuple(s % p for s in range(p * v))
    given = problem("zb-interleaved", stages, homes, m, 1, costs)
    limit = inflight_limit(options, 0) or _most_kept(given, _interleaved_orders(given)[-1])
    given = problem("zb-interleaved", stages, homes, m, limit, costs, memory_limit=shape.memory_limit)
    with collector_paused():
        found = _search(given, _interleaved_orders)
    return Program("zb-interleaved", stages, found.ranks, m)


def one_stage_a_rank(name: str, shape: Shape, options: ZeroBubbleOptions, default: float) -> Program:
    """The best program found for a stage a rank, of whole microbatches or of chunks.

    default: microbatches that a rank may keep unless the options say otherwise.
    """
    p, m, k = shape.ranks, shape.microbatches, shape.chunks
    limit = inflight_limit(options, default)
    stages, costs = shape.even_stages(p), shape.costs or PieceTimes()
    given = problem(name, stages, tuple(range(p)), m, limit, costs, k, shape.chunk_lengths, shape.memory_limit)
    with collector_paused():
        found = _search(given, lambda given: [_one_f_one_b(given, limit)])
    return Program(name, stages, found.ranks, m, k, shape.chunk_lengths)


def inflight_limit(options: ZeroBubbleOptions, default: float) -> float:
    """Microbatches a rank may keep. Raises ScheduleError for a number of the options that is below 1."""
    limit = options.zb_max_inflight
    if limit is not None and limit < 1:
        raise ScheduleError(f"--zb-max-inflight must be at least 1, not {limit}.")
    return default if limit is None else limit


# ------------------------------------------------------------------------------------------------------------- search


def _search(given: Problem, orders: Orders) -> Found:
    """The best schedule by makespan, then time between a rank's first op and its last, then memory.

    Rules are compared on a few microbatches (three units a rank, but three microbatches at least), for what repeats
    need not be scheduled again and again; the best few, and each of `orders` with W right after I, and after one more I
    a rank, on all. The search ends early where nothing can be better.
    """
    ranks = len(given.own)
    few = replace(given, microbatches=min(given.microbatches, max(3, ceil(3 * ranks / given.chunks))))
    bounds = given.lower_bounds(), few.lower_bounds()
    rated: list[tuple[tuple[float, float, float], int, Maker]] = []

    def rate(makers: Iterable[Maker]) -> Found | None:
        """Add the rules to `rated`; returns a schedule of the whole problem if it cannot be bettered."""
        for make in makers:
            if len(rated) * 3 * len(few.forward_units) * len(few.homes) > BUDGET:
                break
            found = greedy(few, make(few))
            if found is None:
                continue
            rated.append((found.rating, len(rated), make))
            if found.reaches(bounds[1]):
                whole = found if few == given else greedy(given, make(given))
                if whole is not None and whole.reaches(bounds[0]):
                    return whole
        rated.sort(key=lambda entry: entry[:2])
        return None

    perfect = rate(_coarse(given, orders)) or rate(_refined(given, [make for _, _, make in rated[:FINALISTS]]))
    if perfect is not None:
        return perfect
    finalists = [make(given) for _, _, make in rated[:FINALISTS]]
    kept = (0.0,) * ranks, tuple(map(float, range(ranks)))
    fixed = [Rules(order=order, deferred=deferred) for order in orders(given) for deferred in kept]
    return _best(given, [*finalists, *fixed, Rules(_kinds(given))])  # the last always finds a schedule


def _best(given: Problem, rules: Iterable[Rules]) -> Found:
    found = [one for one in (greedy(given, each) for each in rules) if one is not None]
    return min(found, key=lambda one: one.rating)


def _coarse(given: Problem, orders: Orders) -> Iterator[Maker]:
    """Every order of preference and every fixed order, each with a few ways to place W."""
    for index in range(len(orders(given))):
        for deferred, patience in product((None, 1.0, 0.0), (inf, 0.5, 0.0)):
            yield _ordered(orders, index, deferred, patience)
    kinds = _kinds(given)
    fills = list(product((True, False), (inf, 0.5)))
    for order in _preferences(kinds):
        for make_room, patience in fills:
            yield _same(Rules(order, make_room=make_room, patience=patience))
    for order in _preferences(kinds):
        for make_room, patience in fills:
            if order[0] == kinds[0]:  # a turn may begin anywhere
                yield _same(Rules(order, in_turn=True, make_room=make_room, patience=patience))


def _kinds(given: Problem) -> tuple[tuple[str, int], ...]:
    """F and I of the stages of a rank, the later stage first."""
    return tuple((kind, place) for place in reversed(range(max(map(len, given.own)))) for kind in "FI")


def _preferences(kinds: tuple[tuple[str, int], ...]) -> Iterator[tuple[tuple[str, int], ...]]:
    """All orders for one or two stages a rank; for more, F and I each from the first stage or the last, one kind before
    the other or in turn."""
    if len(kinds) <= 4:
        yield from permutations(kinds)
        return
    forward, inputs = kinds[::2], kinds[1::2]
    for first, second in product((forward, forward[::-1]), (inputs, inputs[::-1])):
        yield first + second
        yield second + first
        yield tuple(kind for pair in zip(first, second, strict=True) for kind in pair)


def _same(rules: Rules) -> Maker:
    return lambda given: rules


def _ordered(orders: Orders, index: int, deferred: float | None, patience: float) -> Maker:
    def make(given: Problem) -> Rules:
        pending = None if deferred is None else (deferred,) * len(given.own)
        return Rules(order=orders(given)[index], deferred=pending, patience=patience)

    return make


def _refined(given: Problem, makers: list[Maker]) -> Iterator[Maker]:
    """Each with shorter warm-ups, and with fewer W kept waiting."""
    p, v = len(given.own), max(map(len, given.own))
    ranks = range(p)
    more = v * (given.chunks - 1)  # a microbatch's first I comes after all its F
    warmups = [
        tuple(float(v * (p - r) + more) for r in ranks),
        tuple(float(2 * v * (p - r) - 1 + more) for r in ranks),
        tuple(float(2 * p - r + more) for r in ranks),
        (2.0 * p - 2 + more,) * p,
    ]
    kept = [tuple(float(v * r) for r in ranks), (1.0,) * p, (0.0,) * p]
    for make in makers:
        rules = make(given)
        for deferred, warmup in product((None, *kept), (None, *warmups)):
            if (rules.order and warmup is not None) or rules.deferred is not None:
                continue
            yield _changed(make, deferred, warmup)


def _changed(make: Maker, deferred: tuple[float, ...] | None, warmup: tuple[float, ...] | None) -> Maker:
    return lambda given: replace(make(given), deferred=deferred, warmup=warmup)


# ------------------------------------------------------------------------------------------------------- fixed orders


def _one_f_one_b(given: Problem, limit: float) -> tuple[tuple[Op, ...], ...]:
    """1F1B of a pipeline in a line, each rank's stages one after the other; warm-ups fit into the limit, in
    microbatches."""
    own, chunks = given.own, given.chunks
    fitting = floor(limit * chunks * (1 + 1e-9))
    ranks = []
    for rank, stages in enumerate(own):
        forwards = [[Op("F", stage, *unit) for stage in stages] for unit in given.forward_units]
        inputs = [[Op("I", stage, *unit) for stage in reversed(stages)] for unit in given.backward_units]
        warmup = min(len(own) - rank - 1 + chunks - 1, fitting - 1)
        ranks.append(tuple(chain.from_iterable(one_forward_one_backward(forwards, inputs, warmup))))
    return tuple(ranks)


def _v_orders(given: Problem) -> list[tuple[tuple[Op, ...], ...]]:
    """F and I of ZB-V as published, for equal costs. a is the stage on the way down, b the one on the way back."""
    m, own = given.microbatches, given.own
    p = len(own)
    ranks = []
    for rank, (a, b) in enumerate(own):
        left = {(kind, stage): iter([Op(kind, stage, i) for i in range(m)]) for kind in "FI" for stage in (a, b)}
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
        # Step 2 (the first come back): r Fb Fa
        add(rank, ("F", b), ("F", a))
        # Step 3 (the first gradients): (p-r) Fb Ib
        add(p - rank, ("F", b), ("I", b))
        # Step 4 (steady): Fa Ia Fb Ib until there are no more F
        add(m - min(p, m), ("F", a), ("I", a), ("F", b), ("I", b))
        # Step 5 (cool-down): the rest of I
        add(m, ("I", a), ("I", b))
        ranks.append(tuple(order))
    return [tuple(ranks)]


def _interleaved_orders(given: Problem) -> list[tuple[tuple[Op, ...], ...]]:
    """F and I of interleaved 1F1B with shorter warm-ups, as a gradient comes back sooner without W; and as it is.

    Microbatches go in groups of p through the stages of a rank; the last group may be smaller.
    """
    m, own = given.microbatches, given.own
    p, v = len(own), len(own[0])
    groups = [range(start, min(start + p, m)) for start in range(0, m, p)]
    found = []
    for each in (1, 2):
        ranks = []
        for rank, stages in enumerate(own):
            forward = [Op("F", stage, i) for group in groups for stage in stages for i in group]
            inputs = [Op("I", stage, i) for group in groups for stage in reversed(stages) for i in group]
            warmup = min(each * (p - rank - 1) + (v - 1) * p, m * v)
            # Step 1 (warm-up): (p-r-1) + (v-1)p F, or 2(p-r-1) + (v-1)p
            order = forward[:warmup]
            # Step 2 (steady): F I
            order += [op for pair in zip(forward[warmup:], inputs, strict=False) for op in pair]
            # Step 3 (cool-down): the rest of I
            order += inputs[m * v - warmup :]
            ranks.append(tuple(order))
        found.append(tuple(ranks))
    return found


def _most_kept(given: Problem, order: tuple[tuple[Op, ...], ...]) -> float:
    """The most that any rank keeps in a fixed order of F and I, in microbatches of all its stages."""
    most = 0.0
    for stages, ops in zip(given.own, order, strict=True):
        kept = list(accumulate(given.held[op.stage][op.chunk] * (1 if op.kind == "F" else -1) for op in ops))
        whole = sum(given.held[stage][0] for stage in stages)
        most = max(most, max(kept) / whole if whole else 1.0)
    return most
