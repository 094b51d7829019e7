"""Forwards that run beside backwards: one task in the graph, in the one order and in the streams."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.common.errors import ProgramError
from helixpipe.costs.by_hand import unit_costs
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.lower import lower
from helixpipe.lowering.project import Action, LoweredProgram
from helixpipe.lowering.streams import check_streams
from helixpipe.planning.overlap.pairs import may_pair
from helixpipe.planning.vocabulary.lanes import BACKWARDS, FORWARDS, WEIGHTS, reordered
from helixpipe.program.costs import Costs
from helixpipe.program.files import load_program, save_program
from helixpipe.program.program import Op, Program, forward_only
from helixpipe.simulate.simulator import simulate
from schedules import Shape, build
from tests.lowering.offloads import offloading_program
from tests.lowering.random_programs import random_costs, random_program
from tests.lowering.rendezvous import Machine


def paired(program: Program, costs: Costs, ahead: float = 2) -> Program:
    prefer, none = (BACKWARDS, FORWARDS, WEIGHTS), range(len(program.stages), len(program.stages))
    return reordered(program, costs, none, prefer, ahead, lambda *pair: may_pair(program, *pair))


def check_pairs(lowered: LoweredProgram) -> None:
    """Both ops of a pair stand next to each other; what either waits for comes before, what waits for either after."""
    graph, place = lowered.graph, {task: at for at, task in enumerate(lowered.order)}
    assert {graph.ops[first] for first in graph.pairs} == lowered.program.pairs
    for first, second in graph.pairs.items():
        assert place[second] == place[first] + 1
        assert graph.num_dependencies[second] == 0 and graph.successors[first] == []
    for task, successors in enumerate(graph.successors):
        assert all(place[task] < place[successor] for successor in successors)
    for stream in lowered.streams:
        for before, after in pairwise(stream):
            if before.action is Action.RUN and before.op in lowered.program.pairs:
                assert after.action is Action.RUN and after.task == graph.pairs[before.task]
    check_streams(lowered)


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_random_programs_with_pairs_end(seed: int) -> None:
    rng = Random(seed)
    program, costs = random_program(rng, ("resident", "replicated", "shipped")), random_costs(rng)
    program = offloading_program(program, seed) if seed % 2 else program
    if program.forward_only:
        return
    made = paired(program, costs, ahead=seed % 4)
    assert sorted(map(sorted, made.ranks)) == sorted(map(sorted, program.ranks))
    lowered = lower(made, costs)
    check_pairs(lowered)
    assert Machine(lowered, rng, blocking=rng.random() < 0.5).run()


def test_a_pair_starts_when_both_can_and_ends_with_both(tmp_path: Path) -> None:
    program = paired(build("1f1b", Shape(2, 8, 4)), unit_costs())
    assert len(program.pairs) >= 4
    costs = random_costs(Random(5))
    simulation = simulate(lower(program, costs), costs)
    graph, bound = simulation.lowered.graph, BoundCosts(program, costs)
    start = {event.op: event.start for event in simulation.timeline.ops}
    end = {event.op: event.end for event in simulation.timeline.ops}
    for first, second in graph.pairs.items():
        forward, backward = graph.ops[first], graph.ops[second]
        assert start[backward] == pytest.approx(end[forward])
        assert end[backward] - start[forward] == pytest.approx(bound.pair_time(forward, backward))
    for event in simulation.timeline.messages:
        assert event.producer is not None and event.consumer is not None
        leaves = max(end[op] for op in (event.producer, program.beside.get(event.producer, event.producer)))
        arrives = min(start[op] for op in (event.consumer, program.beside.get(event.consumer, event.consumer)))
        assert leaves <= event.start + 1e-9 and event.end <= arrives + 1e-9
    save_program(program, tmp_path / "pairs.json")
    assert load_program(tmp_path / "pairs.json", None) == program
    with pytest.raises(ProgramError, match=r"cannot hold what runs beside what"):
        save_program(program, tmp_path / "pairs.csv")
    assert forward_only(program).pairs == frozenset()


@pytest.mark.parametrize(
    ("pair", "sentence"),
    [
        (Op("B", 0, 0), r"a pair is a forward and the backward of another unit after it, and not 0B0 and 0F2"),
        (Op("F", 1, 0), r"and not 1F0 and 1B0\.$"),
        (Op("F", 0, 0), r"and not 0F0 and 0F1\.$"),
        (Op("F", 0, 9), r"0F9 is to run beside another op, but is not there\.$"),
    ],
)
def test_other_pairs_are_refused(pair: Op, sentence: str) -> None:
    program = build("1f1b", Shape(2, 4, 4))
    with pytest.raises(ProgramError, match=sentence):
        lower(replace(program, pairs=frozenset({pair})))


def test_a_pair_that_waits_for_itself_is_a_circle() -> None:
    """The backward of gpipe's first microbatch waits for the forward of its last one."""
    program = build("gpipe", Shape(2, 3, 4))
    with pytest.raises(ProgramError, match="circle"):
        lower(replace(program, pairs=frozenset({Op("F", 0, 2)})))
