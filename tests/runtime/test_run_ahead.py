"""The host is a few ops ahead of the device and no more; it waits for the one mark that says so."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helixpipe.lowering.lower import lower
from helixpipe.lowering.project import Action
from helixpipe.planning.catalogue import Shape
from helixpipe.runtime import executor as executor_module
from helixpipe.runtime.executor import Executor
from helixpipe.runtime.run_ahead import OPS_AHEAD, RunAhead
from helixpipe.runtime.step_run import StepRun
from helixpipe.runtime.transport import SingleRankTransport
from helixpipe.watch.position import Position
from schedules import build
from tests.lowering.offloads import offloading_program
from tests.runtime.null_model import NullModel, null_step

PART = Position().run


@dataclass
class Device:
    """Does nothing before somebody waits for it, and then no more than that. issued, done: ops. waited: for each wait
    the ops done by then. made: marks."""

    issued: int = 0
    done: int = 0
    made: int = 0
    waited: list[int] = field(default_factory=list)

    def mark(self) -> Mark:
        self.made += 1
        return Mark(self)


@dataclass
class Mark:
    device: Device
    place: int = -1

    def record(self) -> None:
        self.place = self.device.issued

    def synchronize(self) -> None:
        self.device.done = max(self.device.done, self.place)
        self.device.waited.append(self.place)


@pytest.mark.parametrize("ops", [1, 2, OPS_AHEAD])
def test_each_op_waits_for_the_one_so_many_before_it(ops: int) -> None:
    device, draw = Device(), random.Random(ops)
    ahead = RunAhead(device.mark, ops)
    for op in range(50):
        for _ in range(draw.randrange(3)):  # waits for messages, which do not count
            ahead.leave(PART, 0, is_op=False)
        ahead.wait()
        assert device.done == max(op + 1 - ops, 0)
        device.issued += 1
        ahead.leave(PART, 0, is_op=True)
        assert device.issued - device.done <= ops
    assert device.waited == list(range(1, 51 - ops))
    assert device.made <= 3 * (ops + 1)  # of 100: marks are left again once they are passed


def test_marks_are_seen_until_they_are_passed() -> None:
    device = Device()
    ahead = RunAhead(device.mark, 2)
    for op in range(3):
        ahead.wait()
        ahead.leave(PART, 2 * op, is_op=False)
        ahead.leave(PART, 2 * op + 1, is_op=True)
    assert [left.instruction for left in ahead.unpassed()] == [2, 3, 4, 5]
    assert [left.number for left in ahead.unpassed()] == [3, 4, 5, 6]


class _Issuing(StepRun):
    """Counts the ops that are issued, and how many at most are not done."""

    device: Device
    most = 0

    def _run(self, op: Any) -> None:
        device = type(self).device
        device.issued += 1
        type(self).most = max(self.most, device.issued - device.done)
        super()._run(op)


@pytest.mark.parametrize("right", [None, True, False], ids=["one part", "opening confirmed", "opening run again"])
def test_a_run_of_steps_is_bounded_as_a_whole(right: bool | None) -> None:
    """Over the end of a step, which counts as an op, its opening and what comes after."""
    device = Device()

    class Issuing(_Issuing):
        pass

    Issuing.device = device
    lowered = lower(build("none", Shape(1, 7, 2)))
    model: Any = NullModel()
    executor = Executor(0, model, SingleRankTransport(), run_ahead=RunAhead(device.mark))
    executor.step_run = Issuing
    steps, forwards = 3, lowered.openings[0]
    for _ in range(steps):
        executor.run(lowered, null_step(None if right is None else lambda: right))
    ops = sum(each.action is Action.RUN for each in lowered.streams[0])
    again = sum(each.action is Action.RUN for each in lowered.streams[0][:forwards]) if right is False else 0
    assert device.issued == steps * (ops + again)
    assert Issuing.most == OPS_AHEAD
    marks = steps * (ops + again + 1)
    assert len(device.waited) == marks - OPS_AHEAD
    assert device.waited == sorted(device.waited)


def test_on_the_cpu_there_is_none() -> None:
    model: Any = NullModel()
    executor = Executor(0, model, SingleRankTransport())
    assert executor.run_ahead is None and executor.position.trail is None


def test_on_a_gpu_the_host_sleeps_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark that spins takes a core, of which a host has a few for each GPU."""
    blocking: list[bool] = []

    def event(enable_timing: bool = False, blocking_: bool = False, **options: bool) -> Mark:
        blocking.append(options.get("blocking", blocking_))
        return Mark(Device())

    monkeypatch.setattr(executor_module, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "Event", event)
    model: Any = NullModel()
    executor = Executor(0, model, SingleRankTransport())
    assert executor.run_ahead is not None and executor.position.trail is executor.run_ahead
    executor.run_ahead.leave(PART, 0, is_op=True)
    assert blocking == [True]


