"""Passes in another order are refused or change nothing, and streams that lack something are refused."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import permutations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.common.errors import ProgramError, ScheduleError
from helixpipe.costs.by_hand import unit_costs
from helixpipe.lowering.build import PASSES, Pass, build_graph, check_passes
from helixpipe.lowering.graph import Graph
from helixpipe.lowering.lower import lower, lowered_valid
from helixpipe.lowering.project import Action, Instruction, LoweredProgram
from helixpipe.lowering.streams import check_streams
from helixpipe.program.program import Program
from schedules import CATALOGUE, Shape, build
from tests.lowering.offloads import offloading_program
from tests.lowering.random_programs import random_program
from tests.lowering.sharing import sharing_program


def full_program(seed: int) -> Program:
    """A random program, most of which have some of every kind of traffic."""
    return sharing_program(offloading_program(random_program(Random(seed), divided=seed % 3 == 0), seed), seed)


def kinds(graph: Graph) -> set[str]:
    """Of the transfers that there are."""
    return {transfer.kind for transfer in graph.transfers}


def allowed(passes: Sequence[Pass]) -> bool:
    try:
        check_passes(passes)
    except ValueError:
        return False
    return True


ALLOWED = [passes for passes in permutations(PASSES) if allowed(passes)]


def test_two_swapped_passes_are_refused() -> None:
    chimera = build("chimera", Shape(4, 4, 4))
    sums = next(each for each in PASSES if "replica_sum" in each.gives)
    sums_first = (sums, *(each for each in PASSES if each is not sums))
    with pytest.raises(ValueError, match="pass replica_sums needs activation, gradient, "):
        build_graph(chimera, passes=sums_first)
    assert 1 < len(ALLOWED) < 10


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), passes=st.sampled_from(ALLOWED))
def test_streams_of_random_programs_have_what_they_need(seed: int, passes: Sequence[Pass]) -> None:
    """In every order of the passes that is not refused; and each gives what it says and no other kind."""
    program = full_program(seed)
    program.derive("graph", None, lambda: build_graph(replace(program), passes=passes))
    check_streams(lowered_valid(program, unit_costs()))
    before: set[str] = set()
    for number, own in enumerate(PASSES, start=1):
        after = kinds(build_graph(program, passes=PASSES[:number]))
        assert after - before <= own.gives
        before = after


@pytest.mark.parametrize("name", CATALOGUE)
def test_streams_of_every_schedule_have_what_they_need(name: str) -> None:
    """Of the shapes that it takes, which every schedule does one of."""
    checked = 0
    for shape in (Shape(1, 4, 8), Shape(4, 8, 8), Shape(2, 4, 8, chunks=2)):
        with suppress(ScheduleError):
            check_streams(lower(build(name, shape)))
            checked += 1
    assert checked >= (3 if CATALOGUE[name].chunks and not CATALOGUE[name].one_rank else 1)


def without(lowered: LoweredProgram, rank: int, place: int) -> LoweredProgram:
    stream = lowered.streams[rank]
    return changed(lowered, rank, (*stream[:place], *stream[place + 1 :]))


def changed(lowered: LoweredProgram, rank: int, stream: tuple[Instruction, ...]) -> LoweredProgram:
    return replace(lowered, streams=(*lowered.streams[:rank], stream, *lowered.streams[rank + 1 :]))


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_what_is_left_out_or_moved_is_noticed(seed: int, data: st.DataObject) -> None:
    """Any instruction but those that only let go of memory."""
    lowered = lower(full_program(seed))
    places = [
        (rank, place)
        for rank, stream in enumerate(lowered.streams)
        for place, step in enumerate(stream)
        if step.action is not Action.FREE
    ]
    rank, place = data.draw(st.sampled_from(places))
    stream = lowered.streams[rank]
    with pytest.raises(ProgramError, match=f"are inconsistent: rank {rank}"):
        check_streams(without(lowered, rank, place))
    with pytest.raises(ProgramError, match=f"are inconsistent: rank {rank}"):
        check_streams(changed(lowered, rank, (*stream[: place + 1], *stream[place:])))
    later = [at for own, at in places if own == rank and at > place and stream[at].action is not Action.WAIT]
    if later and stream[place].action is not Action.WAIT:
        swapped = list(stream)
        swapped[place], swapped[later[0]] = swapped[later[0]], swapped[place]
        with pytest.raises(ProgramError, match=f"are inconsistent: rank {rank}"):
            check_streams(changed(lowered, rank, tuple(swapped)))


def test_a_wait_comes_before_the_op_that_needs_it() -> None:
    lowered = lower(build("1f1b", Shape(2, 4, 4)))
    stream = list(lowered.streams[1])
    wait = next(place for place, step in enumerate(stream) if step.action is Action.WAIT)
    assert stream[wait + 1].action is Action.RUN
    stream[wait], stream[wait + 1] = stream[wait + 1], stream[wait]
    with pytest.raises(ProgramError, match=r"needs Buffer.* which is not there yet"):
        check_streams(changed(lowered, 1, tuple(stream)))
