"""Point-to-point messages over NCCL: see `transport`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from helixpipe.runtime.communicators import Settings, direction_groups, release, used_channels
from helixpipe.runtime.receive_buffers import ReceiveBuffers


@dataclass
class NcclReceipt:
    buffers: list[torch.Tensor]
    works: list[Any]

    def wait(self) -> tuple[torch.Tensor, ...]:
        for work in self.works:
            work.wait()  # the current stream waits; the host does not
        return tuple(self.buffers)


@dataclass
class NcclTransport:
    """NCCL. Two ranks have a communicator for each direction, and it a stream: what goes up the ranks never waits for
    what goes down. A message leaves once its tensors are there, whatever is being computed. Nothing waits on the host.

    Communicators of `channels` are made here, before the first step, in sorted order; of others when first used; and
    `close` destroys them (see `communicators`, which also says what `settings` are). Where the job has bound its groups
    to a device, a direction has one communicator, whose messages go one after another.

    Messages of a channel are matched by their order alone, which is that of the lowered program on both ends. Receives
    are posted at their place in it, never ahead, and that keeps all of it free of deadlock: by `lowering`'s theorem a
    single queue a rank would do for ops and messages alike. So no harm is done where streams share a hardware queue
    (CUDA_DEVICE_MAX_CONNECTIONS) and one that waits holds up the others, where an allocation waits for the whole
    device, or where making a communicator waits for the other rank. A receive posted ahead of an op could then keep
    back the very op that its sender waits for. Where streams have queues of their own the device keeps to the list as
    well: a receive waits for what the current stream has got to, so it occupies the device no earlier than its place,
    however far ahead the host is.

    Memory. Messages are received into memory that belongs to the stream that computes; but for weights, whose memory
    would be large and mostly idle, it is kept for the next ones (`receive_buffers`). That is right because that stream
    is in the order of the list at both ends of a message's life. A receive begins where it stands: the communicator
    waits for what that stream has got to, so for all that was in the memory before. Who lets go of a message has waited
    for the receive and used it in that stream, whose next use comes after. What other streams read (a message, what it
    is a view of, and what is passed on) is kept here until the host has seen its send done, or until `finish`, where
    that stream waits for it. Nothing depends on what torch keeps of a message.
    """

    group: dist.ProcessGroup
    device: torch.device
    channels: Iterable[tuple[int, int]] | None = None
    settings: Settings = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rank = self.group.rank()
        self._sent: list[tuple[Any, tuple[torch.Tensor, ...]]] = []
        self._received = ReceiveBuffers(self.device)
        self._sending, self._passing = (torch.cuda.Stream(self.device) for _ in range(2))
        channels = used_channels(self.channels, self.group.size())
        self._up, self._down = direction_groups(self.group, self.device, self.settings, channels)
        token = torch.zeros(1, device=self.device)
        for source, target in channels:
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

    def pass_on(self, receipt: Any, target: int, number: int) -> None:
        with torch.cuda.stream(self._passing):  # waits in place of the streams that compute and send
            self._start(receipt.wait(), target)

    def _start(self, tensors: Sequence[torch.Tensor], target: int) -> None:
        """Send what the current stream has got to now."""
        self._let_go()
        group = self._direction(self._rank, target)
        for tensor in tensors:
            whole = tensor.detach().contiguous()  # a copy reads what was given when this stream gets to it
            self._sent.append((dist.isend(whole, group=group, group_dst=target), (tensor, whole)))

    def receive(self, shapes: Sequence[torch.Size], dtype: torch.dtype, source: int, number: int) -> NcclReceipt:
        """Post a receive at this place of the current stream: it starts after all work queued there so far."""
        self._let_go()
        group = self._direction(source, self._rank)
        buffers = [self._buffer(shape, dtype) for shape in shapes]
        return NcclReceipt(buffers, [dist.irecv(buffer, group=group, group_src=source) for buffer in buffers])

    def _let_go(self) -> None:
        """Let go of what has been sent: of weights' owner's copy too, which else stays until it sends gradients."""
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]

    def _buffer(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer to receive into."""
        if len(shape) == 1:  # weights, or sums of their gradients: a few a step, each as large as a stage
            return torch.empty(shape, dtype=dtype, device=self.device)
        return self._received.take(shape, dtype)

    def _direction(self, source: int, target: int) -> dist.ProcessGroup:
        return self._up if source < target else self._down

    def finish(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
        self._received.end_step()

    def close(self) -> None:
        release((self._up, self._down))
        self._sent.clear()
        self._received.clear()
