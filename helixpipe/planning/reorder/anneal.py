"""Simulated annealing over the orders of the ranks' ops (Kirkpatrick et al., Science 220, 1983)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, log
from random import Random

from helixpipe.planning.reorder.evaluate import Judge
from helixpipe.planning.reorder.instance import Instance, Orders
from helixpipe.planning.reorder.moves import Moves

HOT, COLD = 1e-3, 1e-6
"""Temperatures at the start and the end, as parts of the makespan."""

SAY = 256
"""Orders between two words of how far the search is."""


@dataclass(frozen=True)
class Annealed:
    """The best order there was, its makespan, how many orders were drawn, and whether an interrupt ended it."""

    orders: Orders
    makespan: float
    evaluations: int
    interrupted: bool


def anneal(
    instance: Instance,
    judge: Judge,
    evaluations: int,
    rng: Random,
    least: float = 0.0,
    say: Callable[[int, float], None] = lambda done, makespan: None,
) -> Annealed:
    """Return the best of `evaluations` orders, each one move from the last that was taken; the instance's own is the
    first.

    Longer steps are taken too, by e^(-(how much longer)/temperature), for which the temperature falls from `HOT` to
    `COLD`. least: a makespan that no order can beat; the search ends when it is reached. say: called now and then with
    the number drawn, and the best makespan. An interrupt (Ctrl-C) ends it with the best so far.
    """
    orders: Orders = [list(order) for order in instance.orders]
    current = judge.makespan(orders, inf)
    moves = Moves(instance, rng)
    best, best_orders, done = current, list(orders), 1
    if current < inf:
        moves.look(orders, judge.starts, judge.ends)
    try:
        while done < evaluations and best > least * (1 + 1e-9) and current < inf:
            done += 1
            if not done % SAY:
                say(done, best)
            move = moves.draw(orders)
            if move is None:
                continue
            temperature = HOT * (COLD / HOT) ** (done / evaluations) * best
            order, orders[move.rank] = orders[move.rank], move.applied(orders[move.rank])
            makespan = judge.makespan(orders, current - temperature * log(1 - rng.random()))
            if makespan == inf:
                orders[move.rank] = order
                continue
            current = makespan
            moves.look(orders, judge.starts, judge.ends)
            if current < best:
                best, best_orders = current, list(orders)
    except KeyboardInterrupt:
        return Annealed(best_orders, best, done, True)
    return Annealed(best_orders, best, done, False)
