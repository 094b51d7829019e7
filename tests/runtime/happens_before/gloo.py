"""Gloo beside a simulated CUDA: it reads and writes pinned memory by itself until somebody has waited for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.runtime.happens_before.cuda import Simulation
from tests.runtime.happens_before.memory import Flight
from tests.runtime.happens_before.nccl import Place


class Group:
    """A process group of gloo, for who calls its `send` and `recv`."""

    def __init__(self, simulation: Simulation, real: Any):
        self._simulation, self._real = simulation, real
        self._works: list[Work] = []
        """Kept, so that the bytes come though nobody waits for them: that is reported, and nobody hangs."""

    def drain(self) -> None:
        """Wait until all bytes have left and come."""
        for work in self._works:
            work.arrive()
        self._works.clear()

    def rank(self) -> int:
        return int(self._real.rank())

    def size(self) -> int:
        return int(self._real.size())

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> Any:
        (tensor,) = tensors
        flight = self._take_off(tensor, Flight(f"gloo's send to {target}", write=False))
        with torch._C._DisableTorchDispatch():
            copy = tensor.detach().clone()
        return self._start(flight, self._real.send([copy], target, tag), copy, tensor)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        (tensor,) = tensors
        flight = self._take_off(tensor, Flight(f"gloo's receive from {source}", write=True))
        with torch._C._DisableTorchDispatch():
            copy = torch.empty_like(tensor)
        return self._start(flight, self._real.recv([copy], source, tag), copy, tensor)

    def _start(self, flight: Flight, real: Any, copy: torch.Tensor, tensor: torch.Tensor) -> Work:
        self._works.append(Work(self._simulation, flight, real, copy, Place(tensor)))
        return self._works[-1]

    def _take_off(self, tensor: torch.Tensor, flight: Flight) -> Flight:
        world, memories = self._simulation.world, self._simulation.memories
        world.turned()
        with world.lock:
            memory = memories.of(tensor.untyped_storage())
            if memory.home is not None:
                world.report(f"{flight.what} uses memory of the device")
            world.thread.step()
            memories.access(world.thread, memory, flight.write, flight.what)
            memory.flights.append(flight)
        return flight


@dataclass
class Work:
    """Of one message. place: where the tensor lies that is sent, or received into."""

    simulation: Simulation
    flight: Flight
    real: Any
    copy: torch.Tensor
    place: Place
    arrived: bool = False

    def arrive(self) -> None:
        """Wait, in truth; which gloo lets one do once."""
        if not self.arrived:
            self.real.wait()
            self.arrived = True

    def wait(self, timeout: Any = None) -> bool:
        world, memories = self.simulation.world, self.simulation.memories
        world.turned()
        self.arrive()
        with world.lock:
            storage = self.place.storage()
            if storage is None:
                return True
            memory = memories.of(storage)
            if self.flight not in memory.flights:
                return True
            memory.flights.remove(self.flight)
            world.thread.step()
            memories.access(world.thread, memory, self.flight.write, self.flight.what)
        if self.flight.write:
            with torch._C._DisableTorchDispatch():
                self.place.fill(self.copy)
        return True
