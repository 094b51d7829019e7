"""The search for zero bubble schedules: a few dozen greedy list schedules, and fixed orders, are compared.

What is found keeps to the memory of its ranks as far as can be told here: the list schedules count what units keep and
leave an estimate of the room for all else. What a program really needs the memory sweep says, see `fitting`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations, product
from math import inf

from helixpipe.planning.order.list_scheduling import MARGIN, ListSchedule, Rules, best_of, greedy
from helixpipe.planning.order.problem import Problem
from helixpipe.program.program import Op

Order = tuple[tuple[Op, ...], ...]
"""F and I of every rank in a fixed order."""

Orders = Sequence[Callable[[Problem], Order]]
"""Fixed orders to simulate, for any number of first microbatches."""

Maker = Callable[[Problem], Rules]
"""Rules for a problem; a fixed order depends on the number of microbatches."""

FINALISTS = 4
"""Rules that are refined, and of which the best is chosen at full size."""

BUDGET = 1_000_000
"""Ops that are scheduled to compare rules: some seconds. Only pipelines of more than 16 ranks come to the end of it."""


def search(given: Problem, orders: Orders, ahead: Sequence[int] = ()) -> ListSchedule:
    """Return the best schedule by makespan, then time between a rank's first op and its last, then memory.

    Rules are compared on a few microbatches (the first that have three units a rank, but three at least), for what
    repeats need not be scheduled again and again; the best few, and each of `orders` with W right after I, and after
    one more I a rank, on all. The search ends early where nothing can be better.

    ahead: how many of the next ops of a fixed order a rank chooses from (`Rules.ahead`), beside one, is tried.
    """
    ranks, orders = len(given.own), [_found_once(order) for order in orders]
    few = given.first(max(3, bisect_left(given.starts, 3 * ranks)))
    bounds = given.lower_bounds(), few.lower_bounds()
    rated: list[tuple[tuple[float, float, float], int, Maker]] = []
    fastest: list[float] = []  # makespans, in order: a schedule that is too slow to become a finalist is given up

    def rate(makers: Iterable[Maker]) -> ListSchedule | None:
        """Add the rules to `rated`; returns a schedule of the whole problem if it cannot be bettered."""
        for make in makers:
            if len(rated) * 3 * len(few.forward_units) * len(few.homes) > BUDGET:
                break
            schedule = greedy(few, make(few), fastest[FINALISTS - 1] * MARGIN if len(fastest) >= FINALISTS else inf)
            if schedule is None:
                continue
            rated.append((schedule.rating, len(rated), make))
            insort(fastest, schedule.makespan)
            if schedule.reaches(bounds[1]):
                whole = schedule if few == given else greedy(given, make(given))
                if whole is not None and whole.reaches(bounds[0]):
                    return whole
        rated.sort(key=lambda entry: entry[:2])
        return None

    perfect = rate(_coarse(given, orders, ahead)) or rate(_refined(given, [make for _, _, make in rated[:FINALISTS]]))
    if perfect is not None:
        return perfect
    finalists = [make(given) for _, _, make in rated[:FINALISTS]]
    kept = (0.0,) * ranks, tuple(map(float, range(ranks)))
    fixed = [Rules(order=order(given), deferred=deferred) for order in orders for deferred in kept]
    return best_of(given, [*finalists, *fixed, Rules(_kinds(given))])  # the last always finds a schedule


def _coarse(given: Problem, orders: Orders, ahead: Sequence[int]) -> Iterator[Maker]:
    """Yield every order of preference and every fixed order, each with a few ways to place W."""
    for order in orders:
        for deferred, patience in product((None, 1.0, 0.0), (inf, 0.5, 0.0)):
            yield _ordered(order, 1, deferred, patience)
        for choice, patience in product(ahead, (inf, 0.5)):
            yield _ordered(order, choice, None, patience)
    kinds = _kinds(given)
    fills = list(product((True, False), (inf, 0.5)))
    for prefer in _preferences(kinds):
        for make_room, patience in fills:
            yield _same(Rules(prefer, make_room=make_room, patience=patience))
    for prefer in _preferences(kinds):
        for make_room, patience in fills:
            if prefer[0] == kinds[0]:  # a turn may begin anywhere
                yield _same(Rules(prefer, in_turn=True, make_room=make_room, patience=patience))


def _kinds(given: Problem) -> tuple[tuple[str, int], ...]:
    """Return the F and I of the stages of a rank, the later stage first."""
    return tuple((kind, place) for place in reversed(range(max(map(len, given.own)))) for kind in "FI")


def _preferences(kinds: tuple[tuple[str, int], ...]) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yield all orders for one or two stages a rank; for more, F and I each from the first stage or the last, one kind
    before the other or in turn.
    """
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


def _found_once(order: Callable[[Problem], Order]) -> Callable[[Problem], Order]:
    """Return the same function, which makes an order once for as many microbatches."""
    known: dict[int, Order] = {}

    def found(given: Problem) -> Order:
        count = len(given.workload)
        if count not in known:
            known[count] = order(given)
        return known[count]

    return found


def _ordered(order: Callable[[Problem], Order], ahead: int, deferred: float | None, patience: float) -> Maker:
    def make(given: Problem) -> Rules:
        pending = None if deferred is None else (deferred,) * len(given.own)
        return Rules(order=order(given), ahead=ahead, deferred=pending, patience=patience)

    return make


def _refined(given: Problem, makers: list[Maker]) -> Iterator[Maker]:
    """Yield each with shorter warm-ups, and with fewer W kept waiting."""
    p, v = len(given.own), max(map(len, given.own))
    ranks = range(p)
    more = v * (given.workload.most_chunks - 1)  # a microbatch's first I comes after all its F
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
