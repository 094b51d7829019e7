"""What a rank's stream makes it wait for, with a hardware queue for each stream and with one for all."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.lower import lower
from helixpipe.lowering.project import Action, LoweredProgram
from helixpipe.program.program import Unit, forward_only
from helixpipe.simulate.simulator import Simulation, simulate
from helixpipe.simulate.streams import queue_waits
from schedules import CATALOGUE, Shape, build
from tests.lowering.offloads import everything, offloading_program
from tests.lowering.random_programs import random_costs, random_program

FREE = PieceTimes({"mlp": 1.0})


def spans(simulation: Simulation) -> dict[str, tuple[float, float]]:
    """Of ops by their name, of messages by the op they are for."""
    timeline = simulation.timeline
    found = {str(event.op): (event.start, event.end) for event in timeline.ops}
    return found | {f"for {event.consumer}": (event.start, event.end) for event in timeline.messages}


def forwards(microbatches: int) -> LoweredProgram:
    """Two stages of one time on two ranks, forwards alone, lowered for messages that take no time."""
    return lower(forward_only(build("gpipe", Shape(2, microbatches, 2))), FREE)


def test_a_transfer_that_waits_for_its_link_holds_up_what_follows() -> None:
    """Rank 0 cannot start the second SEND before the first message has left, nor then its third op; nor rank 1 the
    third RECV before the second, nor then its second op."""
    slow = PieceTimes({"mlp": 1.0}, message=2.0)
    many, one = (spans(simulate(forwards(3), slow, one_queue=one)) for one in (False, True))
    messages = {"for 1F0": (1, 3), "for 1F1": (3, 5), "for 1F2": (5, 7)}
    assert many == messages | {
        "0F0": (0, 1), "0F1": (1, 2), "0F2": (2, 3), "1F0": (3, 4), "1F1": (5, 6), "1F2": (7, 8),
    }  # fmt: skip
    assert one == many | {"0F2": (3, 4)}


def test_a_receive_is_dispatched_at_its_place() -> None:
    """Behind the op before it, however long the message has been on offer."""
    lowered, quick = forwards(2), PieceTimes({"mlp": 1.0}, message=0.25)
    stream = list(lowered.streams[1])
    first = next(at for at, each in enumerate(stream) if each.action is Action.RUN)
    receive = next(each for each in stream[1:] if each.action is Action.RECV)
    assert stream.index(receive) < first
    stream.insert(first, stream.pop(stream.index(receive)))
    late = replace(lowered, streams=(lowered.streams[0], tuple(stream)))
    assert spans(simulate(lowered, quick, one_queue=True))["for 1F1"] == (2, 2.25)
    assert spans(simulate(late, quick))["1F1"] == (2.25, 3.25)
    one = spans(simulate(late, quick, one_queue=True))
    assert (one["1F0"], one["for 1F1"], one["1F1"]) == ((1.25, 2.25), (2.25, 2.5), (2.5, 3.5))


def test_weights_that_have_not_come_hold_up_who_passes_them_on() -> None:
    """An op behind the SEND starts when they are there; with a queue for each stream it does not care."""
    lowered = lower(build("weipipe", Shape(8, 8, 8)), PieceTimes({"mlp": 1.0}, message=0.5))
    first, held = lowered.graph.num_ops, queue_waits(lowered)
    passed_on = 0
    for stream in lowered.streams:
        waiting: list[int] = []
        for action, _, message, task in stream:
            if action is Action.SEND and message is not None and message.kind == "weights" and message.follows >= 0:
                waiting.append(first + message.follows)
            elif action is Action.RUN:
                assert all(task in held[each] for each in waiting)
                passed_on += len(waiting)
                waiting = []
    assert passed_on > 0
    slow = PieceTimes({"mlp": 1.0}, message=0.5)
    assert simulate(lowered, slow, one_queue=True).makespan > simulate(lowered, slow).makespan


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name != "none"])
def test_free_messages_make_no_difference(name: str) -> None:
    schedule = CATALOGUE[name]
    lowered = lower(build(name, Shape(4, 8, 8, 2 if schedule.chunks else 1)), FREE)
    assert simulate(lowered, FREE, one_queue=True).makespan == simulate(lowered, FREE).makespan


@pytest.mark.parametrize("one_queue", [False, True])
def test_copies_that_take_longer_than_on_paper_hold_up_what_waits_for_them(one_queue: bool) -> None:
    """F0 to F3, then B0 to B3, of which the first unit offloads: the op behind its GONE, which is F2, and B0 wait."""
    program = everything(build("gpipe", Shape(1, 4, 1)), ahead=1, units=[Unit(0, 0)])
    lowered = lower(program, PieceTimes({"mlp": 1.0}, copy=0.5))
    simulation = simulate(lowered, PieceTimes({"mlp": 1.0}, copy=3.0), one_queue=one_queue)
    starts = {str(event.op): event.start for event in simulation.timeline.ops}
    assert [starts[f"0F{number}"] for number in range(4)] == [0, 1, 4, 5]
    assert [(event.start, event.end) for event in simulation.timeline.copies] == [(1, 4), (5, 8)]
    assert [starts[f"0B{number}"] for number in range(4)] == [8, 10, 12, 14]


def test_copies_that_may_start_at_one_time_come_in_the_order_in_which_they_are_needed() -> None:
    """F0 to F3, then B3 to B0: when F3 has ended both B2's and B1's may start."""
    program = build("terapipe", Shape(1, 1, 1, 4))
    for chunk in (1, 2):
        program = everything(program, ahead=3 - chunk, units=[Unit(0, 0, chunk)])
    costs = PieceTimes({"mlp": 1.0}, copy=0.5)
    copies = simulate(lower(program, costs), costs).timeline.copies
    assert [str(each.consumer) for each in copies if each.kind == "fetch"] == ["0B0.2", "0B0.1"]


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_one_queue_is_never_faster(seed: int) -> None:
    """Whatever the program was lowered for, with copies or without; and no task starts sooner."""
    rng = Random(seed)
    program, copy = random_program(rng), rng.choice((0.0, 0.1, 5.0))
    lowered = lower(offloading_program(program, seed) if seed % 2 else program, random_costs(rng))
    costs = replace(random_costs(rng), copy=copy)
    one, many = (simulate(lowered, costs, one_queue=one) for one in (True, False))
    for kind in ("ops", "copies", "messages"):
        for with_one, with_many in zip(getattr(one.timeline, kind), getattr(many.timeline, kind), strict=True):
            assert with_one.start >= with_many.start - 1e-9
    assert one.makespan >= many.makespan - 1e-9 and one.peaks == many.peaks


def test_collectives_of_a_group_go_one_after_another() -> None:
    """The second collective of a group cannot start before the first is over, which its slowest member says."""
    lowered = lower(build("chimera", Shape(4, 4, 4)), FREE)
    graph, waits = lowered.graph, queue_waits(lowered)
    place = {task: at for at, task in enumerate(lowered.order)}
    groups: dict[tuple[int, ...], list[int]] = {}
    for collective in graph.collectives:
        groups.setdefault(collective.ranks, []).append(graph.task(collective))
    pairs = [sorted(tasks, key=place.__getitem__) for tasks in groups.values() if len(tasks) == 2]
    assert pairs and all(second in waits[first] and first not in waits.get(second, ()) for first, second in pairs)
