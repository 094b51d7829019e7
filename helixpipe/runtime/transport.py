"""Point-to-point messages between the ranks of one pipeline, over torch.distributed.

A transport takes over what is sent: the sender forgets its tensors at once, and the transport releases their memory
after the last byte has left. Receives are posted before they are needed and waited for just before the op that uses
them. Messages are matched by tag or by their order, which both ends know from the lowered program: no shape and no
number is ever exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from helixpipe.runtime.communicators import Settings, backend_of
from helixpipe.runtime.gloo import GlooTransport
from helixpipe.runtime.nccl import NcclTransport


class Receipt(Protocol):
    """A posted receive."""

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Return the received tensors, in the order sent, ready for the current stream's next kernel."""
        ...


class Transport(Protocol):
    """The interface of the network between pipeline ranks, as the executor uses it. Ranks are pipeline ranks."""

    def mark(self) -> Any:
        """Return a mark of what this rank has computed so far, for a later `send`."""
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
        """Start sending as message `number` the tensors of a receipt of this transport, once they arrive; the caller
        need not wait, and they must not be written to afterwards.
        """
        ...

    def finish(self) -> None:
        """Wait until all that was sent has left; raises if any of it could not. Called at the end of every step."""
        ...

    def close(self) -> None:
        """Release what the transport holds; nothing may be sent afterwards."""
        ...


class SingleRankTransport:
    """The transport of a pipeline of one rank, which sends nothing."""

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
    group: dist.ProcessGroup,
    device: torch.device,
    channels: Iterable[tuple[int, int]] | None = None,
    settings: Settings | None = None,
) -> Transport:
    """Return the transport for a pipeline's process group and the device its tensors live on.

    channels: the (source, target) that messages will go between, pipeline ranks, the same on every rank; None: all.
    settings: of NCCL's groups; see `communicators`. With NCCL it is collective over all ranks of the job, and so is
    `close`.
    """
    if backend_of(group, device) == "nccl":
        return NcclTransport(group, device, channels, settings or {})
    return GlooTransport(group, device)
