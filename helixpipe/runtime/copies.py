"""Copies between a device and its host, beside what it computes: two engines, one for each direction.

On CUDA these are two streams. On the CPU, where device and host share their memory, they are two threads that copy no
faster than they are told to: with them all of offloading runs, and is tested, without a GPU.

Copies of one direction run one after another, in the order in which they were started. None waits for the host, and
the host waits for none, but on the CPU, where it is what computes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from helixpipe.runtime.arena import pageable

Pairs = Sequence[tuple[Tensor, Tensor]]
"""The tensors to copy: (to, from), of equal sizes."""


class Timed(NamedTuple):
    """A copy that is to be timed: its task, and the clock's marks of when it began and ended."""

    task: int
    start: Any
    end: Any


class Copying(Protocol):
    """A copy that was started."""

    def wait(self) -> None:
        """Make the current stream wait until the copy has ended; on the CPU, the caller."""
        ...


class CopyEngine(Protocol):
    """The interface of what copies between device and host."""

    timed: list[Timed]
    """Copies since the list was emptied, of those that had a `mark`."""

    def host_memory(self, nbytes: int) -> Tensor:
        """Return [bytes] of uint8 in the host's memory, to copy to and from; the engine's until `close`."""
        ...

    def start(
        self, pairs: Pairs, inward: bool, after: Copying | None, task: int = -1, mark: Callable[[], Any] | None = None
    ) -> Copying:
        """Copy when the current stream has got here and `after`, of this engine, has ended. inward: to the device.
        mark: time it, as the copy of that task. The tensors belong to the copy until it is waited for."""
        ...

    def finish(self) -> None:
        """Wait, with the host, until nothing is being copied."""
        ...

    def close(self) -> None:
        """Close the engine; nothing is copied afterwards."""
        ...


class StreamCopy:
    """A copy on CUDA: an event of the stream that copies."""

    def __init__(self, event: torch.cuda.Event):
        self.event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


class StreamEngine:
    """Two streams of a CUDA device.

    Memory comes from the stream that computes and goes back to it: a copy waits for what that stream has got to, and
    that stream for the copy before it lets go of what was copied, or uses it (`offload`). So no memory is recorded on a
    stream of copies, and none is reused too early.
    """

    def __init__(self, device: torch.device):
        self._streams = {inward: torch.cuda.Stream(device) for inward in (False, True)}
        self._locked: list[Tensor] = []
        self.timed: list[Timed] = []

    def host_memory(self, nbytes: int) -> Tensor:
        """Return memory page-locked in place: torch's page-locked memory would be rounded up to a power of two."""
        block = pageable(nbytes)
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), nbytes, 0))
        self._locked.append(block)
        return block

    def start(
        self, pairs: Pairs, inward: bool, after: Copying | None, task: int = -1, mark: Callable[[], Any] | None = None
    ) -> StreamCopy:
        stream = self._streams[inward]
        stream.wait_event(torch.cuda.current_stream().record_event())
        if isinstance(after, StreamCopy):
            stream.wait_event(after.event)
        with torch.cuda.stream(stream):
            start = mark() if mark is not None else None
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
            if mark is not None:
                self.timed.append(Timed(task, start, mark()))
            return StreamCopy(stream.record_event())

    def finish(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def close(self) -> None:
        self.finish()
        while self._locked:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._locked.pop().data_ptr()))


class ThreadCopy:
    """A copy on the CPU: ended, or failed, in a thread."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.failure: BaseException | None = None

    def wait(self) -> None:
        self.ended.wait()
        if self.failure is not None:
            raise RuntimeError(f"a copy between device and host failed: {self.failure}") from self.failure


class _QueuedCopy(NamedTuple):
    copy: ThreadCopy
    pairs: Pairs
    after: Copying | None
    task: int
    mark: Callable[[], Any] | None


class ThreadEngine:
    """Two threads.

    bandwidth: bytes a second that each direction copies at most; None: as fast as memory does. delay: seconds that the
    next copy comes late, asked for before each.
    """

    def __init__(self, bandwidth: float | None = None, delay: Callable[[], float] | None = None):
        self._bandwidth, self._delay = bandwidth, delay
        self.timed: list[Timed] = []
        self._jobs: dict[bool, queue.SimpleQueue[_QueuedCopy | None]] = {}
        self._threads: list[threading.Thread] = []

    def host_memory(self, nbytes: int) -> Tensor:
        return pageable(nbytes)

    def start(
        self, pairs: Pairs, inward: bool, after: Copying | None, task: int = -1, mark: Callable[[], Any] | None = None
    ) -> ThreadCopy:
        if inward not in self._jobs:
            jobs = self._jobs[inward] = queue.SimpleQueue()
            name = "copies-in" if inward else "copies-out"
            self._threads.append(threading.Thread(target=self._run, args=(jobs,), name=name, daemon=True))
            self._threads[-1].start()
        copy = ThreadCopy()
        self._jobs[inward].put(_QueuedCopy(copy, pairs, after, task, mark))
        return copy

    def _run(self, jobs: queue.SimpleQueue[_QueuedCopy | None]) -> None:
        while (job := jobs.get()) is not None:
            try:
                self._copy(job)
            except BaseException as error:  # told to who waits for it
                job.copy.failure = error
            copy = job.copy
            del job  # and with it the tensors, which who waits may want to be rid of
            copy.ended.set()

    def _copy(self, job: _QueuedCopy) -> None:
        if job.after is not None:
            job.after.wait()
        if self._delay is not None:
            time.sleep(self._delay())
        start, began = job.mark() if job.mark is not None else None, time.monotonic()
        nbytes = 0
        for to, source in job.pairs:
            to.copy_(source)
            nbytes += source.nbytes
        if self._bandwidth is not None:
            time.sleep(max(0.0, began + nbytes / self._bandwidth - time.monotonic()))
        if job.mark is not None:
            self.timed.append(Timed(job.task, start, job.mark()))

    def finish(self) -> None:
        last = [self.start((), inward, None) for inward in list(self._jobs)]
        for copy in last:
            copy.wait()

    def close(self) -> None:
        for jobs in self._jobs.values():
            jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._jobs.clear()
        self._threads.clear()


def make_engine(device: torch.device) -> CopyEngine:
    """Return the engine for a device."""
    return StreamEngine(device) if device.type == "cuda" else ThreadEngine()