class _Noting(SingleRankTransport):
    def __init__(self, notes: list[Any]):
        self._notes = notes

    def finish(self) -> None:
        self._notes.append("finish")


class _NotingMarks(RunAhead):
    """Notes the instruction that each mark is left after."""

    def __init__(self, notes: list[Any]):
        super().__init__(Device().mark)
        self._notes = notes

    def leave(self, part: Any, instruction: int, is_op: bool) -> None:
        self._notes.append(instruction)
        super().leave(part, instruction, is_op)


def test_marks_are_left_after_ops_and_waits_and_after_the_last_sends() -> None:
    """So a GPU that hangs in a receive is told from one that hangs in the op after it, and one that hangs in a step's
    last sends from one that has ended it."""
    program = offloading_program(build("none", Shape(1, 3, 2)), seed=0)
    lowered = lower(program)
    stream = lowered.streams[0]
    waits = [index for index, each in enumerate(stream) if each.action is Action.WAIT]
    assert waits, "a program with copies to wait for"
    notes: list[Any] = []
    model: Any = NullModel()
    executor = Executor(0, model, _Noting(notes), run_ahead=_NotingMarks(notes))
    executor.run(lowered, null_step())
    executor.close()
    ops = [index for index, each in enumerate(stream) if each.action is Action.RUN]
    assert notes == [*sorted(waits + ops), "finish", len(stream)]


class Hanging:
    """A device that passes the marks it is allowed to, and then hangs; whoever waits for one hangs with it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._recorded = self._passed = 0
        self._places: dict[int, int] = {}

    def allow(self, marks: int) -> None:
        with self._changed:
            self._passed = marks
            self._changed.notify_all()

    def mark(self) -> Any:
        key = len(self._places)
        self._places[key] = 0
        return SimpleNamespace(record=partial(self._record, key), synchronize=partial(self._wait, key))

    def _record(self, key: int) -> None:
        self._recorded += 1
        self._places[key] = self._recorded

    def _wait(self, key: int) -> None:
        place = self._places[key]
        with self._changed:
            assert self._changed.wait_for(lambda: self._passed >= place, 60.0)


def seen(position: Position, ahead: RunAhead) -> tuple[int, bool, int]:
    """The instruction the rank is said to be at, whether it is its device that is, and the ops issued and not done."""
    view = position.look()
    return view.instruction, view.gpu, sum(left.is_op for left in ahead.unpassed())


@pytest.mark.parametrize("passed", range(0, 12, 3))
def test_where_the_device_hangs_is_known_while_the_host_waits_for_it(passed: int) -> None:
    """By a thread that follows the device, and hangs with it, too."""
    lowered = lower(build("1f1b", Shape(2, 6, 2)))
    stream, device, position = lowered.streams[1], Hanging(), Position()
    ahead = position.trail = RunAhead(device.mark)
    marked = [index for index, each in enumerate(stream) if each.action in (Action.WAIT, Action.RUN)]
    position.begin(lowered, 1)
    closing = threading.Event()

    def host() -> None:
        for index, each in enumerate(stream):
            position.at(index)
            if each.action is Action.RUN:
                ahead.wait()
            if index in marked:
                ahead.leave(position.run, index, is_op=each.action is Action.RUN)

    def follow() -> None:
        while not closing.wait(0.001):
            position.follow()

    threads = [threading.Thread(target=each, daemon=True) for each in (host, follow)]
    device.allow(passed)
    for thread in threads:
        thread.start()
    expected = marked[passed], True, OPS_AHEAD
    deadline = time.monotonic() + 60.0
    while (found := seen(position, ahead)) != expected and time.monotonic() < deadline:
        time.sleep(0.001)
    device.allow(len(stream))
    closing.set()
    for thread in threads:
        thread.join()
    assert found == expected


@pytest.mark.gpu
def test_the_host_waits_for_the_gpu() -> None:
    ahead = RunAhead(lambda: torch.cuda.Event(blocking=True), 1)
    done = torch.zeros(1, device="cuda")
    for number in range(3):
        ahead.wait()
        torch.cuda._sleep(100_000_000)  # clock cycles
        done.fill_(number)
        ahead.leave(PART, number, is_op=True)
    event: Any = ahead.unpassed()[-1].mark
    assert not event.query()
    ahead.wait()
    assert event.query() and done.item() == 2
