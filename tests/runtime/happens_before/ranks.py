"""What the ranks of test_happens_before.py run: two steps of every case, on a simulated device."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from helixpipe.model.device import device, prepare

prepare()  # before megatron-core is imported, whose notices it silences

from megatron.core import parallel_state

from helixpipe.runtime.gloo import GlooReceipt, GlooTransport
from helixpipe.runtime.nccl import NcclTransport
from tests.model.common import set_parallel
from tests.runtime.equality import Case, lowered, make_executor, make_step
from tests.runtime.happens_before import gloo, threads
from tests.runtime.happens_before.cuda import Simulation
from tests.runtime.happens_before.nccl import Communicators, OverGloo

STEPS = 2
"""Memory that one step lets go of the next one uses."""

CUDA = torch.device("cuda", 0)


class WatchedGloo(GlooTransport):
    """Gloo with tensors of a GPU; the locks that a class makes when it is imported are followed as well."""

    def receive(self, shapes: Sequence[torch.Size], dtype: torch.dtype, source: int, number: int) -> GlooReceipt:
        receipt = super().receive(shapes, dtype, source, number)
        receipt.lock = threading.Lock()
        return receipt


@dataclass
class Found:
    """Of one case on one rank. gradients: a number that tells them from others. strided: tensors sent that are not
    contiguous."""

    findings: dict[str, int]
    kernels: int
    freed: int
    sent: int
    strided: int
    gradients: float


@contextmanager
def simulated(seed: int) -> Iterator[tuple[Simulation, Communicators]]:
    """A simulated device, its NCCL carried by the gloo of the real ranks."""
    simulation = Simulation(seed)
    communicators = Communicators(simulation, OverGloo())
    with threads.replaced(simulation.world, simulation.kernels), communicators.replaced(), simulation.replaced():
        yield simulation, communicators


def run_checked(rank: int, world_size: int, transport: str, cases: list[Case]) -> list[Found]:
    """All cases, the transport ("nccl" or "gloo") and the device made anew for each number of pipeline ranks."""
    found: dict[int, Found] = {}
    for pp in sorted({case.pp for case in cases}):
        set_parallel(tp=1, pp=pp)
        group: Any = parallel_state.get_pipeline_model_parallel_group()
        with simulated(rank) as (simulation, communicators):
            own: Any
            if transport == "nccl":
                own = NcclTransport(group, CUDA)
            else:
                own = WatchedGloo(gloo.Group(simulation, group), CUDA)  # type: ignore[arg-type]
            for name, value in vars(own).items():
                if isinstance(value, torch.cuda.Stream):
                    value.actor.name = f"stream {name.strip('_')}"  # type: ignore[attr-defined]
            for index, case in enumerate(cases):
                if case.pp == pp:
                    found[index] = _run_case(case, own, simulation, communicators)
            own.close()
    return [found[index] for index in range(len(cases))]


def _run_case(case: Case, own: Any, simulation: Simulation, communicators: Communicators) -> Found:
    world, memories = simulation.world, simulation.memories
    world.findings.clear()
    kernels, freed = world.kernels, memories.freed
    model, executor = make_executor(case, own)
    sent: list[bool] = []
    executor.transport = _Counting(own, sent)
    plan, step = lowered(case, own), make_step(case)
    for _ in range(STEPS):
        executor.run(plan, step)
    communicators.drain()
    gradients = sum(float(weight.grad.abs().sum()) for weight in model.parameters() if weight.grad is not None)
    del executor
    memories.settle()
    return Found(
        dict(world.findings), world.kernels - kernels, memories.freed - freed, len(sent), sent.count(False), gradients
    )


class _Counting:
    """A transport that notes for each tensor it sends whether it is contiguous."""

    def __init__(self, own: Any, sent: list[bool]):
        self._own, self._sent = own, sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def send(self, tensors: Sequence[torch.Tensor], target: int, number: int, since: Any = None) -> None:
        self._sent.extend(tensor.is_contiguous() for tensor in tensors)
        self._own.send(tensors, target, number, since)
