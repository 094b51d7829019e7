"""Bounds: no order of the same work in the same memory beats them; where all orders are tried they are the least."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.certify import time_steps
from helixpipe.certify.bounds import largest, one_machine
from helixpipe.certify.certificate import certify
from helixpipe.certify.problem import problem_of, windows
from helixpipe.certify.time_steps import steps_bound, time_step
from helixpipe.common.errors import UserError
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.build import build_graph
from helixpipe.lowering.graph import op_dependencies
from helixpipe.lowering.lower import lower
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import even_stages
from helixpipe.program.workload import uniform
from helixpipe.simulate.simulator import Simulation, simulate
from schedules import CATALOGUE, Shape, build
from tests.lowering.offloads import offloading_program
from tests.lowering.random_programs import random_costs, random_program
from tests.lowering.sharing import sharing_program
from tests.selection import graded
from tools.check_certificate import check

UNIT = PieceTimes({"mlp": 1.0})


def simulated(program: Program, costs: PieceTimes, blocking: bool = False) -> Simulation:
    return simulate(lower(program, costs), costs, blocking=blocking)


def reordered(program: Program, rng: Random) -> Program:
    """The same ops on the same ranks in another order that can run."""
    needed = op_dependencies(build_graph(program))
    rank_of = {op: rank for rank, ops in enumerate(program.ranks) for op in ops}
    left, ranks = sorted(rank_of), [[] for _ in program.ranks]  # type: tuple[list[Op], list[list[Op]]]
    done: set[Op] = set()
    while left:
        op = rng.choice([op for op in left if done.issuperset(needed[op])])
        left.remove(op)
        done.add(op)
        ranks[rank_of[op]].append(op)
    return replace(program, ranks=tuple(map(tuple, ranks)))


@pytest.mark.hypothesis
@pytest.mark.parametrize("divided", [False, True], ids=["", "divided head"])
@pytest.mark.parametrize("examples", graded((30, 400), (30,)))
def test_no_order_of_a_random_program_is_below_its_bound(examples: int, divided: bool) -> None:
    @settings(max_examples=examples)
    @given(seed=st.integers(0, 2**32))
    def verify(seed: int) -> None:
        rng = Random(seed)
        program, costs = random_program(rng, divided=divided), random_costs(rng)
        if rng.random() < 0.3:
            program = sharing_program(offloading_program(program, seed), seed)
        step = simulated(program, costs)
        certificate = certify(step, limit=1e9)  # which every order keeps to
        assert certificate.bound.value <= step.makespan * (1 + 1e-9)
        check(certificate.to_json())
        for _ in range(3):
            other = simulated(reordered(program, rng), costs, blocking=rng.random() < 0.3)
            assert certificate.bound.value <= other.makespan * (1 + 1e-9)

    verify()


def orders(split: bool) -> Iterator[tuple[Op, ...]]:
    """All orders of two microbatches' ops of stage 0."""
    own = [tuple(Op(kind, 0, microbatch) for kind in ("FIW" if split else "FB")) for microbatch in (0, 1)]
    ops = [op for each in own for op in each]
    for order in permutations(ops):
        if all([op for op in order if op in each] == list(each) for each in own):
            yield order


@pytest.mark.parametrize("split", [False, True], ids=["B", "I and W"])
@pytest.mark.parametrize("message", [0.0, 1.0])
def test_all_orders_of_a_tiny_step(split: bool, message: float) -> None:
    """For each memory that some order has: the bound is at most the least makespan in it, and here it is that."""
    costs = PieceTimes({"mlp": 1.0, "attn": 1.0}, message=message)
    steps = []
    for first, second in product(orders(split), repeat=2):
        ranks = (first, tuple(op._replace(stage=1) for op in second))
        try:
            steps.append(simulated(Program("tiny", even_stages(2, 2), ranks, uniform(2)), costs))
        except UserError:  # they wait for each other
            continue
    limits = {max(step.device_needs) for step in steps}
    assert len(limits) > 1
    for limit in limits:
        fitting = [step for step in steps if max(step.device_needs) <= limit]
        least = min(step.makespan for step in fitting)
        for step in {step.makespan: step for step in fitting}.values():
            certificate = certify(step, limit)
            assert certificate.bound.value == pytest.approx(least)
            assert certificate.optimal == (step.makespan == least)


@pytest.mark.parametrize("name", [name for name, each in CATALOGUE.items() if not each.one_rank])
def test_schedules_of_the_catalogue(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_steps, "MOST_STARTS", 400)
    schedule, costs = CATALOGUE[name], PieceTimes({"mlp": 1.0}, message=0.5)
    shape = Shape(2, 4, 4, 2 if schedule.chunks else 1, 2 if schedule.virtual_stages else None, costs=costs)
    step = simulated(build(name, shape), costs)
    certificate = certify(step)
    assert 0.5 * step.makespan < certificate.bound.value <= step.makespan * (1 + 1e-9)
    check(certificate.to_json())


def test_known_least_makespans() -> None:
    """Of 1F1B (m + p - 1)(F + B); of ZB-H1 3m + p - 1 with F = I = W; and what rests on the linear program."""
    found = {}
    for name, microbatches in (("1f1b", 6), ("zb1p", 6), ("v-half", 4), ("v-min", 4)):
        certificate = certify(simulated(build(name, Shape(4, microbatches, 8, costs=UNIT)), UNIT))
        found[name] = certificate.bound.value, certificate.optimal, certificate.bound.kind
    assert found == {
        "1f1b": (54.0, True, "work"),
        "zb1p": (42.0, True, "work"),
        "v-half": (29.0, True, "steps"),
        "v-min": (32.0, False, "steps"),
    }


def test_memory_bounds_what_no_other_bound_sees() -> None:
    """With room for one microbatch on each rank the pipeline runs them one after another (Little's law)."""
    shape = Shape(4, 6, 8, costs=UNIT)
    program = build("1f1b", shape)
    alone = tuple(tuple(Op(kind, rank, each) for each in range(6) for kind in "FB") for rank in range(4))
    step = simulated(replace(program, ranks=alone), UNIT)
    problem = problem_of(step)
    bound = largest(problem, windows(problem))
    assert bound.kind == "memory" and bound.resource is not None and bound.resource.ranks == (0,)
    assert bound.value == step.makespan == 6 * 4 * 6
    assert "in the memory there is" in bound.text()


def test_one_machine() -> None:
    assert one_machine([(0.0, 9.0, 2.0), (4.0, 1.0, 3.0), (5.0, 1.0, 3.0)]) == (11.0, 4.0, 1.0)


def test_time_steps() -> None:
    assert time_step([0.5, 0.0, 0.75]) == 0.25
    assert time_step([0.1, 0.3]) == pytest.approx(0.1)
    assert time_step([1.0, 2**0.5]) is None
    assert time_step([0.0]) is None


def test_a_step_without_time_steps_has_the_other_bounds() -> None:
    costs = PieceTimes({"mlp": 2**0.5})
    step = simulated(build("v-min", Shape(4, 4, 8, costs=costs)), replace(costs, message=1.0))
    problem = problem_of(step)
    assert steps_bound(problem, 0.0, step.makespan) is None
    assert certify(step).bound.kind == "work"
    assert inf not in problem.limits
