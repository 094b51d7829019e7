"""NCCL as torch uses it: a communicator has a stream of its own and does one thing after another in it.

Two ranks of a group have one communicator, for both directions; all ranks of a group have one for its collectives. It
starts after what the current stream has got to, and `wait` makes the current stream wait for its end. Nothing is kept
alive, neither what is sent nor what is received into: torch keeps some of it, in ways that change.

Bytes travel through `Network`, of copies, so that the memory a kernel uses may be gone before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol
from unittest import mock

import torch
import torch.distributed as dist

from tests.runtime.happens_before.clocks import Actor, Clock
from tests.runtime.happens_before.cuda import Simulation


class Network(Protocol):
    """Carries the bytes; each returns something to wait for."""

    def isend(self, tensor: torch.Tensor, group: Any, peer: int) -> Any: ...

    def irecv(self, tensor: torch.Tensor, group: Any, peer: int) -> Any: ...

    def all_reduce(self, tensor: torch.Tensor, group: Any) -> Any: ...

    def broadcast(self, tensor: torch.Tensor, source: int, group: Any) -> Any: ...

    def reduce(self, tensor: torch.Tensor, target: int, group: Any) -> Any: ...

    def all_gather(self, tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any) -> Any: ...

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, group: Any) -> Any: ...

    def gather_into(self, output: torch.Tensor, tensor: torch.Tensor, group: Any) -> Any: ...

    def scatter_sum(self, output: torch.Tensor, tensor: torch.Tensor, group: Any) -> Any: ...


class OverGloo:
    """A `Network` between real ranks."""

    def __init__(self) -> None:
        self._isend, self._irecv, self._all_reduce = dist.isend, dist.irecv, dist.all_reduce
        self._broadcast, self._reduce, self._all_gather = dist.broadcast, dist.reduce, dist.all_gather
        self._all_to_all = dist.all_to_all_single
        self._gather_into, self._scatter_sum = dist.all_gather_into_tensor, dist.reduce_scatter_tensor

    def isend(self, tensor: torch.Tensor, group: Any, peer: int) -> Any:
        return self._isend(tensor, group=group, group_dst=peer)

    def irecv(self, tensor: torch.Tensor, group: Any, peer: int) -> Any:
        return self._irecv(tensor, group=group, group_src=peer)

    def all_reduce(self, tensor: torch.Tensor, group: Any) -> Any:
        return self._all_reduce(tensor, group=group, async_op=True)

    def broadcast(self, tensor: torch.Tensor, source: int, group: Any) -> Any:
        return self._broadcast(tensor, source, group=group, async_op=True)

    def reduce(self, tensor: torch.Tensor, target: int, group: Any) -> Any:
        return self._reduce(tensor, target, group=group, async_op=True)

    def all_gather(self, tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any) -> Any:
        return self._all_gather(tensors, tensor, group=group, async_op=True)

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, group: Any) -> Any:
        return self._all_to_all(output, tensor, group=group, async_op=True)

    def gather_into(self, output: torch.Tensor, tensor: torch.Tensor, group: Any) -> Any:
        return self._gather_into(output, tensor, group=group, async_op=True)

    def scatter_sum(self, output: torch.Tensor, tensor: torch.Tensor, group: Any) -> Any:
        return self._scatter_sum(output, tensor, group=group, async_op=True)


class Nowhere:
    """A `Network` that brings nothing, for programs of one process. It stands for a work, too."""

    def isend(self, tensor: torch.Tensor, group: Any, peer: int) -> Any:
        return self

    def irecv(self, tensor: torch.Tensor, group: Any, peer: int) -> Any:
        return self

    def all_reduce(self, tensor: torch.Tensor, group: Any) -> Any:
        return self

    def broadcast(self, tensor: torch.Tensor, source: int, group: Any) -> Any:
        return self

    def reduce(self, tensor: torch.Tensor, target: int, group: Any) -> Any:
        return self

    def all_gather(self, tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any) -> Any:
        return self

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, group: Any) -> Any:
        return self

    gather_into = scatter_sum = all_to_all

    def wait(self) -> None: ...


class PeerOp(NamedTuple):
    """Stands for `dist.P2POp`, which knows torch's own functions alone."""

    op: Callable[..., Work]
    tensor: torch.Tensor
    group: Any
    group_peer: int


