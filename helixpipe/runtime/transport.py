"""Point-to-point messages between the ranks of one pipeline, over torch.distributed.

A transport takes over what is sent: the sender forgets its tensors at once, and their memory is released when the last
byte has left. Receives are posted before they are needed and waited for just before the op that uses them. Messages
are matched by tag, which both ends know from the lowered program: no shape and no number is ever exchanged.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

TENSORS_PER_MESSAGE = 8
"""More than any message has (four: q, k, v and the residual)."""


class Receipt(Protocol):
    """A posted receive."""

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The received tensors, in the order sent, ready for the current stream's next kernel."""
        ...


class Transport(Protocol):
    """What the executor asks of a network. Ranks are pipeline ranks."""

    independent_channels: bool
    """Whether a receive that is posted but not yet matched leaves sends and other ranks' receives alone (see
    `lowering`)."""

    def send(self, tensors: Sequence[torch.Tensor], target: int, number: int) -> None:
        """Start sending message `number`; the tensors must not be written to afterwards."""
        ...

    def receive(self, shapes: Sequence[torch.Size], dtype: torch.dtype, source: int, number: int) -> Receipt:
        """Post the receive of message `number`, with one tensor of each shape."""
        ...

    def pass_on(self, receipt: Receipt, target: int, number: int) -> None:
        """Start sending as message `number` what a receipt of this transport brings, as soon as it is there; who asked
        for it need not wait, and nobody may write to it afterwards."""
        ...

    def finish(self) -> None:
        """Wait until all that was sent has left; raises if any of it could not. Called at the end of every step."""
        ...

    def close(self) -> None:
        """Release what the transport holds; nothing may be sent afterwards."""
        ...


class Alone:
    """The transport of a pipeline of one rank, which sends nothing."""

    independent_channels = True

    def send(self, tensors: Sequence[torch.Tensor], target: int, number: int) -> None:
        raise AssertionError("a pipeline of one rank sends nothing")

    def receive(self, shapes: Sequence[torch.Size], dtype: torch.dtype, source: int, number: int) -> Receipt:
        raise AssertionError("a pipeline of one rank receives nothing")

    def pass_on(self, receipt: Receipt, target: int, number: int) -> None:
        raise AssertionError("a pipeline of one rank passes nothing on")

    def finish(self) -> None: ...

    def close(self) -> None: ...


