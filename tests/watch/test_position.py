"""Where a rank says it is: on the host, and on a GPU that is behind."""

from __future__ import annotations

import pytest
import torch

from helixpipe.lowering.lower import lower
from helixpipe.lowering.project import Action, LoweredProgram
from helixpipe.planning.catalogue import Shape
from helixpipe.watch.position import Patience, Peers, Position, describe
from schedules import build

LOWERED = lower(build("1f1b", Shape(2, 2, 2)))
STREAM = LOWERED.streams[1]
"""RECV, RECV, WAIT 1F0, RUN 1F0, RUN 1B0, SEND …"""


class Gpu:
    """Work in the order enqueued, done when the test says so; makes marks."""

    def __init__(self) -> None:
        self.enqueued = 0
        self.done = 0

    def mark(self) -> Mark:
        return Mark(self)


class Mark:
    """As torch.cuda.Event: what was never recorded has been passed."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._place = 0

    def record(self) -> None:
        self._gpu.enqueued += 1
        self._place = self._gpu.enqueued

    def query(self) -> bool:
        return self._gpu.done >= self._place


def seen(position: Position) -> tuple[str, int, bool]:
    view = position.look()
    return view.part.name, view.instruction, view.gpu


def test_parts_and_instructions_of_the_host() -> None:
    position = Position()
    position.enter("set-up", Patience.LONG)
    assert seen(position) == ("set-up", 0, False)
    position.iteration = 4
    position.enter("step")
    position.begin(LOWERED, 1)
    position.at(3)
    assert seen(position) == ("step, iteration 4", 3, False)
    before = position.look().place
    position.at(len(STREAM))
    assert position.look().place > before
    assert describe(position.look(), Peers(), 1, 2).doing == "waits until all it has sent is received"
    position.end()
    assert seen(position) == ("after step, iteration 4", 0, False)
    assert position.look().part.together


def test_what_is_done_for_the_first_time_may_take_long() -> None:
    position = Position()
    patience = []
    for _ in range(2):
        for act in (
            lambda: position.enter("step"),
            lambda: position.begin(LOWERED, 1),
            lambda: position.end(),
            lambda: position.enter("index", Patience.ENDLESS),
        ):
            act()
            patience.append(position.look().part.patience)
    assert patience == [Patience.LONG] * 3 + [Patience.ENDLESS] + [Patience.STEP] * 3 + [Patience.ENDLESS]


def run(position: Position, upto: int) -> None:
    position.enter("step")
    position.begin(LOWERED, 1)
    for index in range(upto):
        position.at(index)


def test_a_gpu_that_is_behind_is_where_the_rank_is() -> None:
    gpu = Gpu()
    position = Position(new_mark=gpu.mark)
    run(position, 4)  # the host is at instruction 3
    for done, instruction in ((0, 0), (1, 0), (2, 1), (3, 2)):
        gpu.done = done
        assert seen(position) == ("step", instruction, True)
    gpu.done = 4
    assert seen(position) == ("step", 3, False)
    for index in range(4, len(STREAM) + 1):
        position.at(index)
    position.end()
    position.enter("after step")
    gpu.done = gpu.enqueued - 1
    assert seen(position) == ("step", len(STREAM), True)  # its last sends
    gpu.done = gpu.enqueued
    assert seen(position) == ("after step", 0, False)
    state = describe(position.look(), Peers(1, (0, 1), (1,), "rank 1"), 31, 30)
    assert state.together and not state.way


def test_marks_of_the_step_before_do_not_count() -> None:
    gpu = Gpu()
    position = Position(new_mark=gpu.mark)
    run(position, len(STREAM) + 1)
    position.end()
    gpu.done = gpu.enqueued
    assert seen(position) == ("after step", 0, False)
    run(position, 4)
    assert seen(position) == ("step", 0, True)
    gpu.done += 3
    assert seen(position) == ("step", 2, True)
    state = describe(position.look(), Peers(5, (4, 5), (5,), "rank 5"), 31, 30)
    assert (
        state.doing
        == f"its GPU waits for the activation of 0F0 from rank 4, to run 1F0 (instruction 2 of {len(STREAM)})"
    )
    assert [(hop.source, hop.target) for hop in state.way] == [(4, 5)]


@pytest.mark.gpu
def test_cuda_events_are_marks() -> None:
    position = Position(new_mark=torch.cuda.Event)
    for _ in range(2):
        run(position, 1)
        torch.cuda._sleep(1_000_000_000)  # clock cycles
        position.at(1)
        position.at(2)
        assert seen(position) == ("step", 0, True)
        torch.cuda.synchronize()
        assert seen(position) == ("step", 2, False)


def test_tensor_parallel_ranks_wait_for_each_other_inside_an_op() -> None:
    position = Position()
    run(position, 4)
    assert not describe(position.look(), Peers(1, (0, 1), (1,)), 31, 30).waits
    state = describe(position.look(), Peers(2, (0, 2), (2, 3)), 31, 30)
    assert [need.rank for need in state.needs] == [3]
    assert state.needs[0].place == state.place


def test_a_sender_waits_until_the_receive_is_posted() -> None:
    """The receiver is past its RECV then, and past that of the last message when all that was sent is to be gone."""
    send = next(index for index, each in enumerate(STREAM) if each.action is Action.SEND)
    position = Position()
    position.begin(LOWERED, 1)
    position.at(send)
    first = describe(position.look(), Peers(1, (0, 1), (1,)), 31, 30)
    position.at(len(STREAM))
    last = describe(position.look(), Peers(1, (0, 1), (1,)), 31, 30)
    receives = [index for index, each in enumerate(LOWERED.streams[0]) if each.action is Action.RECV]
    places = [(need.rank, need.place[1]) for state in (first, last) for need in state.needs]
    assert places == [(0, receives[0] + 1), (0, receives[-1] + 1)]


def test_every_instruction_can_be_described() -> None:
    for schedule in ("1f1b", "seq1f1b", "helix", "weipipe", "wzb1"):
        lowered: LoweredProgram = lower(build(schedule, Shape(4, 8, 8)))
        for pp_rank, stream in enumerate(lowered.streams):
            position = Position()
            position.begin(lowered, pp_rank)
            for index in range(len(stream) + 1):
                position.at(index)
                state = describe(position.look(), Peers(pp_rank, (0, 1, 2, 3), (pp_rank,)), 1, 2)
                assert state.doing.split()[0] in ("runs", "frees", "sends", "posts", "waits", "starts")
