"""Point-to-point messages over gloo: see `transport`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

TENSORS_PER_MESSAGE = 8
"""More than any message has (four: q, k, v and the residual)."""

HELD_BYTES = 4 << 20
"""The most bytes of sent messages held until a rank waits for them: a few large ones, or all short ones of a step."""


@dataclass
class GlooReceipt:
    buffers: list[torch.Tensor]
    works: list[Any]
    device: torch.device
    lock: threading.Lock = field(default_factory=threading.Lock)
    failure: BaseException | None = None

    def wait(self) -> tuple[torch.Tensor, ...]:
        return tuple(buffer.to(self.device, non_blocking=True) for buffer in self.arrive())

    def arrive(self) -> list[torch.Tensor]:
        """Wait, in any thread, and return the buffers. A receive of gloo may be waited for once only; who comes after a
        failure fails alike."""
        with self.lock:
            if self.failure is not None:
                raise self.failure
            try:
                while self.works:
                    self.works.pop().wait()
            except BaseException as error:
                self.failure = error
                raise
        return self.buffers


class _Sent(NamedTuple):
    """One message being sent: the tensors stay alive until the works are done."""

    tensors: list[torch.Tensor]
    works: list[Any]


@dataclass
class GlooTransport:
    """Gloo over TCP or shared memory. A CUDA tensor travels through pinned host memory, so ranks can share a GPU.

    Memory. gloo keeps no copy of what it sends and moves a byte only when the receiver has posted. That a send has
    ended it tells only to who waits for it: until then `is_completed` says no, and a wait that times out breaks the
    group. Yet a thread that wakes for each costs more than a short message does. So what is sent is held here up to
    `HELD_BYTES`; when there is more, all of it is handed to one thread a rank, which waits for it, oldest first, and
    releases it. `finish` waits for the rest.

    No deadlock. Until `finish`, the thread that computes waits for no send, only for receives; streams that waited for
    their sends too would end, by `lowering`'s theorem, so these do. `finish` comes after all of a stream, or all of its
    opening, and waits only for what the others receive in theirs, whatever order it waits in. What has to come first,
    from another rank (`pass_on`) or from the GPU, is waited for by a thread a message.
    """

    group: dist.ProcessGroup
    device: torch.device

    def __post_init__(self) -> None:
        self._held: list[_Sent] = []
        self._held_bytes = 0
        self._holding = threading.Lock()  # what is passed on starts in threads of its own
        self._outbox: queue.Queue[list[_Sent] | None] = queue.Queue()
        self._failure: BaseException | None = None
        self._reaper = threading.Thread(target=self._reap, name="gloo-sends", daemon=True)
        self._reaper.start()
        self._starting: list[threading.Thread] = []
        self._copying = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def mark(self) -> Any:
        return None if self._copying is None else torch.cuda.current_stream().record_event()

    def send(self, tensors: Sequence[torch.Tensor], target: int, number: int, since: Any = None) -> None:
        self._raise_failure()
        if self._copying is None:
            self._start([tensor.detach().contiguous() for tensor in tensors], target, number)
        else:
            self._start_later(self._to_host(tensors, self.mark() if since is None else since), target, number)

    def pass_on(self, receipt: Any, target: int, number: int) -> None:
        assert isinstance(receipt, GlooReceipt)
        self._start_later(receipt.arrive, target, number)

    def _to_host(self, tensors: Sequence[torch.Tensor], since: Any) -> Callable[[], list[torch.Tensor]]:
        """Start copying to pinned memory, beside what is computed. What is returned waits for the copies, which must be
        done before gloo reads them and before the originals' memory may be used again; it sleeps until then, since
        there is a thread for each message."""
        assert self._copying is not None
        self._copying.wait_event(since)
        with torch.cuda.stream(self._copying):
            copies = [_to_pinned(tensor.detach()) for tensor in tensors]
            copied = torch.cuda.Event(blocking=True)
            copied.record()
        originals = list(tensors)

        def wait() -> list[torch.Tensor]:
            with torch.cuda.device(self.device):  # a new thread's is the first
                copied.synchronize()
            originals.clear()
            return copies

        return wait

    def _start_later(self, wait: Callable[[], list[torch.Tensor]], target: int, number: int) -> None:
        """Send what `wait` returns, once it returns."""

        def start() -> None:
            try:
                self._start(wait(), target, number)
            except BaseException as error:
                self._failure = self._failure or error

        thread = threading.Thread(target=start, name="gloo-starting", daemon=True)  # never keeps a rank alive
        thread.start()
        self._starting.append(thread)

    def _start(self, tensors: list[torch.Tensor], target: int, number: int) -> None:
        try:
            works = [self.group.send([tensor], target, _tag(number, index)) for index, tensor in enumerate(tensors)]
        except RuntimeError as error:  # known already that the other rank has gone
            self._failure = error
            self._raise_failure()
        with self._holding:
            self._held.append(_Sent(tensors, works))
            self._held_bytes += sum(tensor.untyped_storage().nbytes() for tensor in tensors)
            if self._held_bytes > HELD_BYTES:
                self._outbox.put(self._take_held())

    def _take_held(self) -> list[_Sent]:
        held, self._held, self._held_bytes = self._held, [], 0
        return held

    def receive(self, shapes: Sequence[torch.Size], dtype: torch.dtype, source: int, number: int) -> GlooReceipt:
        buffers = [self._buffer(shape, dtype) for shape in shapes]
        works = [self.group.recv([buffer], source, _tag(number, index)) for index, buffer in enumerate(buffers)]
        return GlooReceipt(buffers, works, self.device)

    def _buffer(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer to receive into."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._copying is not None)

    def finish(self) -> None:
        for thread in self._starting:
            thread.join()
        self._starting.clear()
        self._outbox.join()
        self._release(self._take_held())
        self._raise_failure()

    def close(self) -> None:
        self._outbox.put(None)
        self._reaper.join(timeout=1.0)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"sending to another pipeline rank failed: {self._failure}") from self._failure

    def _reap(self) -> None:
        while (messages := self._outbox.get()) is not None:
            self._release(messages)
            self._outbox.task_done()

    def _release(self, messages: list[_Sent]) -> None:
        """Wait until each message is sent, the oldest first, and free its memory then. A failure is reported to the
        main thread, at its next send or at the end of the step.
        """
        messages.reverse()
        while messages:
            try:
                for work in messages[-1].works:
                    work.wait()
            except Exception as error:
                self._failure = self._failure or error
            messages.pop()


def _tag(number: int, index: int) -> int:
    return number * TENSORS_PER_MESSAGE + index


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
