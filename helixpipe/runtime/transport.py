"""Point-to-point messages between the ranks of one pipeline, over torch.distributed.

A transport takes over what is sent: the sender forgets its tensors at once, and their memory is released when the last
byte has left. Receives are posted before they are needed and waited for just before the op that uses them. Messages
are matched by tag or by their order, which both ends know from the lowered program: no shape and no number is ever
exchanged.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import permutations
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

    def mark(self) -> Any:
        """What this rank has computed so far, for a `send` that comes later."""
        ...

    def send(self, tensors: Sequence[torch.Tensor], target: int, number: int, since: Any = None) -> None:
        """Start sending message `number`; the tensors must not be written to afterwards.

        since: the `mark` at which they were ready; then the message waits for nothing computed after it, which matters
        where a slow link makes it leave late.
        """
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

    def mark(self) -> None: ...

    def send(self, tensors: Sequence[torch.Tensor], target: int, number: int, since: Any = None) -> None:
        raise AssertionError("a pipeline of one rank sends nothing")

    def receive(self, shapes: Sequence[torch.Size], dtype: torch.dtype, source: int, number: int) -> Receipt:
        raise AssertionError("a pipeline of one rank receives nothing")

    def pass_on(self, receipt: Receipt, target: int, number: int) -> None:
        raise AssertionError("a pipeline of one rank passes nothing on")

    def finish(self) -> None: ...

    def close(self) -> None: ...


def make_transport(
    group: dist.ProcessGroup, device: torch.device, channels: Iterable[tuple[int, int]] | None = None
) -> Transport:
    """The transport for a pipeline's process group and the device its tensors live on.

    channels: the (source, target) that messages will go between, pipeline ranks, the same on every rank; None: all.
    With NCCL it is collective over all ranks of the job.
    """
    if dist.get_backend(group) == "nccl":
        return NcclTransport(group, device, channels)
    return GlooTransport(group, device)


@dataclass
class _GlooReceipt:
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
    """One message on its way out: the tensors stay alive until the works are done."""

    tensors: list[torch.Tensor]
    works: list[Any]


@dataclass
class GlooTransport:
    """Gloo over TCP or shared memory. A CUDA tensor travels through pinned host memory, so ranks can share a GPU.

    gloo keeps no copy of what it sends, moves a byte only when the receiver has posted, and can tell that a send has
    ended only to a thread that waits for it. So one thread a rank waits for the sends and releases their tensors;
    compute never waits for them. What has to come first, from another rank or from the GPU, is waited for by a thread
    a message.
    """

    group: dist.ProcessGroup
    device: torch.device
    independent_channels: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self._outbox: queue.Queue[_Sent | None] = queue.Queue()
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

    def pass_on(self, receipt: Receipt, target: int, number: int) -> None:
        assert isinstance(receipt, _GlooReceipt)
        self._start_later(receipt.arrive, target, number)

    def _to_host(self, tensors: Sequence[torch.Tensor], since: Any) -> Callable[[], list[torch.Tensor]]:
        """Start copying to pinned memory, beside what is computed. What is returned waits for the copies, which must be
        done before gloo reads them and before the originals' memory may be used again."""
        assert self._copying is not None
        self._copying.wait_event(since)
        with torch.cuda.stream(self._copying):
            originals = [tensor.detach().contiguous() for tensor in tensors]
            copies = [_to_pinned(tensor) for tensor in originals]
            copied = self._copying.record_event()

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
                self._failure = error

        thread = threading.Thread(target=start, name="gloo-starting", daemon=True)  # never keeps a rank alive
        thread.start()
        self._starting.append(thread)

    def _start(self, tensors: list[torch.Tensor], target: int, number: int) -> None:
        works = [
            dist.isend(tensor, group=self.group, group_dst=target, tag=_tag(number, index))
            for index, tensor in enumerate(tensors)
        ]
        self._outbox.put(_Sent(tensors, works))

    def receive(self, shapes: Sequence[torch.Size], dtype: torch.dtype, source: int, number: int) -> Receipt:
        buffers = [self._buffer(shape, dtype) for shape in shapes]
        works = [
            dist.irecv(buffer, group=self.group, group_src=source, tag=_tag(number, index))
            for index, buffer in enumerate(buffers)
        ]
        return _GlooReceipt(buffers, works, self.device)

    def _buffer(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """To receive into."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._copying is not None)

    def finish(self) -> None:
        for thread in self._starting:
            thread.join()
        self._starting.clear()
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
        stream = torch.cuda.current_stream()
        for work, buffer in zip(self.works, self.buffers, strict=True):
            work.wait()  # the current stream waits; the host does not
            buffer.record_stream(stream)  # whoever frees it: its memory is used again after what this stream does now
        return tuple(self.buffers)


@dataclass
class NcclTransport:
    """NCCL. Two ranks have a communicator for each direction, and it a stream: what goes up the ranks never waits for
    what goes down, nor for anything computed but the tensors themselves. Nothing waits on the host.

    Communicators of `channels` are made here, before the first step, in sorted order; of others when first used. torch
    makes one for each two ranks of a group when they first meet, so a direction is a group of its own. (Where the job
    has bound its groups to a device, a group has one communicator, whose messages go one after another.)

    Messages of a channel are matched by their order alone, which is that of the lowered program on both ends. Receives
    are posted at their place in it, never ahead (`independent_channels` is False), and that keeps all of it free of
    deadlock: by `lowering`'s theorem a single queue a rank would do for ops and messages alike. So no harm is done
    where streams share a hardware queue (CUDA_DEVICE_MAX_CONNECTIONS) and one that waits holds up the others, where an
    allocation waits for the whole device, or where making a communicator waits for the other rank. A receive posted
    ahead of an op could then keep back the very op that its sender waits for. Nor is much lost: the host runs ahead of
    the device, so a receive is posted long before the op that precedes it has ended.

    Memory. What is sent is kept until its work is done. A receive into memory of the current stream would have to wait
    for that stream, which may still use it; so buffers come from a stream that has nothing to do, and are recorded on
    the streams that use them: what the host frees is used again once these have got there.
    """

    group: dist.ProcessGroup
    device: torch.device
    channels: Iterable[tuple[int, int]] | None = None
    independent_channels: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._rank = self.group.rank()
        self._sent: list[tuple[Any, torch.Tensor]] = []
        self._receiving, self._sending, self._passing = (torch.cuda.Stream(self.device) for _ in range(3))
        self._up, self._down = self.group, _twin(self.group, self.device)
        token = torch.zeros(1, device=self.device)
        for source, target in sorted(self.channels or permutations(range(self.group.size()), 2)):
            if self._rank == source:
                dist.send(token, group=self._direction(source, target), group_dst=target)
            elif self._rank == target:
                dist.recv(token, group=self._direction(source, target), group_src=source)

    def mark(self) -> Any:
        return torch.cuda.current_stream().record_event()

    def send(self, tensors: Sequence[torch.Tensor], target: int, number: int, since: Any = None) -> None:
        self._sending.wait_event(self.mark() if since is None else since)
        with torch.cuda.stream(self._sending):
            self._start(tensors, target)

    def pass_on(self, receipt: Receipt, target: int, number: int) -> None:
        with torch.cuda.stream(self._passing):  # waits in place of the streams that compute and send
            self._start(receipt.wait(), target)

    def _start(self, tensors: Sequence[torch.Tensor], target: int) -> None:
        """Send what the current stream has got to now."""
        self._sent = [(work, tensor) for work, tensor in self._sent if not work.is_completed()]
        group = self._direction(self._rank, target)
        for tensor in tensors:
            tensor = tensor.detach().contiguous()
            self._sent.append((dist.isend(tensor, group=group, group_dst=target), tensor))

    def receive(self, shapes: Sequence[torch.Size], dtype: torch.dtype, source: int, number: int) -> Receipt:
        group = self._direction(source, self._rank)
        with torch.cuda.stream(self._receiving):
            buffers = [self._buffer(shape, dtype) for shape in shapes]
            return _NcclReceipt(buffers, [dist.irecv(buffer, group=group, group_src=source) for buffer in buffers])

    def _buffer(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """To receive into."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _direction(self, source: int, target: int) -> dist.ProcessGroup:
        return self._up if source < target else self._down

    def finish(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def close(self) -> None:
        self._sent.clear()


def _twin(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Another group of the same ranks and with the same timeout. Every rank of the job makes every pipeline's, in one
    order, as new_group asks."""
    own = tuple(dist.get_process_group_ranks(group))
    pipelines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pipelines, own)
    timeout = group._get_backend(device).options._timeout
    backend = dist.get_backend(group)
    twins = {ranks: dist.new_group(ranks, timeout, backend) for ranks in sorted(set(pipelines))}
    return twins[own]
