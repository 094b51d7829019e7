"""Records the times of one step, op by op (`--record-timeline`), without waiting for the device before its end."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from helixpipe.lowering.project import LoweredProgram
from helixpipe.program.program import Op
from helixpipe.program.timeline import OpEvent, Timeline, TransferEvent
from helixpipe.program.transfer import Transfer
from helixpipe.runtime.copies import Timed


class Clock:
    """Marks on the time of a device: on CUDA events in its current stream, on the CPU what `now` returns, in seconds.

    event: makes an event that can be recorded, waited for and subtracted; CUDA's, but for tests.
    """

    def __init__(
        self,
        on: torch.device,
        now: Callable[[], float] = time.perf_counter,
        event: Callable[[], Any] = lambda: torch.cuda.Event(enable_timing=True),
    ):
        self._events = on.type == "cuda"
        self._now, self._event = now, event

    def mark(self) -> Any:
        """Return a mark of the moment when the device reaches it."""
        if not self._events:
            return self._now()
        event = self._event()
        event.record()
        return event

    def begin(self) -> tuple[Any, float]:
        """Return a mark that the device has passed, and the host's time of it."""
        mark = self.mark()
        if self._events:
            mark.synchronize()
            mark = self.mark()  # the device has nothing to do: it gets there at once
        return mark, self._now()

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds from one mark to a later one; waits until the device has passed both."""
        if not self._events:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000.0


@dataclass
class Record:
    """Times of one step on this rank, in seconds of the host's monotonic clock, which the ranks of one machine share.

    posted, waited, arrived: of messages that come here, when their receive was posted, when this rank began to wait for
    it, and when that had ended. copies: start and end of each, by task. held_up: how long ops waited for copies, less
    what they waited after that for messages, which would have held them up anyway. begin: when the recording began,
    right after all ranks had met. machine: its name.
    """

    ops: list[tuple[Op, float, float]] = field(default_factory=list)
    sent: dict[int, float] = field(default_factory=dict)
    arrived: dict[int, float] = field(default_factory=dict)
    posted: dict[int, float] = field(default_factory=dict)
    waited: dict[int, float] = field(default_factory=dict)
    copies: dict[int, tuple[float, float]] = field(default_factory=dict)
    held_up: float = 0.0
    begin: float = 0.0
    machine: str = ""


class Between(NamedTuple):
    """The time in the middle between two marks."""

    start: Any
    end: Any


@dataclass
class _HeldUp:
    """Waits before one op. waits: for copies, as marks of their begins and ends. arrived: the last message that was
    waited for after the first of these.
    """

    waits: list[tuple[Any, Any]] = field(default_factory=list)
    arrived: Any = None


class Recorder:
    """Makes the record of one step: marks during it, times after it."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._zero, self._begin = clock.begin()
        self._ops: list[tuple[Op, Any, Any]] = []
        self._sent: list[tuple[int, Any]] = []
        self._posted: list[tuple[int, Any]] = []
        self._arrived: list[tuple[int, Any, Any]] = []
        self._held_up: list[_HeldUp] = []
        self._before_op: _HeldUp | None = None  # since the op before

    def mark(self) -> Any:
        return self._clock.mark()

    def ran(self, op: Op, start: Any) -> None:
        """Record that an op has run; start: the mark before it."""
        self._ops.append((op, start, self.mark()))
        self._before_op = None

    def ran_beside(self, op: Op, start: Any) -> Any:
        """Record that an op has run beside one that `ran` comes for next, and return the mark before that. They share
        the time: the first is shown in the first half of it, the other in the second."""
        between = Between(start, self.mark())
        self._ops.append((op, start, between))
        return between

    def sent(self, message: Transfer) -> None:
        """Record that a message may be sent once the device gets here."""
        self._sent.append((message.number, self.mark()))

    def posted(self, message: Transfer) -> None:
        """Record that a message may come once the device gets here."""
        self._posted.append((message.number, self.mark()))

    def arrived(self, message: Transfer, start: Any) -> None:
        """Record that a message has been waited for; start: the mark before that."""
        self._arrived.append((message.number, start, self.mark()))
        if self._before_op is not None:
            self._before_op.arrived = self._arrived[-1][2]

    def held_up(self, start: Any) -> None:
        """Record that a copy has been waited for; start: the mark before it."""
        if self._before_op is None:
            self._before_op = _HeldUp()
            self._held_up.append(self._before_op)
        self._before_op.waits.append((start, self.mark()))

    def read(self, copies: Iterable[Timed] = ()) -> Record:
        """Return the record after the step and its copies; waits for the device."""
        return Record(
            [(op, self._time(start), self._time(end)) for op, start, end in self._ops],
            {number: self._time(mark) for number, mark in self._sent},
            {number: self._time(mark) for number, _, mark in self._arrived},
            {number: self._time(mark) for number, mark in self._posted},
            {number: self._time(start) for number, start, _ in self._arrived},
            {task: (self._time(start), self._time(end)) for task, start, end in copies},
            sum(self._for_copies(each) for each in self._held_up),
            self._begin,
            platform.node(),
        )

    def _for_copies(self, held_up: _HeldUp) -> float:
        waits = [(self._time(start), self._time(end)) for start, end in held_up.waits]
        for_messages = 0.0 if held_up.arrived is None else self._time(held_up.arrived) - waits[-1][1]
        return max(0.0, sum(end - start for start, end in waits) - max(0.0, for_messages))

    def _time(self, mark: Any) -> float:
        if isinstance(mark, Between):
            return (self._time(mark.start) + self._time(mark.end)) / 2
        return self._begin + self._clock.seconds(self._zero, mark)


def merge_records(lowered: LoweredProgram, records: Sequence[Record], title: str) -> Timeline:
    """Merge the records that all ranks made of the same step into one timeline in seconds, which starts with the first
    op.

    Ranks of several machines, whose clocks differ, are taken to have begun together.
    """
    shared = len({record.machine for record in records}) == 1
    zeros = [0.0 if shared else record.begin for record in records]
    begin = min(
        (start - zero for record, zero in zip(records, zeros, strict=True) for _, start, _ in record.ops), default=0.0
    )
    zeros = [zero + begin for zero in zeros]
    ops = [
        OpEvent(rank, op, start - zeros[rank], end - zeros[rank])
        for rank, record in enumerate(records)
        for op, start, end in record.ops
    ]
    moved = []
    for each in lowered.graph.transfers:
        if each.resource == "link":
            sent = records[each.source].sent.get(each.number)
            arrived = records[each.target].arrived.get(each.number)
        else:
            sent, arrived = records[each.source].copies.get(lowered.graph.task(each), (None, None))
        if sent is not None and arrived is not None:
            start, end = sent - zeros[each.source], arrived - zeros[each.target]
            moved.append(TransferEvent(each.kind, each.ranks, each.producer, each.consumer, start, max(start, end)))
    return Timeline(title, lowered.program.num_ranks, ops, moved, "s")
