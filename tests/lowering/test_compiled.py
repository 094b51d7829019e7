"""The compiled core says what the Python code does that explains it, to the last bit.

Where nothing was compiled both sides are Python's and there is nothing to tell apart.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.common.errors import ProgramError, ScheduleError
from helixpipe.compiled import core
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.build import PASSES, build_graph
from helixpipe.lowering.compiled import earliest_times, rank_spans, rank_work
from helixpipe.lowering.graph import Draft, Graph
from helixpipe.lowering.lower import lower
from helixpipe.lowering.order import TaskTimes
from helixpipe.lowering.validate import validate
from helixpipe.program.costs import Contents, Costs, Load, Work
from helixpipe.program.program import Program, forward_only
from helixpipe.program.transfer import TRANSFER_KINDS
from helixpipe.simulate.simulator import simulate
from helixpipe.simulate.streams import times_as_run
from helixpipe.simulate.sweep import peaks
from schedules import CATALOGUE, Shape, build
from tests.lowering.offloads import offloading_program
from tests.lowering.random_programs import mutate, random_costs, random_program
from tests.lowering.sharing import sharing_program
from tests.selection import graded


class OddCosts(PieceTimes):
    """Times by hand, more where ranks exchange something, and sizes of everything that no sum of them is exact with."""

    def op_time(self, work: Work) -> float:
        return super().op_time(work) + 0.3 * (work.receives is not None) + 0.1 * (work.sends is not None)

    def size(self, contents: Contents) -> float:
        tokens = sum(extent.tokens + 0.1 * extent.earlier for extent in contents.extents)
        pieces = sum(len(segment.pieces) for segment in contents.segments)
        return 0.1 * len(contents.kind) + 0.3 * pieces + 0.7 * tokens + 0.01 * contents.in_backward


@contextmanager
def without_compiled() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HELIXPIPE_COMPILED", "0")
        yield


def values_of(made: Any) -> dict[str, Any]:
    return {each.name: getattr(made, each.name) for each in fields(made)}


def check_graph(program: Program) -> tuple[Graph, Graph]:
    made = build_graph(program)
    with without_compiled():
        expected = build_graph(program)
    assert expected.compiled is None and (made.compiled is not None) == (core() is not None)
    for name, value in values_of(expected).items():
        assert getattr(made, name) == value, name
    assert made.num_tasks == expected.num_tasks and made.num_ops == expected.num_ops
    for kind, row in TRANSFER_KINDS.items():
        is_row = partial(operator.is_, row)
        assert made.count(is_row) == expected.count(is_row), kind
    return made, expected


def check_times(made: TaskTimes, expected: TaskTimes) -> None:
    assert values_of(made) == values_of(expected)
    assert (made.makespan, made.num_ended) == (expected.makespan, expected.num_ended)


def answers(program: Program, costs: Costs) -> list[Any]:
    """What is asked of a plan, which must not depend on whether it was compiled."""
    lowered = lower(replace(program), costs)
    simulation = simulate(lowered, costs)
    return [
        values_of(lowered.graph),
        lowered.order,
        lowered.streams,
        lowered.openings,
        values_of(times_as_run(lowered, costs)),
        peaks(lowered, BoundCosts(lowered.program, costs)),
        simulation.timeline,
        simulation.to_json(),
        (simulation.offloaded, simulation.held_up, simulation.held_up_by_sharing),
        simulate(lowered, costs, noise=0.1).times,
        simulate(lowered, costs, one_queue=True).busy,
    ]


def check(program: Program, costs: Costs) -> None:
    graph, expected = check_graph(program)
    earliest, naive = (earliest_times(each, BoundCosts(program, costs)) for each in (graph, expected))
    check_times(earliest, naive)
    assert rank_work(graph, earliest) == rank_work(expected, naive)
    assert rank_spans(graph, earliest) == rank_spans(expected, naive)
    made = answers(program, costs)
    with without_compiled():
        assert made == answers(program, costs)


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_random_programs(seed: int) -> None:
    rng = Random(seed)
    program = random_program(rng, divided=rng.random() < 0.2)
    if rng.random() < 0.5:
        program = sharing_program(program, seed)
    if rng.random() < 0.5:
        program = offloading_program(program, seed)
    if rng.random() < 0.3:
        program = replace(program, kv_blocks=True)
    own = random_costs(rng)
    check(program, OddCosts(own.forward, own.backward_ratio, own.message, rng.choice((0.0, 0.7))))


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_programs_with_faults(seed: int) -> None:
    """Both find the same fault, or none."""
    rng = Random(seed)
    program = mutate(random_program(rng, divided=rng.random() < 0.2), rng)

    def verdict() -> str:
        try:
            return str(len(validate(replace(program)).transfers))
        except ProgramError as error:
            return str(error)

    made = verdict()
    with without_compiled():
        assert made == verdict()


SHAPES = (Shape(2, 4, 12), Shape(4, 8, 24, chunks=2), Shape(3, 2, 18), Shape(4, 12, 24, chunks=3), Shape(1, 2, 6))
COSTS = OddCosts({"qkv": 1.0, "attn": 3.0, "mlp": 2.0, "head": 0.7}, message=0.3)


@pytest.mark.parametrize("shape", graded(SHAPES, SHAPES[:2]), ids=lambda shape: f"p{shape.ranks}k{shape.chunks}")
@pytest.mark.parametrize("name", CATALOGUE)
def test_every_schedule(name: str, shape: Shape) -> None:
    try:
        program = build(name, shape)
    except ScheduleError:
        return
    check(program, COSTS)
    check(forward_only(program), COSTS)


def test_costs_that_keep_ranks_from_computing() -> None:
    """Handling of messages is charged to ops."""

    class Handled(OddCosts):
        def handling_time(self, load: Load, sends: bool) -> float:
            return 0.3 if sends else 0.1

    check(build("helix", Shape(2, 4, 4)), Handled(COSTS.forward, 2.0, 0.3))


def test_links_and_stages_of_equal_work_are_told_from_others() -> None:
    """Links of equal speed count as one, a slow link and the stages at both ends as others."""

    class Linked(OddCosts):
        def link_class(self, source: int, target: int) -> bool:
            return {source, target} == {1, 2}

        def transfer_time(self, load: Load) -> float:
            slow = TRANSFER_KINDS[load.kind].resource == "link" and self.link_class(*load.ranks)
            return super().transfer_time(load) * (7 if slow else 1)

    linked = Linked(COSTS.forward, COSTS.backward_ratio, 0.3)
    for name, chunks in (("seq1f1b", 2), ("helix", 1)):
        check(build(name, Shape(4, 8, 16, chunks)), linked)


def test_what_is_made_when_asked_for_is_sent_whole() -> None:
    lowered = lower(build("helix", Shape(2, 4, 4)), COSTS)
    there = pickle.loads(pickle.dumps(lowered))
    assert there == lowered and there.compiled is None and there.graph.compiled is None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lowered.graph.nothing  # noqa: B018


def test_a_build_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helixpipe.compiled.INTERFACE", -1)
    assert core() is None and lower(build("1f1b", Shape(2, 4, 4))).compiled is None


def test_equal_work_is_asked_for_once() -> None:
    """However many microbatches there are."""
    asked: list[Callable[..., float]] = []

    class Counting(PieceTimes):
        def op_time(self, work: Any) -> float:
            asked.append(super().op_time)
            return super().op_time(work)

    lower(build("1f1b", Shape(2, 64, 4)), Counting())
    assert len(asked) == 4


def test_a_mistake_of_a_pass_is_not_taken_for_a_program_that_is_not_complete() -> None:
    """That one alone is left to the twin."""
    program, calls = build("1f1b", Shape(2, 2, 2)), list[str]()

    def mistaken(draft: Draft) -> None:
        calls.append(type(draft).__name__)
        raise ValueError("a mistake")

    passes = (*PASSES[:-1], PASSES[-1]._replace(add=mistaken))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("helixpipe.lowering.build.PASSES", passes)
        with pytest.raises(ValueError, match="a mistake"):
            build_graph(replace(program), passes=passes)
    assert len(calls) == 1
    lacking = replace(program, ranks=(program.ranks[0][:-1], program.ranks[1]))
    with pytest.raises(ProgramError, match="is missing"):
        validate(lacking)
