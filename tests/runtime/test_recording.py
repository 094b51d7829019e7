"""Times of a step: marks on a device that lags behind the host, read when the step is over."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from helixpipe.adapt.reports import Received
from helixpipe.lowering.lower import lower
from helixpipe.program.program import Op
from helixpipe.runtime.recording import Clock, Record, Recorder, merge_records
from megatron.pretrain.resilience.watching import report_of
from schedules import Shape, build

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@dataclass
class Device:
    """A queue of work and events. The host hands it out at once; only who waits lets it run."""

    now: float = 50.0
    waits: int = 0
    queue: list[float | Event] = field(default_factory=list)

    def compute(self, seconds: float) -> None:
        self.queue.append(seconds)

    def run(self) -> None:
        for each in self.queue:
            if isinstance(each, Event):
                each.reached = self.now
            else:
                self.now += each
        self.queue.clear()


class Event:
    """As torch.cuda.Event(enable_timing=True)."""

    def __init__(self, device: Device):
        self.device = device
        self.reached: float | None = None

    def record(self) -> None:
        self.device.queue.append(self)

    def synchronize(self) -> None:
        self.device.waits += 1
        self.device.run()

    def elapsed_time(self, end: Event) -> float:
        assert self.reached is not None and end.reached is not None, "CUDA would refuse"
        return 1000.0 * (end.reached - self.reached)


def test_nothing_waits_for_the_device_until_the_step_is_over() -> None:
    device = Device()
    lowered = lower(build("1f1b", Shape(2, 1, layers=2)))
    sent, arrived = lowered.messages
    device.compute(3.0)  # of the step before
    recorder = Recorder(Clock(CUDA, now=lambda: 1000.0, event=lambda: Event(device)))
    assert device.waits == 1 and device.now == 53.0  # the zero: the device has come to where the host is
    start = recorder.mark()
    device.compute(2.0)
    recorder.ran(Op("F", 0, 0), start)
    recorder.sent(sent)
    recorder.posted(arrived)
    begin = recorder.mark()
    device.compute(4.0)  # a wait for the message
    recorder.arrived(arrived, begin)
    start = recorder.mark()
    device.compute(1.0)
    recorder.ran(Op("B", 0, 0), start)
    assert device.waits == 1
    record = recorder.read()
    assert record.ops == [(Op("F", 0, 0), 1000.0, 1002.0), (Op("B", 0, 0), 1006.0, 1007.0)]
    assert (record.sent, record.arrived) == ({sent.number: 1002.0}, {arrived.number: 1006.0})
    assert (record.posted, record.waited) == ({arrived.number: 1002.0}, {arrived.number: 1002.0})
    assert record.begin == 1000.0 and record.machine
    report = report_of(record, step=4, rank=0, offset=1000.0)
    assert report.received == {arrived.number: Received(2.0, 2.0, 6.0)} and report.sent == {sent.number: 2.0}
    assert report.ops == (("F", 0, 0, 2.0, 1), ("B", 0, 0, 1.0, 1)) and (report.begin, report.end) == (0.0, 7.0)


def test_on_the_cpu_a_mark_is_the_hosts_time() -> None:
    times = iter([10.0, 10.0, 11.0, 13.0])
    recorder = Recorder(Clock(CPU, now=lambda: next(times)))
    recorder.ran(Op("F", 0, 0), recorder.mark())
    assert recorder.read().ops == [(Op("F", 0, 0), 11.0, 13.0)]


def test_a_wait_for_a_copy_counts_where_no_message_is_later() -> None:
    lowered = lower(build("1f1b", Shape(2, 1, layers=2)))
    message = lowered.messages[0]
    now = [0.0]
    recorder = Recorder(Clock(CPU, now=lambda: now[0]))

    def copy_until(time: float) -> None:
        start = recorder.mark()
        now[0] = time
        recorder.held_up(start)

    copy_until(3.0)
    copy_until(5.0)
    recorder.ran(Op("F", 0, 0), recorder.mark())  # 5 late: two copies
    copy_until(9.0)
    now[0] = 20.0
    recorder.arrived(message, recorder.mark())
    recorder.ran(Op("B", 0, 0), recorder.mark())  # would have waited until 20 anyway
    recorder.arrived(message, recorder.mark())
    copy_until(22.0)
    recorder.ran(Op("F", 0, 1), recorder.mark())  # 2 late, after the message had come
    assert recorder.read().held_up == 7.0


@pytest.mark.parametrize(("machines", "first", "second"), [("aa", 0.0, 497.0), ("ab", 0.0, 2.0)])
def test_clocks_of_one_machine_agree_and_others_begin_together(machines: str, first: float, second: float) -> None:
    lowered = lower(build("1f1b", Shape(2, 1, layers=2)))
    (message,) = (each for each in lowered.messages if each.source == 0)
    records = [
        Record([(Op("F", 0, 0), 105.0, 106.0)], {message.number: 106.0}, {}, begin=102.0, machine=machines[0]),
        Record([(Op("F", 1, 0), 602.0, 603.0)], {}, {message.number: 602.0}, begin=597.0, machine=machines[1]),
    ]
    timeline = merge_records(lowered, records, "measured")
    assert [event.start for event in timeline.ops] == [first, second]
    (arrow,) = timeline.messages
    assert (arrow.start, arrow.end) == (1.0, second)


@pytest.mark.gpu
def test_events_of_a_gpu() -> None:
    device = torch.device("cuda")
    recorder = Recorder(Clock(device))
    start = recorder.mark()
    matrix = torch.ones(4096, 4096, device=device)
    for _ in range(10):
        matrix = matrix @ matrix
    recorder.ran(Op("F", 0, 0), start)
    ((_, begin, end),) = recorder.read().ops
    assert 0 < recorder.read().begin <= begin < end