def make_transport(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """The transport for a pipeline's process group and the device its tensors live on."""
    if dist.get_backend(group) == "nccl":
        return NcclTransport(group, device)
    return GlooTransport(group, device)


@dataclass
class _GlooReceipt:
    buffers: list[torch.Tensor]
    works: list[Any]
    device: torch.device
    lock: threading.Lock = field(default_factory=threading.Lock)
    failure: BaseException | None = None

    def wait(self) -> tuple[torch.Tensor, ...]:
        self.arrive()
        return tuple(buffer.to(self.device, non_blocking=True) for buffer in self.buffers)

    def arrive(self) -> None:
        """From any thread. A receive of gloo may be waited for once only; who comes after a failure fails alike."""
        with self.lock:
            if self.failure is not None:
                raise self.failure
            try:
                while self.works:
                    self.works.pop().wait()
            except BaseException as error:
                self.failure = error
                raise


class _Sent(NamedTuple):
    """One message on its way out: the tensors stay alive until the works are done."""

    tensors: list[torch.Tensor]
    works: list[Any]


@dataclass
class GlooTransport:
    """Gloo over TCP or shared memory. A CUDA tensor travels through pinned host memory, so ranks can share a GPU.

    gloo keeps no copy of what it sends, moves a byte only when the receiver has posted, and can tell that a send has
    ended only to a thread that waits for it. So one thread a rank waits for the sends and releases their tensors;
    compute never waits for them. What is passed on on arrival has a thread each.
    """

    group: dist.ProcessGroup
    device: torch.device
    independent_channels: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self._outbox: queue.Queue[_Sent | None] = queue.Queue()
        self._failure: BaseException | None = None
        self._reaper = threading.Thread(target=self._reap, name="gloo-sends", daemon=True)
        self._reaper.start()
        self._passing: list[threading.Thread] = []

    def send(self, tensors: Sequence[torch.Tensor], target: int, number: int) -> None:
        self._raise_failure()
        tensors = [tensor.detach().contiguous() for tensor in tensors]
        if self.device.type == "cuda":
            tensors = [_to_pinned(tensor) for tensor in tensors]
            torch.cuda.current_stream().synchronize()
        self._start(tensors, target, number)

    def pass_on(self, receipt: Receipt, target: int, number: int) -> None:
        assert isinstance(receipt, _GlooReceipt)

        def on_arrival() -> None:
            try:
                receipt.arrive()
                self._start(receipt.buffers, target, number)
            except BaseException as error:
                self._failure = error

        thread = threading.Thread(target=on_arrival, name="gloo-passing-on", daemon=True)  # never keeps a rank alive
        thread.start()
        self._passing.append(thread)

    def _start(self, tensors: list[torch.Tensor], target: int, number: int) -> None:
        works = [
            dist.isend(tensor, group=self.group, group_dst=target, tag=_tag(number, index))
            for index, tensor in enumerate(tensors)
        ]
        self._outbox.put(_Sent(tensors, works))

    def receive(self, shapes: Sequence[torch.Size], dtype: torch.dtype, source: int, number: int) -> Receipt:
        pinned = self.device.type == "cuda"
        buffers = [torch.empty(shape, dtype=dtype, pin_memory=pinned) for shape in shapes]
        works = [
            dist.irecv(buffer, group=self.group, group_src=source, tag=_tag(number, index))
            for index, buffer in enumerate(buffers)
        ]
        return _GlooReceipt(buffers, works, self.device)

    def finish(self) -> None:
        for thread in self._passing:
            thread.join()
        self._passing.clear()
        self._outbox.join()
        self._raise_failure()

    def close(self) -> None:
        self._outbox.put(None)
        self._reaper.join(timeout=1.0)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"sending to another pipeline rank failed: {self._failure}") from self._failure

    def _reap(self) -> None:
        while (sent := self._outbox.get()) is not None:
            try:
                for work in sent.works:
                    work.wait()
            except BaseException as error:
                self._failure = error  # told to the main thread at its next send or at the end of the step
            finally:
                del sent  # the memory goes back here, not when the next message comes
                self._outbox.task_done()


def _tag(number: int, index: int) -> int:
    return number * TENSORS_PER_MESSAGE + index


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


@dataclass
class _NcclReceipt:
    buffers: list[torch.Tensor]
    works: list[Any]

    def wait(self) -> tuple[torch.Tensor, ...]:
        for work in self.works:
            work.wait()  # the current stream waits; the host does not
        return tuple(self.buffers)


@dataclass
class NcclTransport:
    """NCCL. Messages between two ranks share one communicator and its stream, in the order issued on both ends.

    So a posted receive holds up later messages of the pair, and receives keep their place in the one global order of
    the lowered program, which is what makes that safe. Communicators are made here, before the first step, in one
    fixed order.
    """

    group: dist.ProcessGroup
    device: torch.device
    independent_channels: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._sending: list[tuple[Any, torch.Tensor]] = []
        self._passing = torch.cuda.Stream(self.device)
        rank, size = self.group.rank(), self.group.size()
        for low in range(size):
            for high in range(low + 1, size):
                if rank in (low, high):
                    token = torch.zeros(1, device=self.device)
                    if rank == low:
                        dist.send(token, group=self.group, group_dst=high)
                    else:
                        dist.recv(token, group=self.group, group_src=low)

    def send(self, tensors: Sequence[torch.Tensor], target: int, number: int) -> None:
        self._sending = [(work, tensor) for work, tensor in self._sending if not work.is_completed()]
        for tensor in tensors:
            tensor = tensor.detach().contiguous()
            self._sending.append((dist.isend(tensor, group=self.group, group_dst=target), tensor))

    def pass_on(self, receipt: Receipt, target: int, number: int) -> None:
        with torch.cuda.stream(self._passing):  # waits in place of the compute stream
            self.send(receipt.wait(), target, number)

    def receive(self, shapes: Sequence[torch.Size], dtype: torch.dtype, source: int, number: int) -> Receipt:
        buffers = [torch.empty(shape, dtype=dtype, device=self.device) for shape in shapes]
        return _NcclReceipt(buffers, [dist.irecv(b, group=self.group, group_src=source) for b in buffers])

    def finish(self) -> None:
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def close(self) -> None:
        self._sending.clear()