class Place:
    """Where a tensor lies, without a claim to the memory."""

    def __init__(self, tensor: torch.Tensor):
        self._storage = weakref.ref(tensor.untyped_storage())
        self._shape = tensor.storage_offset(), tensor.size(), tensor.stride()
        self._empty = tensor.new_empty(0)

    def storage(self) -> torch.UntypedStorage | None:
        return self._storage()

    def fill(self, source: torch.Tensor) -> None:
        storage = self._storage()
        if storage is not None and storage.nbytes():
            torch.empty_like(self._empty).set_(storage, *self._shape).copy_(source)


class Work:
    """Of one message or collective. end: what is known once it has ended. into: where it writes, with the copies that
    it really writes to. kept: copies that it really reads."""

    def __init__(
        self, simulation: Simulation, end: Clock, real: Any, into: Sequence[tuple[Place, torch.Tensor]], kept: Any
    ):
        self._simulation, self._end = simulation, end
        self._real, self._into, self._kept = real, into, kept

    def wait(self, timeout: Any = None) -> bool:
        """The current stream waits."""
        world = self._simulation.world
        if self._into:
            self.arrive()
        world.stream.hear(world.thread)
        world.stream.learn(self._end)
        return True

    def is_completed(self) -> bool:
        world = self._simulation.world
        if world.random.random() < 0.5:
            return False
        world.thread.learn(self._end)
        return True

    def arrive(self) -> None:
        """Wait, in truth."""
        if self._real is not None:
            self._real.wait()
            self._real = None
            with torch._C._DisableTorchDispatch():
                for place, copy in self._into:
                    place.fill(copy)


