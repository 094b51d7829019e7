"""Where a rank says it is: on the host, and on a GPU that is behind."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
import torch

from helixpipe.costs.by_hand import unit_costs
from helixpipe.lowering.lower import lower
from helixpipe.lowering.project import Action, LoweredProgram
from helixpipe.planning.catalogue import Shape
from helixpipe.planning.memory.offload import OffloadOptions
from helixpipe.planning.vocabulary.choice import split_heads
from helixpipe.runtime.run_ahead import RunAhead
from helixpipe.watch.position import Left, Patience, Peers, Position, describe
from schedules import build

LOWERED = lower(build("1f1b", Shape(2, 2, 2)))
STREAM = LOWERED.streams[1]
"""RECV, RECV, WAIT 1F0, RUN 1F0, RUN 1B0, SEND …"""


class Gpu:
    """Work in the order enqueued, done when the test says so. A trail of marks, one for each piece of work."""

    def __init__(self) -> None:
        self.done = 0
        self.left: list[Left] = []

    def leave(self, position: Position, instruction: int) -> None:
        number = len(self.left) + 1
        self.left.append(Left(number, position.run, instruction, False, Mark(self, number)))

    def unpassed(self) -> list[Left]:
        return self.left.copy()


class Hangs(RuntimeError):
    """Whoever waits for the device now would wait for ever."""


class Mark:
    """As torch.cuda.Event."""

    def __init__(self, gpu: Gpu, place: int) -> None:
        self._gpu = gpu
        self._place = place

    def record(self) -> None: ...

    def synchronize(self) -> None:
        if self._gpu.done < self._place:
            raise Hangs


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


def run(position: Position, upto: int, gpu: Gpu | None = None) -> None:
    """The host has begun instruction `upto` - 1. A GPU has every one to do."""
    position.trail = gpu
    position.enter("step")
    position.begin(LOWERED, 1)
    for index in range(upto):
        position.at(index)
        if gpu is not None and index < upto - 1:
            gpu.leave(position, index)


def followed(position: Position) -> tuple[str, int, bool]:
    """Return what is seen once the thread that follows the GPU has got as far as that."""
    with suppress(Hangs):
        position.follow()
    return seen(position)


def test_a_gpu_that_is_behind_is_where_the_rank_is() -> None:
    gpu, position = Gpu(), Position()
    run(position, 4, gpu)  # the host is at instruction 3
    for done in range(3):
        gpu.done = done
        assert followed(position) == ("step", done, True)
    gpu.done = 3
    assert followed(position) == ("step", 3, False)
    gpu.leave(position, 3)
    assert followed(position) == ("step", 3, False)  # the host is still there
    for index in range(4, len(STREAM) + 1):
        position.at(index)
        gpu.leave(position, index)
    position.end()
    position.enter("after step")
    gpu.done = len(gpu.left) - 1
    assert followed(position) == ("step", len(STREAM), True)  # its last sends
    gpu.done = len(gpu.left)
    assert followed(position) == ("after step", 0, False)
    state = describe(position.look(), Peers(1, (0, 1), (1,), "rank 1"), 31, 30)
    assert state.together and not state.way


def test_looking_waits_for_nothing() -> None:
    """What nobody has followed yet may not have been passed."""
    gpu, position = Gpu(), Position()
    run(position, 4, gpu)
    gpu.done = 2
    assert seen(position) == ("step", 0, True)
    assert followed(position) == seen(position) == ("step", 2, True)


def test_a_step_that_the_gpu_has_not_ended_is_where_the_rank_is() -> None:
    gpu, position = Gpu(), Position()
    run(position, len(STREAM) + 1, gpu)
    position.end()
    gpu.done = len(gpu.left) - 1
    run(position, 4, gpu)
    first = position.look().part.number
    assert followed(position) == ("step", len(STREAM) - 1, True)
    gpu.done += 1
    assert followed(position) == ("step", 0, True)
    assert position.look().part.number > first
    gpu.done += 2
    assert followed(position) == ("step", 2, True)
    state = describe(position.look(), Peers(5, (4, 5), (5,), "rank 5"), 31, 30)
    assert (
        state.doing
        == f"its GPU waits for the activation of 0F0 from rank 4, to run 1F0 (instruction 2 of {len(STREAM)})"
    )
    assert [(hop.source, hop.target) for hop in state.way] == [(4, 5)]


@pytest.mark.gpu
def test_the_place_of_a_gpu_is_followed() -> None:
    position = Position()
    ahead = position.trail = RunAhead(lambda: torch.cuda.Event(blocking=True))
    for _ in range(2):
        position.enter("step")
        position.begin(LOWERED, 1)
        position.at(0)
        ahead.leave(position.run, 0, is_op=False)
        torch.cuda._sleep(1_000_000_000)  # clock cycles
        position.at(1)
        ahead.leave(position.run, 1, is_op=True)
        position.at(2)
        following = threading.Thread(target=position.follow, daemon=True)
        following.start()
        assert seen(position)[2]
        following.join()
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


def test_whoever_waits_for_a_collective_waits_for_all_its_ranks() -> None:
    """Of a divided head: rank 1 waits until the others have started what rank 2 gives first."""
    lowered = lower(split_heads(build("1f1b", Shape(3, 3, 3)), unit_costs()))
    wait = next(index for index, each in enumerate(lowered.streams[1]) if str(each).startswith("WAIT head_input"))
    transfer = lowered.streams[1][wait].transfer
    position = Position()
    position.begin(lowered, 1)
    position.at(wait)
    state = describe(position.look(), Peers(11, (10, 11, 12), (11,)), 31, 30)
    starts = [next(i for i, each in enumerate(stream) if each.transfer == transfer) for stream in lowered.streams]
    assert [(need.rank, need.place[1]) for need in state.needs] == [(10, starts[0] + 1), (12, starts[2] + 1)]
    assert state.waits and state.doing.startswith("waits until the end of the hidden states to all parts of the head: ")


def test_every_instruction_can_be_described() -> None:
    programs = [build(schedule, Shape(4, 8, 8)) for schedule in ("1f1b", "seq1f1b", "helix", "weipipe", "wzb1")]
    for program in (*programs, split_heads(programs[0], unit_costs())):
        lowered: LoweredProgram = lower(program)
        for pp_rank, stream in enumerate(lowered.streams):
            position = Position()
            position.begin(lowered, pp_rank)
            for index in range(len(stream) + 1):
                position.at(index)
                state = describe(position.look(), Peers(pp_rank, (0, 1, 2, 3), (pp_rank,)), 1, 2)
                assert state.doing.split()[0] in ("runs", "frees", "sends", "posts", "waits", "starts")


def test_a_copy_is_told_from_what_is_freed() -> None:
    shape = Shape(2, 4, 4, offload=OffloadOptions("1"))
    lowered = lower(build("gpipe", shape))
    position = Position()
    position.begin(lowered, 0)
    said = {}
    for index, each in enumerate(lowered.streams[0]):
        position.at(index)
        if each.transfer is not None:
            doing = describe(position.look(), Peers(0, (0, 1), (0,)), 1, 2).doing
            said.setdefault((each.action, each.transfer.kind), doing)
    assert said[Action.START, "offload"].startswith("starts the copy to the host: what leaves after 0F0 (")
    assert said[Action.WAIT, "offload"].startswith("waits until the end of the copy to the host: what leaves after 0F0")
    assert said[Action.START, "fetch"].startswith("starts the copy back: what is needed by 0B0 (")
    assert said[Action.WAIT, "fetch"].startswith("waits until the end of the copy back: what is needed by 0B0 (")
