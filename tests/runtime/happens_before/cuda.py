"""A CUDA on the CPU: streams, events, pinned memory and copies do at once what they are told, and keep clocks.

`simulated` replaces torch's. Tensors of the "device" are tensors of the CPU; `torch.device("cuda")` may be asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from tests.runtime.happens_before.clocks import Actor, Clock, World
from tests.runtime.happens_before.kernels import Kernels
from tests.runtime.happens_before.memory import Memories


class Simulation:
    """The state that the replacements share."""

    def __init__(self, seed: int = 0):
        self.world = World(seed)
        self.memories = Memories(self.world)
        self.kernels = Kernels(self.world, self.memories)

    # ----------------------------------------------------------------------------------------- streams and events

    def classes(self) -> tuple[type, type]:
        """`torch.cuda.Stream` and `torch.cuda.Event`."""
        world = self.world

        class Event:
            def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
                self.blocking = blocking
                self.seen: Clock = {}  # a wait for an event that was never recorded does nothing

            def record(self, stream: Any = None) -> None:
                actor = world.stream if stream is None else stream.actor
                actor.hear(world.thread)
                self.seen = dict(actor.known)
                world.turned()

            def wait(self, stream: Any = None) -> None:
                (world.stream if stream is None else stream.actor).learn(self.seen)

            def synchronize(self) -> None:
                if world.thread is not world.main and not self.blocking:
                    world.report("a thread beside the main one spins until an event has come: it is not a blocking one")
                world.wait_in_thread(self.seen)

            def query(self) -> bool:
                if world.random.random() < 0.5:
                    return False
                world.wait_in_thread(self.seen)
                return True

        class Stream:
            def __init__(self, device: Any = None, priority: int = 0, actor: Actor | None = None):
                self.actor = actor or world.actor(f"stream {len(world.actors)}")

            def wait_event(self, event: Event) -> None:
                event.wait(self)

            def wait_stream(self, stream: Stream) -> None:
                self.wait_event(stream.record_event())

            def record_event(self, event: Event | None = None) -> Event:
                event = event or Event()
                event.record(self)
                return event

            def synchronize(self) -> None:
                world.wait_in_thread(self.actor.known)

            def query(self) -> bool:
                return self.record_event().query()

        return Stream, Event

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """`torch.cuda.stream`."""
        before, self.world.stream = self.world.stream, stream.actor
        try:
            yield
        finally:
            self.world.stream = before

    # ---------------------------------------------------------------------------------------------------- tensors

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        self.memories.of(tensor.untyped_storage()).recorded.append(stream.actor)

    def resize(self, original: Callable[..., Any], storage: torch.UntypedStorage, size: int) -> Any:
        """`UntypedStorage.resize_`: memory goes back, and other memory comes, of the current stream."""
        self.memories.let_go(storage._cdata, "that was resized")
        result = original(storage, size)
        if size:
            self.memories.allocated(storage)
        return result

    def factory(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.empty` and others, on the device and in pinned memory."""

        def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
                kwargs["device"] = "cpu"
            tensor = original(*args, **kwargs)
            if pin_memory:
                self.memories.let_go(tensor.untyped_storage()._cdata, "")
                self.memories.allocated(tensor.untyped_storage(), pinned=True)
            return tensor

        return make

    def to(self, original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """`Tensor.to`, which copies from pinned memory to the device."""
        where = args[0] if args and isinstance(args[0], torch.device) else kwargs.get("device")
        if where is None or torch.device(where).type != "cuda":
            return original(tensor, *args, **kwargs)
        storage = tensor.untyped_storage()
        if self.memories.of(storage).home is not None:
            return tensor
        with torch._C._DisableTorchDispatch():
            copy = tensor.detach().clone()
        waits = not kwargs.get("non_blocking", False)
        self.kernels.kernel(
            "the copy to the device", {storage._cdata: storage}, set(), [copy.untyped_storage()], waits, copies=True
        )
        return copy

    def to_list(self, original: Callable[..., Any], tensor: torch.Tensor) -> Any:
        """`Tensor.tolist`, which reads where the tensor lies."""
        storage = tensor.untyped_storage()
        self.kernels.kernel("_local_scalar_dense", {storage._cdata: storage}, set(), [], True)
        return original(tensor)

    # ------------------------------------------------------------------------------------------------ replacements

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """torch's CUDA is this one."""
        stream, event = self.classes()
        resize, to, to_list = torch.UntypedStorage.resize_, torch.Tensor.to, torch.Tensor.tolist
        with ExitStack() as stack:

            def replace(where: Any, **what: Any) -> None:
                for name, value in what.items():
                    stack.enter_context(mock.patch.object(where, name, value))

            def current(device: Any = None) -> Any:
                return stream(actor=self.world.stream)

            def default(device: Any = None) -> Any:
                return stream(actor=self.world.compute)

            replace(torch.cuda, Stream=stream, Event=event, stream=self.stream, device=_any_device)
            replace(torch.cuda, current_stream=current, default_stream=default)
            replace(torch, **{name: self.factory(getattr(torch, name)) for name in ("empty", "zeros", "empty_like")})
            replace(torch.Tensor, record_stream=lambda tensor, stream: self.record_stream(tensor, stream))
            replace(torch.Tensor, to=lambda tensor, *args, **kwargs: self.to(to, tensor, *args, **kwargs))
            replace(torch.Tensor, tolist=lambda tensor: self.to_list(to_list, tensor))
            replace(torch.UntypedStorage, resize_=lambda storage, size: self.resize(resize, storage, size))
            stack.enter_context(self.kernels)
            yield


@contextmanager
def _any_device(device: Any) -> Iterator[None]:
    """`torch.cuda.device`: there is one."""
    yield
