"""Every rank of a large pipeline, one after the other in one process: the executor and the transport of NCCL over
torch's `fake` backend, whose messages are nothing, without streams."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from helixpipe.lowering.lower import lower
from helixpipe.lowering.project import LoweredProgram
from helixpipe.planning.catalogue import Shape
from helixpipe.runtime.executor import Executor
from helixpipe.runtime.nccl import NcclTransport
from schedules import build
from tests.runtime.null_model import NullModel, null_step

CPU = torch.device("cpu")
TIMEOUT = timedelta(minutes=17)


@dataclass
class Played:
    """The record of what one rank has done. groups: (ranks, timeout, description) of each process group it made;
    destroyed: how many it destroyed. met: (channel, group) of each exchange by which communicators are made. sent,
    received: in the order of each channel (source, target), the messages' numbers, and the group and tensors of each.
    left: buffers and receipts that nobody has taken."""

    groups: list[tuple[tuple[int, ...], timedelta, str]] = field(default_factory=list)
    destroyed: int = 0
    met: list[tuple[tuple[int, int], str]] = field(default_factory=list)
    sent: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    received: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    left: int = 0


class Logged(NcclTransport):
    """NCCL's transport as it is, with a log. Messages are asked for by number, and travel by tensor."""

    played: Played

    def send(self, tensors: Sequence[torch.Tensor], target: int, number: int, since: Any = None) -> None:
        self._log("sent", (self._rank, target), number)
        super().send(tensors, target, number, since)

    def pass_on(self, receipt: Any, target: int, number: int) -> None:
        self._log("sent", (self._rank, target), number)
        super().pass_on(receipt, target, number)

    def receive(self, shapes: Sequence[torch.Size], dtype: torch.dtype, source: int, number: int) -> Any:
        self._log("received", (source, self._rank), number)
        return super().receive(shapes, dtype, source, number)

    def _log(self, what: str, channel: tuple[int, int], entry: Any) -> None:
        getattr(self.played, what).setdefault(channel, []).append(entry)


class Network:
    """torch.distributed as the transport calls it, of which everything is written down for the rank that plays. rank:
    in its pipeline."""

    def __init__(self) -> None:
        self.played = Played()
        self.rank = 0
        self.plain = {
            name: getattr(dist, name)
            for name in ("isend", "irecv", "send", "recv", "new_group", "destroy_process_group")
        }

    def install(self) -> None:
        """For the rest of this process."""
        module: Any = dist
        module.isend, module.irecv, module.send, module.recv = self.isend, self.irecv, self.send, self.recv
        module.new_group, module.all_gather_object = self.new_group, self.all_gather_object
        module.destroy_process_group = self.destroy

    def isend(self, tensor: torch.Tensor, group: Any, group_dst: int) -> Any:
        entry = group.group_desc, tuple(tensor.shape), tensor.dtype
        self.played.sent.setdefault((self.rank, group_dst), []).append(entry)
        return self.plain["isend"](tensor, group=group, group_dst=group_dst)

    def irecv(self, tensor: torch.Tensor, group: Any, group_src: int) -> Any:
        entry = group.group_desc, tuple(tensor.shape), tensor.dtype
        self.played.received.setdefault((group_src, self.rank), []).append(entry)
        return self.plain["irecv"](tensor, group=group, group_src=group_src)

    def send(self, tensor: torch.Tensor, group: Any, group_dst: int) -> None:
        self.played.met.append(((self.rank, group_dst), group.group_desc))
        self.plain["send"](tensor, group=group, group_dst=group_dst)

    def recv(self, tensor: torch.Tensor, group: Any, group_src: int) -> None:
        self.played.met.append(((group_src, self.rank), group.group_desc))
        self.plain["recv"](tensor, group=group, group_src=group_src)

    def new_group(self, ranks: Sequence[int], timeout: timedelta, *args: Any, group_desc: str) -> Any:
        self.played.groups.append((tuple(ranks), timeout, group_desc))
        return self.plain["new_group"](ranks, timeout, *args, group_desc=group_desc)

    def all_gather_object(self, objects: list[Any], own: tuple[int, ...]) -> None:
        """Of pipelines that are equally long and lie one after the other."""
        for rank in range(len(objects)):
            first = rank // len(own) * len(own)
            objects[rank] = tuple(range(first, first + len(own)))
        assert objects[dist.get_rank()] == own

    def destroy(self, group: Any = None) -> None:
        self.played.destroyed += group is not None
        self.plain["destroy_process_group"](group)


class Stream:
    """As torch.cuda.Stream; nothing is ever enqueued."""

    def __init__(self, device: Any = None) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> None: ...


def without_streams() -> None:
    """For the rest of this process."""
    cuda, tensor = cast(Any, torch.cuda), cast(Any, torch.Tensor)
    cuda.Stream, cuda.current_stream = Stream, Stream
    cuda.stream = lambda stream: nullcontext()
    tensor.record_stream = lambda self, stream: None


def play(rank: int, world_size: int, cases: list[tuple[str, int, int, int]]) -> list[list[Played]]:
    """For each case (schedule, ranks, microbatches, layers), what every rank of a pipeline did in one step, and then
    the first of another pipeline of the same job."""
    dist.destroy_process_group()
    without_streams()
    network = Network()
    network.install()
    results = []
    for name, ranks, microbatches, layers in cases:
        lowered = lower(build(name, Shape(ranks, microbatches, layers)))
        results.append([play_rank(network, lowered, each, 2 * ranks) for each in range(ranks + 1)])
    return results


def play_rank(network: Network, lowered: LoweredProgram, rank: int, world_size: int) -> Played:
    """A rank of the job, whose pipelines lie one after the other."""
    size = lowered.program.num_ranks
    number, place = divmod(rank, size)
    network.played, network.rank = Played(), place
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    make_options: Any = FakeProcessGroup.Options  # its stub says that of the base class
    options = make_options()
    options._timeout = TIMEOUT
    pipelines = [
        network.plain["new_group"](list(range(first, first + size)), pg_options=options)
        for first in range(0, world_size, size)
    ]
    Logged.played = network.played
    channels = {(message.source, message.target) for message in lowered.graph.messages}
    transport = Logged(pipelines[number], CPU, channels)
    model: Any = NullModel()
    executor = Executor(place, model, transport)
    executor.run(lowered, null_step())
    network.played.left = len(executor.last.buffers) + len(executor.last.receipts)
    transport.close()
    network.plain["destroy_process_group"]()
    return network.played
