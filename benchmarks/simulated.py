"""Shared by the simulated benchmarks: a model on a cluster, a schedule with its flags, a step of it, the best of some.

All figures come from the cost model (docs/costs.md).
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeVar, cast

from benchmarks.report import progress
from helixpipe.cli.model import ModelOnCluster, ModelOptions, make_plan
from helixpipe.cli.model_report import StepReport, report
from helixpipe.common.flags import option
from helixpipe.costs.hardware import GIB, find_hardware
from helixpipe.costs.models import OFF
from helixpipe.costs.verdict import tensor_limit
from helixpipe.lowering.lower import lower
from helixpipe.planning.memory.offload import OffloadOptions
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.planning.setup import Setup
from helixpipe.planning.vocabulary.choice import VocabularyOptions
from helixpipe.program.program import Program
from helixpipe.simulate.simulator import simulate
from schedules import CATALOGUE

Given = TypeVar("Given")
Found = TypeVar("Found")

_FLAGS = frozenset(each.name for each in dataclasses.fields(ModelOptions))


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A model on a cluster, one pipeline over all its GPUs. tokens: of a sequence, in units of 1024. The others are
    flags of `helixpipe simulate`; microbatches: 2p if not given."""

    model: str
    hardware: str
    tokens: int
    nodes: int
    tensor_parallel: int
    context_parallel: int | None = None
    cp_comm_type: str | None = None
    microbatches: int | None = None
    gpu_memory: float | None = None
    network_bandwidth: float | None = None
    network_adapters: int | None = None

    def plan(self, **flags: Any) -> ModelOnCluster:
        """Return the model on its cluster that the flags come to, with more flags."""
        own = {name: value for name, value in vars(self).items() if name in _FLAGS}
        options = ModelOptions(**own, seq_length=self.tokens * 1024, **flags)
        plan = make_plan(options, None, self.microbatches, None)
        assert plan is not None
        return plan


Granularity = Literal["selective", "full", "without-attention"]

RECOMPUTED: Mapping[str, Granularity | None] = MappingProxyType(
    {"k": None, "s": "selective", "w": "without-attention", "f": "full"}
)
"""What even recomputation leaves to be made twice, by its mark in the tables: from nothing to whole layers."""


@dataclass(frozen=True)
class Setting:
    """A schedule with its flags. mark: how tables name what it recomputes. chunk_size: tokens of a slice of the MLP.
    overlap: how collectives inside ops are hidden; it is the plan's costs that know."""

    schedule: str
    mark: str = ""
    recompute: RecomputeOptions = field(default_factory=RecomputeOptions)
    options: Any = None
    chunk_size: int = 0
    chunks: int = 1
    virtual_stages: int | None = None
    chunk_lengths: tuple[int, ...] | None = None
    offload: str = "off"
    vocabulary: str = "ends"
    overlap: str = OFF

    def program(self, plan: ModelOnCluster, limited: bool = True, **step: Any) -> Program:
        """limited: whether the schedule knows how much memory there is. step: more for `Setup.shape`. Raises
        ScheduleError for a shape that the schedule refuses."""
        setup = Setup(
            plan.ranks,
            plan.layers,
            plan.costs,
            self.virtual_stages,
            self.recompute,
            plan.limit if limited else None,
            OffloadOptions(self.offload),
            plan.costs.host_memory,
            vocabulary=VocabularyOptions(cast(Any, self.vocabulary)),
            sharded=plan.costs.sharded,
        )
        size = {"microbatches": plan.microbatches, "chunks": self.chunks, "chunk_lengths": self.chunk_lengths, **step}
        return CATALOGUE.build(self.schedule, setup.shape(**size), self.options)


@dataclass(frozen=True)
class Result:
    """A step of a setting. step: seconds. tokens: a second and GPU. peak: bytes of tensors on the fullest GPU. fits:
    whether they, and the host's, have room. bubble: share of the pipeline's time."""

    setting: Setting
    step: float
    tokens: float
    peak: float
    fits: bool
    bubble: float

    @property
    def gib(self) -> str:
        """Of the fullest GPU; with a mark where that is too much."""
        return f"{self.peak / GIB:.0f} GiB{'' if self.fits else '!'}"


def simulated(plan: ModelOnCluster, program: Program) -> StepReport:
    return report(simulate(lower(program, plan.costs), plan.costs, "s"), plan)


def result_of(setting: Setting, step: StepReport) -> Result:
    bubble = step.simulation.bubble_ratio
    return Result(setting, step.step_time, step.tokens_per_gpu, step.peak, step.fits, bubble)


def fastest(results: Iterable[Result | None]) -> Result | None:
    """Of those that fit the fastest, else the one that needs the least memory."""
    found = [result for result in results if result is not None]
    fitting = [result for result in found if result.fits]
    if fitting:
        return max(fitting, key=lambda result: result.tokens)
    return min(found, key=lambda result: result.peak, default=None)


def assumed(name: str, network_efficiency: float | None = None, network: float | None = None) -> str:
    """Return what the figures of this hardware rest on. network_efficiency: the share of the network that is reached,
    network: bytes a second of a node, each where it is not the hardware's own."""
    hardware = find_hardware(name)
    share, usable = hardware.efficiency, tensor_limit(hardware.memory) / GIB
    return (
        f"- {name}: {share.matmul:.0%} of {hardware.flops / 1e12:.0f} TFLOP/s in matrix products, "
        f"{share.attention:.0%} in attention, {share.memory:.0%} of memory bandwidth, {share.network:.0%} of NVLink, "
        f"{network_efficiency or share.network:.0%} of the network's {(network or hardware.network) / 1e9:.0f} GB/s a "
        f"node, which its 8 GPUs share; {usable:.0f} of {hardware.memory / GIB:.0f} GiB for tensors"
    )


@dataclass(frozen=True)
class Jobs:
    """Options of a benchmark that simulates in several processes."""

    jobs: int | None = option(None, "Processes (default: one a core).", at_least=1)


def in_processes(
    function: Callable[[Given], Found], work: Sequence[Given], options: Jobs, told: Callable[[Found], str] | None = None
) -> list[Found]:
    """`map` over processes of their own. told: what is said of each result as it comes, on standard error."""
    found = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs or os.cpu_count(), context) as pool:
        for result in pool.map(function, work):
            found.append(result)
            if told is not None:
                progress(told(result))
    return found