class Communicators:
    """All of one process. rank: see `dist.Group`."""

    def __init__(self, simulation: Simulation, network: Network):
        self._simulation, self._network = simulation, network
        self._streams: dict[tuple[int, frozenset[int]], Actor] = {}
        self._groups: dict[int, Any] = {}
        self._works: list[Work] = []

    def _stream(self, group: Any, ranks: frozenset[int]) -> Actor:
        self._groups.setdefault(id(group), group)
        key = id(group), ranks
        if key not in self._streams:
            number = list(self._groups).index(id(group))
            name = f"communicator of ranks {sorted(ranks)}" if ranks else "communicator"
            self._streams[key] = self._simulation.world.actor(f"{name} of group {number}")
        return self._streams[key]

    def _issue(self, stream: Actor, tensor: torch.Tensor, write: bool, what: str) -> Clock:
        """One kernel of a communicator, after the current stream; what is known once it has ended."""
        world, memories = self._simulation.world, self._simulation.memories
        with world.lock:
            world.stream.hear(world.thread)
            stream.learn(world.stream.known)
            world.launch(stream)
            memories.access(stream, memories.of(tensor.untyped_storage()), write, what)
            return dict(stream.known)

    def isend(self, tensor: torch.Tensor, group: Any, group_dst: int) -> Work:
        if not tensor.is_contiguous():
            raise ValueError("NCCL sends contiguous tensors only")
        stream = self._stream(group, frozenset((group.rank(), group_dst)))
        end = self._issue(stream, tensor, False, f"the send to {group_dst}")
        with torch._C._DisableTorchDispatch():
            copy = tensor.detach().clone()
            return self._start(end, self._network.isend(copy, group, group_dst), (), copy)

    def irecv(self, tensor: torch.Tensor, group: Any, group_src: int) -> Work:
        stream, world = self._stream(group, frozenset((group.rank(), group_src))), self._simulation.world
        what = f"the receive from {group_src}"
        self._simulation.memories.received(tensor.untyped_storage())
        end = self._issue(stream, tensor, True, what)
        if not stream.knows(world.compute.number, world.compute.time):
            world.report(f"{what} in {stream.name} does not wait for its place: it may start before what precedes it")
        with torch._C._DisableTorchDispatch():
            copy = torch.empty_like(tensor)
            return self._start(end, self._network.irecv(copy, group, group_src), [(Place(tensor), copy)])

    def all_reduce(
        self, tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Work | None:
        end = self._issue(self._stream(group, frozenset()), tensor, True, "the all-reduce")
        with torch._C._DisableTorchDispatch():
            copy = tensor.detach().clone()
            work = self._start(end, self._network.all_reduce(copy, group), [(Place(tensor), copy)])
        if not async_op:
            work.wait()
            return None
        return work

    def broadcast(self, tensor: torch.Tensor, src: int, group: Any, async_op: bool) -> Work:
        """async_op: as all that uses this gives it."""
        write = dist.get_rank() != src
        end = self._issue(self._stream(group, frozenset()), tensor, write, "the broadcast")
        with torch._C._DisableTorchDispatch():
            copy = tensor.detach().clone()
            into = [(Place(tensor), copy)] * write
            return self._start(end, self._network.broadcast(copy, src, group), into, copy)

    def reduce(self, tensor: torch.Tensor, dst: int, group: Any, async_op: bool) -> Work:
        """async_op: as all that uses this gives it."""
        write = dist.get_rank() == dst
        end = self._issue(self._stream(group, frozenset()), tensor, write, "the reduction")
        with torch._C._DisableTorchDispatch():
            copy = tensor.detach().clone()
            into = [(Place(tensor), copy)] * write
            return self._start(end, self._network.reduce(copy, dst, group), into, copy)

    def all_gather(self, tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any, async_op: bool) -> Work:
        """async_op: as all that uses this gives it."""
        stream = self._stream(group, frozenset())
        self._issue(stream, tensor, False, "the all-gather")
        for each in tensors:
            end = self._issue(stream, each, True, "the all-gather")
        with torch._C._DisableTorchDispatch():
            copy, copies = tensor.detach().clone(), [torch.empty_like(each) for each in tensors]
            into = list(zip(map(Place, tensors), copies, strict=True))
            return self._start(end, self._network.all_gather(copies, copy, group), into, copy)

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, group: Any, async_op: bool) -> Work:
        """async_op: as all that uses this gives it."""
        return self._from_into(output, tensor, group, "the all-to-all", self._network.all_to_all)

    def gather_into(
        self, output: torch.Tensor, tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Work | None:
        """`all_gather_into_tensor`."""
        work = self._from_into(output, tensor, group, "the gather", self._network.gather_into)
        return _or_waited(work, async_op)

    def scatter_sum(
        self, output: torch.Tensor, tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Work | None:
        """`reduce_scatter_tensor`."""
        work = self._from_into(output, tensor, group, "the scatter", self._network.scatter_sum)
        return _or_waited(work, async_op)

    def _from_into(
        self, output: torch.Tensor, tensor: torch.Tensor, group: Any, what: str, start: Callable[..., Any]
    ) -> Work:
        stream = self._stream(group, frozenset())
        self._issue(stream, tensor, False, what)
        end = self._issue(stream, output, True, what)
        with torch._C._DisableTorchDispatch():
            copy, into = tensor.detach().clone(), torch.empty_like(output)
            return self._start(end, start(into, copy, group), [(Place(output), into)], copy)

    def batch(self, ops: Sequence[PeerOp]) -> list[Work]:
        return [each.op(each.tensor, each.group, each.group_peer) for each in ops]

    def _start(
        self, end: Clock, real: Any, into: Sequence[tuple[Place, torch.Tensor]], kept: torch.Tensor | None = None
    ) -> Work:
        self._works.append(Work(self._simulation, end, real, into, kept))
        return self._works[-1]

    def drain(self) -> None:
        """Wait until all bytes have left."""
        for work in self._works:
            work.arrive()
        self._works.clear()

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """torch.distributed's functions are these."""

        def waiting(start: Callable[..., Work]) -> Callable[..., None]:
            def run(*args: Any, **kwargs: Any) -> None:
                start(*args, **kwargs).wait()

            return run

        functions: dict[str, Any] = {"isend": self.isend, "irecv": self.irecv, "all_reduce": self.all_reduce}
        functions |= {"broadcast": self.broadcast, "reduce": self.reduce, "all_gather": self.all_gather}
        functions |= {"all_gather_into_tensor": self.gather_into, "reduce_scatter_tensor": self.scatter_sum}
        functions |= {"all_to_all_single": self.all_to_all, "batch_isend_irecv": self.batch, "P2POp": PeerOp}
        with ExitStack() as stack:
            for name, function in (*functions.items(), ("send", waiting(self.isend)), ("recv", waiting(self.irecv))):
                stack.enter_context(mock.patch.object(dist, name, function))
            yield


def _or_waited(work: Work, async_op: bool) -> Work | None:
    if async_op:
        return work
    work.wait()
    return None
