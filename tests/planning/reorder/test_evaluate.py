"""The evaluator says what the engine's own simulator says, and its compiled twin what it says."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixpipe.common.errors import ProgramError
from helixpipe.planning.reorder import evaluate
from helixpipe.planning.reorder.evaluate import Evaluator, Judge, compiled_evaluator, evaluator
from helixpipe.planning.reorder.instance import Instance
from helixpipe.planning.reorder.moves import Moves
from helixpipe.planning.reorder.starts import split
from helixpipe.program.program import Op
from tests.planning.reorder.instances import instance, random_instance, simulated, small

CATALOGUE = [
    small("1f1b"),
    small("zbv"),
    small("chimera", ranks=2),
    small("interleaved-1f1b", ranks=2, virtual_stages=2),
    small("seq1f1b-interleaved", chunks=2, virtual_stages=2),
    split(small("seq1f1b", chunks=3)),
    small("helix", ranks=2),
    small("weipipe", ranks=2),
]


@pytest.mark.parametrize("program", CATALOGUE, ids=lambda program: program.schedule)
def test_a_program_as_the_simulator_sees_it(program: Any) -> None:
    simulation, judge = simulated(program), Evaluator(instance(program))
    assert judge.makespan(judge.instance.orders, inf) == simulation.makespan
    events = {(event.rank, event.op): (event.start, event.end) for event in simulation.timeline.ops}
    for rank, order in enumerate(judge.instance.orders):
        for task in order:
            assert (judge.starts[task], judge.ends[task]) == events[rank, judge.instance.ops[task]]
    assert judge.peaks == pytest.approx([peak.total for peak in simulation.peaks], rel=1e-9)


@pytest.mark.parametrize("program", CATALOGUE[:6], ids=lambda program: program.schedule)
def test_other_orders_as_the_simulator_sees_them(program: Any) -> None:
    """Of resident and replicated stages: what waits for what is the same in any order."""
    given, rng = instance(program), Random(1)
    judge, moves, orders = Evaluator(given), Moves(given, rng), [list(order) for order in given.orders]
    judge.makespan(orders, inf)
    moves.look(orders, judge.starts, judge.ends)
    compared = 0
    for _ in range(60):
        move = moves.draw(orders)
        if move is None:
            continue
        changed = list(orders)
        changed[move.rank] = move.applied(orders[move.rank])
        assert sorted(changed[move.rank]) == sorted(orders[move.rank]) and changed != orders
        found = judge.makespan(changed, inf)
        try:
            simulation = simulated(replace(program, ranks=given.ranks_of(changed)))
        except ProgramError:
            assert found == inf
            continue
        assert found == pytest.approx(simulation.makespan, rel=1e-12)
        assert judge.peaks == pytest.approx([peak.total for peak in simulation.peaks], rel=1e-9)
        orders, compared = changed, compared + 1
    assert compared > 10


def test_memory_of_a_transfer_by_hand() -> None:
    """Rank 0 makes 3 and sends them from 1 to 3, when rank 1 has memory for them, and its own 1, until its op ends."""
    step = Instance(
        (Op("F", 0, 0), Op("F", 1, 0)), [[0], [1]], [1.0, 1.0, 2.0], [0, 1, 2], 3, [[2], [], [1]], [0, 1, 1],
        held=[2.0, 1.0], rise=[4.0, 0.5], change=[3.0, -3.0], taken=[(1, 3.0)], sent=[(0, -3.0)], limits=[inf, 4.5],
    )  # fmt: skip
    for judge in (Evaluator(step), evaluator(step)):
        assert judge.makespan(step.orders, inf) == 4 and judge.peaks == [6.0, 4.5]
    assert Evaluator(replace(step, limits=[inf, 4.4])).makespan(step.orders, inf) == inf


def _answers(judge: Judge, given: Instance) -> list[object]:
    """Return what it says of some orders and bounds, one after the other."""
    told: list[object] = []
    for rotation in range(3):
        orders = [order[rotation:] + order[:rotation] for order in given.orders]
        for bound in (inf, 9.0, 4.0):
            told.append(judge.makespan(orders, bound))
            told.append((list(judge.starts), list(judge.ends), list(judge.peaks)))
    return told


@given(st.integers(0, 10**6))
def test_the_twins_agree_to_the_last_digit(seed: int) -> None:
    """Where the compiled one was built; without a compiler there is one evaluator."""
    given = random_instance(seed)
    judge = Evaluator(given)
    compiled = compiled_evaluator(given) or Evaluator(given)
    if judge.makespan(given.orders, inf) < inf:
        assert compiled.makespan(given.orders, inf) < inf
        assert _answers(judge, given) == _answers(compiled, given)
    else:
        assert compiled.makespan(given.orders, inf) == inf


def test_random_instances_have_answers_of_all_kinds() -> None:
    answers = [Evaluator(each).makespan(each.orders, inf) for each in map(random_instance, range(80))]
    assert 10 < sum(answer < inf for answer in answers) < 70


@pytest.mark.parametrize("judge_of", [Evaluator, evaluator])
def test_bounds_and_limits(judge_of: Any) -> None:
    program = small("1f1b")
    simulation = simulated(program)
    peaks = [peak.total for peak in simulation.peaks]
    exact = judge_of(instance(program, peaks))
    assert exact.makespan(instance(program).orders, simulation.makespan) == simulation.makespan
    assert exact.makespan(instance(program).orders, simulation.makespan * (1 - 1e-6)) == inf
    assert exact.peaks == pytest.approx(peaks)  # of the last order that it went through
    for rank in range(program.num_ranks):
        tight = [peak * (1 - 1e-6 * (each == rank)) for each, peak in enumerate(peaks)]
        assert judge_of(instance(program, tight)).makespan(instance(program).orders, inf) == inf


def test_without_the_compiled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELIXPIPE_COMPILED", "0")
    assert not evaluate.is_compiled() and isinstance(evaluator(instance(small())), Evaluator)
