"""Plans of steps over documents, no two of which are alike. They are made in a process of their own."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from helixpipe.common.errors import UserError
from helixpipe.costs.hardware import find_hardware
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.profile_costs import ProfileCosts
from helixpipe.lowering.project import LoweredProgram
from helixpipe.planning.catalogue import Schedule, Shape
from helixpipe.planning.documents.alike import lowered_with_rows, rows_alike, with_rows
from helixpipe.planning.documents.document_steps import StepPacker, dealt, row_program
from helixpipe.planning.documents.packing import Packing, most_slices, spread
from helixpipe.planning.memory.early import peak_memory
from helixpipe.planning.plan import Plan, make_plan
from helixpipe.program.files import is_file
from helixpipe.program.program import Program
from helixpipe.program.workload import Workload
from megatron.pretrain.config import Config
from megatron.pretrain.plan.costs import memory_limit, setup_of, training_costs
from schedules import build, find


class StepRequest(NamedTuple):
    """A request for a step's plan.

    split, step: which step, of training or of an evaluation. lengths: tokens of each document of the step, over all
    data-parallel ranks. dp_rank: the rank whose plan it is. quick: make it at once, without a search.
    """

    split: str
    step: int
    lengths: tuple[int, ...]
    dp_rank: int
    quick: bool = False


class PlanStatistics(NamedTuple):
    """Statistics of a plan, for the log.

    tokens: of the step, over all pipelines. chunks: of this pipeline. spread_of_time, spread_of_tokens: standard
    deviation over mean of all its chunks. seconds: time that planning took. predicted: simulated seconds of the step;
    bubble: simulated share of idle time.
    """

    tokens: int
    chunks: int
    spread_of_time: float
    spread_of_tokens: float
    seconds: float
    predicted: float
    bubble: float


@dataclass(frozen=True)
class StepPlan:
    """The plan of a step of documents. lowered: of a training step, or of an evaluation. numbers: of each document of
    its workload, its number in the step; higher ones are padding. deal: tells whether all pipelines mean the same
    dealing. shares: where all pipelines run one order, the rows and the numbers of each.
    """

    request: StepRequest
    lowered: LoweredProgram
    numbers: tuple[int, ...]
    deal: str
    report: PlanStatistics
    shares: tuple[tuple[Workload, tuple[int, ...]], ...] = ()

    def of(self, dp_rank: int) -> StepPlan:
        """Return the plan of that pipeline."""
        if not self.shares:
            return self
        workload, numbers = self.shares[dp_rank]
        return replace(self, lowered=lowered_with_rows(self.lowered, workload), numbers=numbers, shares=())


@dataclass(frozen=True)
class DocumentPlanner:
    """Makes a rank's plans from the lengths of a step's documents; can be sent to another process."""

    config: Config

    def __reduce__(self) -> tuple[type[DocumentPlanner], tuple[Config]]:
        return DocumentPlanner, (self.config,)  # without what it has found out so far

    def __call__(self, request: StepRequest) -> StepPlan:
        """Plan a step. Raises UserError if nothing fits, ScheduleError if the schedule cannot run so many
        microbatches.
        """
        begin = time.perf_counter()
        given, pipelines = len(request.lengths), self.config.parallel.data_parallel_size
        # A step of fewer documents than pipelines, as --max-tokens may make, has one of padding for each of the others.
        every = (*request.lengths, *[self._packer.alignment] * (pipelines - given))
        hands, _ = dealt(every, self.costs, self._layers, pipelines)
        numbers = [tuple(number for number in hand if number < given) for hand in hands]
        together = range(pipelines) if self.together else (request.dp_rank,)
        packings = [self._packed([every[number] for number in hands[rank]], request.quick) for rank in together]
        packing = max(packings, key=lambda each: each.time)
        program, workloads = self._program_of(packings, request.quick)
        plan = make_plan(program, self.costs)
        chosen = plan if request.split == "train" else plan.evaluation
        digest = hashlib.sha256(repr((request.step, request.lengths, hands)).encode()).hexdigest()
        report = self._report(request, chosen, packing, time.perf_counter() - begin)
        shares = tuple(zip(workloads, numbers, strict=True)) if self.together else ()
        return StepPlan(request, chosen.lowered, numbers[request.dp_rank], digest, report, shares)

    @property
    def together(self) -> bool:
        """Whether all pipelines run in one order because they gather weights together or exchange tokens with each
        other's experts, so that one plan is made for all. Ranks that share out experts lie side by side: where they
        divide a pipeline's ranks of a stage, none exchanges with another pipeline."""
        parallel = self.config.parallel
        tensor, experts = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
        exchanging = experts * (parallel.expert_tensor_parallel_size or tensor)
        apart = experts == 1 or tensor * parallel.context_parallel_size % exchanging == 0
        return parallel.data_parallel_size > 1 and (parallel.shards_weights or not apart)

    def _packed(self, lengths: Sequence[int], quick: bool) -> Packing:
        return self._packer_for(lengths).pack(lengths, search=not quick)

    def _program_of(self, packings: Sequence[Packing], quick: bool) -> tuple[Program, list[Workload]]:
        """Return one program for the rows of all pipelines, and their rows, divided alike. The order is that of the
        pipeline that takes longest, or of the next for which all fit into the memory.
        """
        slowest = sorted(range(len(packings)), key=lambda number: -packings[number].time)
        if len(packings) == 1:
            return self._program(packings[0].workload, quick), [packings[0].workload]
        unit, limit = self._packer.alignment, memory_limit(self.config)
        alike = rows_alike([each.workload for each in packings], unit)
        first: tuple[Program, list[Workload]] | None = None
        for number in slowest:
            program = self._program(alike[number], quick)
            _, *workloads = rows_alike([program.workload, *alike], unit)  # the schedule may ask for more rows
            first = first or (program, workloads)
            if limit is None or all(
                max(peak_memory(with_rows(program, each), self.costs)) <= limit * (1 + 1e-9) for each in workloads
            ):
                return program, workloads
        assert first is not None
        return first

    def nominal(self) -> Program:
        """Return the program of a step of the longest documents allowed, two for each pipeline rank."""
        parallel, length = self.config.parallel, self.config.model.seq_length or 1
        count = 2 * parallel.pipeline_model_parallel_size
        if (most := self.config.data.max_tokens) is not None:
            count = max(1, min(count, most // (length * parallel.data_parallel_size)))
        return self._program(self._packer.pack([length] * count, search=False).workload, quick=True)

    @cached_property
    def costs(self) -> ModelCosts | ProfileCosts:
        return training_costs(self.config)

    def _program(self, workload: Workload, quick: bool) -> Program:
        """Return the schedule's program. quick: one that is not searched for."""
        options, name, alignment = self.config.schedule_options, self._name, self._packer.alignment
        if quick and self._schedule is not None:
            options = self._schedule.quick(options)
        return row_program(lambda shape: build(name, shape, options), self._shape, workload, alignment)

    def _packer_for(self, lengths: Sequence[int]) -> StepPacker:
        """Return the packer with no more slices than these documents can have, whatever the flags: a step's may all be
        short.
        """
        packer = self._packer
        asked, most = packer.options.chunks, most_slices(max(lengths), packer.alignment)
        if asked is None or asked <= most:
            return packer
        return replace(packer, options=replace(packer.options, infinipipe_chunks=str(most)))

    @cached_property
    def _packer(self) -> StepPacker:
        config, parallel = self.config, self.config.parallel
        schedule = self._schedule
        adapts = schedule is not None and schedule.adapts(config.schedule_options)
        cut = schedule is None or schedule.chunks or config.packing.chunks is not None
        alignment = config.chunks.chunk_alignment or parallel.unit
        if alignment % parallel.unit:
            raise UserError(
                f"--chunk-alignment {alignment} must be a multiple of {parallel.unit}, which tensor- and "
                "context-parallel ranks can share."
            )
        return StepPacker(
            shape=self._shape,
            options=config.packing if cut else replace(config.packing, infinipipe_chunks="1"),
            adapts=adapts and config.recompute.granularity is None,
            alignment=alignment,
            least=1 if parallel.hardware is None else find_hardware(parallel.hardware).short_chunk,
        )

    @property
    def _name(self) -> str:
        return self.config.parallel.schedule

    @property
    def _schedule(self) -> Schedule | None:
        """Return the schedule, or None if the program is read from a file."""
        return None if is_file(self._name) else find(self._name)

    @cached_property
    def _shape(self) -> Shape:
        return setup_of(self.config, self.costs).shape()

    @property
    def _layers(self) -> int:
        return self.config.model.num_layers or 0

    def _report(self, request: StepRequest, plan: Plan, packing: Packing, seconds: float) -> PlanStatistics:
        times: dict[tuple[int, int], float] = {}
        for event in plan.simulation.timeline.ops:
            unit = event.op.microbatch, event.op.chunk
            times[unit] = times.get(unit, 0.0) + event.end - event.start
        return PlanStatistics(
            tokens=sum(request.lengths),
            chunks=len(times),
            spread_of_time=spread(list(times.values())),
            spread_of_tokens=packing.spread_of_tokens,
            seconds=seconds,
            predicted=plan.simulation.makespan,
            bubble=plan.simulation.bubble_ratio,
        )
