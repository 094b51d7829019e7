"""The one order: a linear extension, ops by their end and transfers by their start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.build import build_graph
from helixpipe.lowering.graph import Graph, unit_order
from helixpipe.lowering.lower import lower
from helixpipe.lowering.order import TaskTimes, list_schedule
from helixpipe.lowering.places import without_holds
from helixpipe.lowering.project import Action, LoweredProgram
from helixpipe.lowering.validate import validate
from helixpipe.program.program import Program, forward_only
from helixpipe.simulate.simulator import simulate
from schedules import Shape, build
from tests.lowering.random_programs import random_costs, random_program

COSTS = PieceTimes({"qkv": 1.0, "attn": 3.0, "mlp": 2.0}, message=0.5)


def timed(program: Program, costs: PieceTimes) -> tuple[Graph, TaskTimes]:
    graph = validate(program)
    return graph, list_schedule(graph, *BoundCosts(program, costs).timers)


def check_extends(graph: Graph, order: Iterable[int]) -> dict[int, int]:
    """All tasks once, after what they wait for, and those of a rank in its order; returns their places."""
    place = {task: at for at, task in enumerate(order)}
    assert sorted(place) == list(range(graph.num_tasks))
    for task, successors in enumerate(graph.successors):
        assert all(place[task] < place[successor] for successor in successors)
    for tasks in graph.rank_tasks:
        assert all(place[before] < place[after] for before, after in pairwise(tasks))
    return place


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32))
def test_the_unit_order_is_that_of_a_list_schedule(seed: int) -> None:
    """Also of a program that cannot run to its end."""
    program = random_program(Random(seed))
    for stuck in (False, True):
        if stuck:
            program = replace(program, ranks=(program.ranks[0][::-1], *program.ranks[1:]))
        graph = build_graph(program)
        order = list_schedule(graph, lambda op: 1.0, lambda message: 0.0).order
        assert unit_order(graph) == [task for task in order if task < graph.num_ops]


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_ops_by_end_and_transfers_by_start(seed: int) -> None:
    """And where transfers go behind ops the order still extends all there is."""
    rng = Random(seed)
    graph, times = timed(random_program(rng), random_costs(rng))
    check_extends(graph, times.order)
    keys = [times.end[task] if task < graph.num_ops else times.start[task] for task in times.order]
    assert keys == sorted(keys)
    moved = without_holds(graph, times)
    check_extends(graph, moved.order)
    resource, links = graph.resources()[0], dict[int, list[int]]()
    for task in moved.order:
        links.setdefault(resource[task], []).append(task)
    for tasks in links.values():
        assert all(times.end[before] <= times.start[after] for before, after in pairwise(tasks))


def test_of_tasks_with_one_time_transfers_come_first() -> None:
    """The fourth message has come and the fifth leaves at 9, when rank 1 has run its second op."""
    program = forward_only(build("gpipe", Shape(2, 5, 2)))
    graph, times = timed(program, PieceTimes({"mlp": 1.0, "head": 2.0}, message=2.0))
    op, fifth = graph.rank_tasks[1][1], graph.num_ops + 4
    assert times.end[op] == times.start[fifth] == 9 and str(graph.transfer(fifth).consumer) == "1F4"
    assert times.order.index(fifth) < times.order.index(op)


def ops_before_receives(lowered: LoweredProgram, rank: int) -> list[int]:
    runs, found = 0, []
    for instruction in lowered.streams[rank]:
        runs += instruction.action is Action.RUN
        if instruction.action is Action.RECV:
            found.append(runs)
    return found


def test_a_receive_stands_before_the_op_it_overlaps() -> None:
    """Rank 1 of gpipe receives the next microbatch while it runs one: it posts that before the op, with free messages,
    too, where the op before ends just when the message starts."""
    for message in (0.0, 0.5):
        lowered = lower(build("gpipe", Shape(2, 4, 2)), PieceTimes({"mlp": 1.0}, message=message))
        assert ops_before_receives(lowered, 1) == [0, 0, 1, 2]


@pytest.mark.parametrize("name", ["hanayo", "chimera", "helix", "seq1f1b-interleaved"])
def test_a_transfer_that_can_wait_holds_up_no_op(name: str) -> None:
    """With one hardware queue a message behind another of its link, or a collective behind another of its group, would
    hold up an op that could run: without being moved behind it."""
    chunks = 4 if name.startswith("seq") else 1
    program = build(name, Shape(4, 8, 8, chunks))
    lowered = lower(program, COSTS)
    _, times = timed(program, COSTS)
    assert list(lowered.order) != times.order and sorted(lowered.order) == sorted(times.order)
    assert simulate(lowered, COSTS).makespan == pytest.approx(times.makespan)
    assert simulate(lowered, COSTS, one_queue=True).makespan < 1.006 * times.makespan


def test_messages_with_room_between_them_are_not_looked_at() -> None:
    """What keeps planning quick: 1f1b's links are free long before the next message."""
    graph, times = timed(build("1f1b", Shape(4, 64, 4)), COSTS)
    assert len(times.crowded) < 0.2 * len(graph.messages)
    assert without_holds(graph, times) is times


def test_a_sum_goes_behind_the_op_that_would_wait_for_longer() -> None:
    """On a slow network the gradients that a ring's sums wait for come late in an op."""
    program, slow = build("wzb1", Shape(8, 16, 16)), PieceTimes({"mlp": 1.0}, message=1.6)
    graph, times = timed(program, slow)
    moved = without_holds(graph, times).order
    assert moved != times.order
    place, before = check_extends(graph, moved), check_extends(graph, times.order)
    later = 0
    for task, total in enumerate(graph.messages, start=graph.num_ops):
        if total.kind != "weight_gradients" or total.follows < 0:
            continue
        came = times.end[graph.num_ops + total.follows]
        for op in graph.rank_tasks[total.source]:
            if times.start[op] < times.start[task] < times.end[op]:
                waits = came - times.start[op] > times.end[op] - times.start[task]
                assert not waits or place[op] < place[task]
                later += waits and before[op] > before[task]
    assert later > 0
