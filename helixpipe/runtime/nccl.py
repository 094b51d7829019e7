"""Point-to-point messages over NCCL: see `transport`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from helixpipe.runtime.communicators import Settings, direction_groups, release, used_channels


@dataclass
class NcclReceipt:
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

    Communicators of `channels` are made here, before the first step, in sorted order; of others when first used; and
    `close` destroys them (see `communicators`, which also says what `settings` are). Where the job has bound its groups
    to a device, a direction has one communicator, whose messages go one after another.

    Messages of a channel are matched by their order alone, which is that of the lowered program on both ends.
    Receives are posted at their place in it, never ahead, and that keeps all of it free of deadlock: by `lowering`'s
    theorem a single queue a rank would do for ops and messages alike. So no harm is done where streams share a
    hardware queue (CUDA_DEVICE_MAX_CONNECTIONS) and one that waits holds up the others, where an allocation waits for
    the whole device, or where making a communicator waits for the other rank. A receive posted ahead of an op could
    then keep back the very op that its sender waits for. Nor is much lost: the host runs ahead of the device, so a
    receive is posted long before the op that precedes it has ended.

    Memory. What is sent is kept until its work is done. A receive into memory of the current stream would have to wait
    for that stream, which may still use it; so buffers come from a stream that has nothing to do, and are recorded on
    the streams that use them: what the host frees is used again once these have got there.
    """

    group: dist.ProcessGroup
    device: torch.device
    channels: Iterable[tuple[int, int]] | None = None
    settings: Settings = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rank = self.group.rank()
        self._sent: list[tuple[Any, torch.Tensor]] = []
        self._receiving, self._sending, self._passing = (torch.cuda.Stream(self.device) for _ in range(3))
        self._up, self._down = direction_groups(self.group, self.device, self.settings)
        token = torch.zeros(1, device=self.device)
        for source, target in used_channels(self.channels, self.group.size()):
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
        self._sent = [(work, tensor) for work, tensor in self._sent if not work.is_completed()]
        group = self._direction(self._rank, target)
        for tensor in tensors:
            tensor = tensor.detach().contiguous()
            self._sent.append((dist.isend(tensor, group=group, group_dst=target), tensor))

    def receive(self, shapes: Sequence[torch.Size], dtype: torch.dtype, source: int, number: int) -> NcclReceipt:
        group = self._direction(source, self._rank)
        with torch.cuda.stream(self._receiving):
            buffers = [self._buffer(shape, dtype) for shape in shapes]
            return NcclReceipt(buffers, [dist.irecv(buffer, group=group, group_src=source) for buffer in buffers])

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
        release((self._up, self._down))
        self._sent.clear()
