"""Streams on GPUs: few hardware queues, few multiprocessors (SMs), hosts that run ahead."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.lowering.lower import lower
from helixpipe.lowering.project import Action, Instruction, LoweredProgram
from schedules import CATALOGUE, Shape, build
from tests.lowering.devices import Devices, Hardware, most_lanes
from tests.lowering.offloads import offloading_program
from tests.lowering.random_programs import random_costs, random_program
from tests.lowering.rendezvous import with_crossed_receives
from tests.lowering.sharing import sharing_program


def any_device(lowered: LoweredProgram, rng: Random) -> Iterable[Hardware]:
    """Return what the streams must end on: with one queue, whatever fits alone; with more, where no stream needs the
    multiprocessors of another. A host may be an op ahead, or as far as there are ops."""
    ctas, ahead = rng.choice((1, 4, 32)), rng.choice((1, 2, None))
    yield Hardware(1, ctas, ctas, ahead)
    yield Hardware(rng.choice((2, 3, None)), ctas * most_lanes(lowered) + 1, ctas, ahead)


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32))
def test_random_programs_end_on_any_device(seed: int) -> None:
    rng = Random(seed)
    program, costs = (
        random_program(rng, divided=seed % 3 == 0),
        replace(random_costs(rng), copy=rng.choice((0.0, 0.1, 5.0))),
    )
    program = sharing_program(program, seed)
    lowered = lower(offloading_program(program, seed) if seed % 2 else program, costs)
    for hardware in any_device(lowered, rng):
        assert Devices(lowered, rng, hardware).run()


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name != "none"])
def test_the_catalogue_ends_on_any_device(name: str) -> None:
    chunks = 2 if CATALOGUE[name].chunks else 1
    uneven = (6,) if name.startswith(("weipipe", "wzb")) else ()  # some ranks then end long before others
    for microbatches in (8, *uneven):
        program = build(name, Shape(4, microbatches, 8, chunks))
        for seed, each in enumerate((program, offloading_program(program, 1))):
            lowered = lower(each)
            for hardware in any_device(lowered, Random(seed)):
                assert Devices(lowered, Random(seed), hardware).run()


@pytest.mark.parametrize("name", ["helix", "weipipe"])
def test_receives_posted_for_the_whole_run_ahead_would_hang(name: str) -> None:
    """On an H100 with NCCL's 32 blocks a channel: they take all 132 multiprocessors long before their messages come.
    In their places they do not, nor where a channel may have few."""
    lowered = lower(build(name, Shape(8, 16, 8)))
    for seed in range(3):
        assert Devices(lowered, Random(seed), Hardware(sms=132, ctas=32)).run()
        assert not Devices(lowered, Random(seed), Hardware(sms=132, ctas=32), in_place=False).run()
        assert not Devices(lowered, Random(seed), Hardware(sms=78, ctas=32, ahead=4), in_place=False).run()
        assert Devices(lowered, Random(seed), Hardware(sms=132, ctas=8), in_place=False).run()


def test_with_few_multiprocessors_and_many_queues_places_alone_do_not_save() -> None:
    """78 multiprocessors have room for two channels of 32 blocks, and helix on 8 ranks has 14 channels a rank: each
    must have fewer blocks, or the device one queue."""
    lowered = lower(build("helix", Shape(8, 16, 8)))
    assert not Devices(lowered, Random(0), Hardware(sms=78, ctas=32)).run()
    assert Devices(lowered, Random(0), Hardware(sms=78, ctas=4)).run()
    assert Devices(lowered, Random(0), Hardware(queues=1, sms=78, ctas=32)).run()


def an_op_early(lowered: LoweredProgram) -> LoweredProgram:
    """Each RECV before the op that precedes it."""
    streams = []
    for stream in lowered.streams:
        moved: list[Instruction] = []
        last = 0  # place of the last op
        for instruction in stream:
            if instruction.action is Action.RECV:
                moved.insert(last, instruction)
                last += 1
            else:
                if instruction.action is Action.RUN:
                    last = len(moved)
                moved.append(instruction)
        streams.append(tuple(moved))
    return replace(lowered, streams=tuple(streams))


@pytest.mark.parametrize("name", ["interleaved-1f1b", "helix", "weipipe"])
def test_where_streams_share_a_queue_receives_must_keep_their_place(name: str) -> None:
    """As on a GPU with CUDA_DEVICE_MAX_CONNECTIONS=1: a receive that waits for the one before it in its channel holds
    up an op that both may need. Two ops early is too early."""
    lowered = lower(build(name, Shape(4, 8, 8)))
    early = an_op_early(an_op_early(lowered))
    assert [sorted(map(str, stream)) for stream in early.streams] == [sorted(map(str, s)) for s in lowered.streams]
    assert not Devices(early, Random(0), Hardware(queues=1)).run()
    assert Devices(lowered, Random(0), Hardware(queues=1)).run()


def test_both_ends_must_agree_on_the_order_of_a_channel() -> None:
    lowered = lower(build("gpipe", Shape(2, 2, 2)))
    assert Devices(lowered, Random(0), Hardware()).run()
    assert not Devices(with_crossed_receives(lowered), Random(0), Hardware()).run()
