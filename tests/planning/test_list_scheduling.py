"""The rules of list scheduling under a memory limit."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.planning.order.list_scheduling import ABANDONED, Rules, _Greedy, greedy
from helixpipe.planning.order.problem import problem
from helixpipe.program.costs import Contents
from helixpipe.program.program import Op
from helixpipe.program.stages import even_stages
from helixpipe.program.workload import uniform


class Deferring(PieceTimes):
    """A unit keeps 1 from F to I, and 3 from I to W."""

    def size(self, contents: Contents) -> float:
        return {"saved": 1.0, "deferred": 3.0}.get(contents.kind, 0.0)


@pytest.mark.parametrize("inflight", [1, 2, 3])
def test_forwards_leave_room_for_what_an_input_backward_adds(inflight: int) -> None:
    given = problem("test", even_stages(4, 4), tuple(range(4)), uniform(8), inflight, Deferring())
    assert given.limit == (inflight + 2,) * 4
    found = greedy(given, Rules((("I", 0), ("F", 0))))
    assert found is not None and found.memory == pytest.approx(1)


def test_ops_of_a_fixed_order_that_can_start_pass_one_that_must_wait() -> None:
    """Two stages on rank 0 with one on rank 1 between: F of the last comes back while F of a second unit could run."""
    given = problem("test", even_stages(3, 3), (0, 1, 0), uniform(2), 2, PieceTimes({"mlp": 1.0}))
    first = [Op(*each) for each in (("F", 0, 0), ("F", 2, 0), ("F", 0, 1), ("I", 2, 0))]
    rest = [Op(*each) for each in (("F", 2, 1), ("I", 2, 1), ("I", 0, 0), ("I", 0, 1))]
    second = tuple(Op(kind, 1, unit) for kind in "FI" for unit in range(2))
    order = ((*first, *rest), second)
    found = {ahead: greedy(given, Rules(order=order, ahead=ahead)) for ahead in (1, 2)}
    orders = {ahead: None if each is None else " ".join(map(str, each.ranks[0][:4])) for ahead, each in found.items()}
    assert orders == {1: "0F0 2F0 0F1 2I0", 2: "0F0 0F1 2F0 2I0"}


def test_w_of_no_time_runs_where_a_rank_idles() -> None:
    """Also where a rank has endless patience: it keeps nothing waiting."""
    given = problem("test", even_stages(1, 1), (0,), uniform(2), 1, PieceTimes({"attn": 1.0}))
    found = greedy(given, Rules((("I", 0), ("F", 0))))
    assert found is not None and [str(op) for op in found.ranks[0]] == ["0F0", "0I0", "0W0", "0F1", "0I1", "0W1"]


@settings(max_examples=200)
@drawn(p=st.integers(1, 4), v=st.integers(1, 3), m=st.integers(1, 6), k=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_the_compiled_twin_gives_the_same(p: int, v: int, m: int, k: int, seed: int) -> None:
    """To the last bit: orders, times and memory, of any rules, also of those that are given up."""
    rng = Random(seed)
    homes = [stage % p for stage in range(p * v)]
    rng.shuffle(homes)
    lengths = tuple(rng.randint(1, 5) for _ in range(k))
    costs = PieceTimes({"mlp": rng.random(), "attn": rng.choice((0.0, 0.3))}, message=rng.choice((0.0, rng.random())))
    stages = even_stages(p * v, p * v)
    given = problem("test", stages, tuple(homes), uniform(m, k, lengths), rng.choice((1, 1.5, 3)), costs)
    prefer = [(kind, place) for kind in "FI" for place in range(v)]
    rng.shuffle(prefer)
    rules = Rules(
        tuple(prefer),
        in_turn=rng.random() < 0.5,
        make_room=rng.random() < 0.5,
        deferred=rng.choice((None, tuple(float(rng.randrange(4)) for _ in range(p)))),
        warmup=rng.choice((None, tuple(float(rng.randint(1, 6) + k) for _ in range(p)))),
        patience=rng.choice((inf, 0.5, 0.0)),
    )
    plain = _Greedy(given, rules).run(inf)
    if plain is not None and rng.random() < 0.7:  # its order, of which each rank may start what can
        order = tuple(tuple(op for op in ops if op.kind != "W") for ops in plain.ranks)
        rules = replace(rules, order=order, ahead=rng.randint(1, 3))
        if rng.random() < 0.3:  # which may find no room
            given = replace(given, limit=tuple(limit * 0.7 for limit in given.limit))
    slowest = rng.choice((inf, 0.0 if plain is None else plain.makespan * rng.uniform(0.9, 1.1)))
    found, plain = greedy(given, rules, slowest), _Greedy(given, rules).run(slowest)
    assert (found is None) == (plain is None)
    if found is not None and plain is not None:
        figures = [(each.ranks, each.makespan, each.span, each.memory) for each in (found, plain)]
        assert figures[0] == figures[1]
        assert (found is ABANDONED) == (plain is ABANDONED)
