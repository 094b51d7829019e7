"""Runs on the ranks of test_happens_before.py: two steps or more of every case, on a simulated device; where there are
chunks, of unlike lengths."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from helixpipe.model.device import prepare

prepare()  # before megatron-core is imported, whose notices it silences

from megatron.core import parallel_state

from helixpipe.lowering.lower import lower
from helixpipe.model import PipelineModel
from helixpipe.planning.memory.sharding import shared_out
from helixpipe.runtime.executor import Executor
from helixpipe.runtime.gloo import GlooReceipt, GlooTransport
from helixpipe.runtime.nccl import NcclTransport
from helixpipe.runtime.run_ahead import RunAhead
from helixpipe.runtime.sharded_weights import ShardedWeights
from tests.model.common import set_parallel
from tests.runtime.equality import Case, lowered, make_model, make_step
from tests.runtime.happens_before import gloo, threads
from tests.runtime.happens_before.copies import WatchedArena, watched_offloader
from tests.runtime.happens_before.cuda import Simulation
from tests.runtime.happens_before.nccl import Communicators, OverGloo
from tests.runtime.recorded_graphs import RecordedGraphs

PUT_RIGHT = ("zb2p", "zbv", "wzb2")
"""Schedules for which the opening of a step is run again, as after an update that was wrong."""

CLOSE = ("1f1b", "weipipe")
"""Schedules of which one more step is run as on a GPU, with the host a few ops ahead; in the others nothing keeps it
from being a whole step ahead, which finds more."""

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
    contiguous. moved: bytes that left the device. again: how often memory of the host was given out once more."""

    findings: dict[str, int]
    kernels: int
    freed: int
    sent: int
    strided: int
    gradients: float
    moved: int = 0
    again: int = 0


@contextmanager
def simulated(seed: int) -> Iterator[tuple[Simulation, Communicators]]:
    """A simulated device, its NCCL carried by the gloo of the real ranks."""
    simulation = Simulation(seed)
    communicators = Communicators(simulation, OverGloo())
    with threads.replaced(simulation.world, simulation.kernels), communicators.replaced(), simulation.replaced():
        yield simulation, communicators


def run_checked(rank: int, world_size: int, transport: str, cases: list[Case]) -> list[Found]:
    """What is found in each case over a transport, "nccl" or "gloo", made anew for each number of pipeline and of
    context-parallel ranks."""
    found: dict[Case, Found] = {}
    for pp, cp in sorted({(case.pp, case.cp) for case in cases}):
        set_parallel(tp=1, pp=pp, cp=cp)
        models = {case: make_model(case) for case in cases if (case.pp, case.cp) == (pp, cp)}
        with simulated(rank) as (simulation, communicators):
            group = gloo.Group(simulation, parallel_state.get_pipeline_model_parallel_group())
            own = _make(transport, group)
            for case, model in models.items():
                found[case] = _run_case(case, model, own, simulation, (communicators, group))
            own.close()
    return [found[case] for case in cases]


def _make(transport: str, group: gloo.Group) -> Any:
    own: Any
    if transport == "nccl":
        own = NcclTransport(parallel_state.get_pipeline_model_parallel_group(), CUDA)
    else:
        own = WatchedGloo(group, CUDA)
    for name, value in vars(own).items():
        if isinstance(value, torch.cuda.Stream):
            value.actor.name = f"stream {name.strip('_')}"  # type: ignore[attr-defined]
    return own


def _run_case(
    case: Case, model: PipelineModel, own: Any, simulation: Simulation, networks: Sequence[Communicators | gloo.Group]
) -> Found:  # fmt: skip
    world, memories = simulation.world, simulation.memories
    world.findings.clear()
    kernels, freed = world.kernels, memories.freed
    model.zero_grad()
    if case.graphs:
        model.graphs = RecordedGraphs(model)
    sent: list[bool] = []
    offloader = None if case.offload is None else watched_offloader(simulation, CUDA)
    rank, transport = parallel_state.get_pipeline_model_parallel_rank(), _Counting(own, sent)
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    plan, store = lowered(case), None
    if case.sharded:
        data = parallel_state.get_data_parallel_group()
        program = shared_out(case.program(), data.size(), case.gathered_once)
        own_stages = [stage.pieces for number, stage in enumerate(program.stages) if rank in program.holders(number)]
        plan, store = lower(program), ShardedWeights(model, own_stages, data, torch.float64)
    executor = Executor(rank, model, transport, offloader=offloader, group=pipeline, weights=store)
    step = make_step(case)
    executor.run(plan, step)
    if not case.graphs:  # which are of one length
        plan = lower(replace(case, lengths=case.lengths[::-1]).program()) if case.lengths else plan
    executor.run(plan, replace(step, confirm=lambda: False) if case.schedule in PUT_RIGHT else step)  # takes its memory
    if case.schedule in CLOSE:
        executor.run_ahead = RunAhead(lambda: torch.cuda.Event(blocking=True))
        executor.run(plan, step)
    if store is not None:
        for unit in store.units:
            unit.finish()
    if isinstance(model.graphs, RecordedGraphs):
        model.graphs.finish()
    for network in networks:
        network.drain()
    found_gradients = (
        [weight.grad for weight in model.parameters()] if store is None else [u.total for u in store.units]
    )
    gradients = sum(float(each.abs().sum()) for each in found_gradients if each is not None)
    found = Found({}, world.kernels - kernels, memories.freed - freed, len(sent), sent.count(False), gradients)
    if offloader is not None:
        found.moved, found.again = offloader.moved, cast(WatchedArena, offloader.arena).again
    del executor, offloader
    memories.settle()
    found.findings = dict(world.findings)
    return found


class _Counting:
    """A transport that notes for each tensor it sends whether it is contiguous."""

    def __init__(self, own: Any, sent: list[bool]):
        self._own, self._sent = own, sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def send(self, tensors: Sequence[torch.Tensor], target: int, number: int, since: Any = None) -> None:
        self._sent.extend(tensor.is_contiguous() for tensor in tensors)
        self._own.send(tensors, target, number, since)
