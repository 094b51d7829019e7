"""How to run a model on so many GPUs under one schedule: tensor-parallel size, pipeline size, chunks, recomputation.

SPPO searches the first three (Chen et al., arXiv 2503.10377); here any schedule can be asked for. Pairs of sizes that
promise most are looked at first, and those not at all whose work alone takes longer than the steps already found. For
each pair the best of `Choice`s is taken at a middling number of chunks, then the number of chunks that is best with it;
where that recomputes, what `--offload-activations auto` finds is compared with it. All by simulation, under the memory
of the hardware. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf

from helixpipe.common.errors import ScheduleError, UserError
from helixpipe.costs.hardware import GIB, Hardware
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Layout, ModelShape
from helixpipe.lowering.bound import stage_work
from helixpipe.lowering.lower import lower
from helixpipe.planning.catalogue import Schedule, Shape
from helixpipe.planning.chunk_lengths import CHUNK_COUNTS, balanced_lengths, default_alignment, short_chunks
from helixpipe.planning.offload import OffloadOptions
from helixpipe.planning.recompute import RecomputeOptions
from helixpipe.program.program import Program
from helixpipe.program.stages import even_stages
from helixpipe.program.workload import Extent
from helixpipe.simulate.simulator import simulate

FIRST_COUNT = 32
"""Chunks with which it is found what to recompute: memory depends little on their number."""

MOST_OPS = 50_000
"""Of a program that is tried; some seconds."""


@dataclass(frozen=True)
class Choice:
    """One way to treat activations. flags: of training that ask for what is recomputed."""

    flags: str = ""
    recompute: RecomputeOptions = field(default_factory=RecomputeOptions)
    offload: OffloadOptions = field(default_factory=lambda: OffloadOptions("off"))


CHOICES = (
    Choice(),
    *(
        Choice(f"--recompute-granularity {name}", RecomputeOptions(name))
        for name in ("selective", "without-attention", "full")
    ),
)


OFFLOADED = Choice(offload=OffloadOptions("auto"))
"""Where all that is kept does not fit, what is found to be best to offload and to recompute; it takes as long to find
as many other tries."""


@dataclass(frozen=True)
class Problem:
    """What is given. sequences: of a step, over all pipelines. limit: bytes of a GPU that may be used. layout: with the
    tensor-parallel size still to be found. adam_on_host: as of `ModelCosts`. build: the catalogue's, for programs of
    the schedule with its options."""

    schedule: Schedule
    build: Callable[[Shape], Program]
    model: ModelShape
    hardware: Hardware
    gpus: int
    sequences: int
    layout: Layout
    limit: float
    distributed_optimizer: bool = True
    adam_on_host: float = 0.0
    choices: Sequence[Choice] = CHOICES
    offloaded: Choice | None = OFFLOADED

    @property
    def seq_length(self) -> int:
        return self.model.seq_length

    def costs(self, tensor_parallel: int, ranks: int) -> ModelCosts:
        """Raises UserError where the model cannot be cut so."""
        split = self.layout.sequence_parallel and tensor_parallel > 1
        layout = replace(self.layout, tensor_parallel=tensor_parallel, sequence_parallel=split)
        data_parallel = self.gpus // (tensor_parallel * ranks)
        return ModelCosts(
            self.model,
            self.hardware,
            layout,
            self.seq_length,
            data_parallel,
            self.distributed_optimizer,
            adam_on_host=self.adam_on_host,
        )

    def microbatches(self, costs: ModelCosts) -> int:
        return self.sequences // (costs.data_parallel * costs.layout.micro_batch_size)


@dataclass(frozen=True)
class Solution:
    """One way to run it. early: what is recomputed is so in idle time, too. step: seconds. bubble: part of the
    pipeline's time. peak: bytes of the fullest GPU; host: of host memory that one needs."""

    costs: ModelCosts
    ranks: int
    microbatches: int
    chunks: int
    choice: Choice
    early: bool
    step: float
    bubble: float
    peak: float
    host: float = 0.0

    @property
    def tensor_parallel(self) -> int:
        return self.costs.layout.tensor_parallel


def solve(problem: Problem, most: int = 3) -> list[Solution]:
    """The best ways, the fastest first, one for each pair of sizes. Raises UserError where none fits."""
    found: list[Solution] = []
    least, least_host, lengths = inf, inf, _Lengths()
    for bound, _, costs, ranks in sorted(_sizes(problem), key=lambda each: each[1]):
        slowest = found[-1].step if len(found) == most else inf
        if bound >= slowest:
            continue
        tried = _tried(problem, costs, ranks, lengths, slowest)
        least = min([least, *(each.peak for each in tried)])
        least_host = min([least_host, *(each.host for each in tried if each.peak <= problem.limit)])
        fitting = [each for each in tried if each.peak <= problem.limit and each.host <= each.costs.host_memory]
        if fitting:
            found = sorted([*found, min(fitting, key=lambda each: each.step)], key=lambda each: each.step)[:most]
    if found:
        return found
    if least == inf:
        raise UserError(
            f"--gpus {problem.gpus} cannot be divided into tensor-parallel and pipeline sizes that "
            f"{problem.schedule.name} takes for {problem.model.layers} layers, {problem.model.groups} query groups and "
            f"--global-batch-size {problem.sequences}."
        )
    if least_host < inf:
        raise UserError(
            f"the host's memory is too little: {least_host / GIB:.3g} GiB a GPU would do; raise --host-memory, or move "
            "less there."
        )
    raise UserError(
        f"--gpus {problem.gpus} are too few for --seq-length {problem.seq_length}: the least that was found is "
        f"{least / GIB:.1f} GiB a GPU, and {problem.limit / GIB:.1f} are usable."
    )


def _sizes(problem: Problem) -> Iterator[tuple[float, float, ModelCosts, int]]:
    """Pairs of sizes that divide the GPUs, the model and the batch; before each about the least
    time of a step, and what it comes to with the bubble of 1f1b over chunks and one microbatch."""
    for tensor_parallel in _divisors(problem.gpus):
        for ranks in _divisors(problem.gpus // tensor_parallel):
            if problem.schedule.one_rank and ranks > 1:
                continue
            try:
                costs = problem.costs(tensor_parallel, ranks)
            except UserError:
                continue
            if problem.sequences % (costs.data_parallel * costs.layout.micro_batch_size) == 0:
                least = _work_time(costs, problem, ranks)
                yield least, least * (1 + (ranks - 1) / _counts(problem, costs, ranks)[-1]), costs, ranks


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _work_time(costs: ModelCosts, problem: Problem, ranks: int) -> float:
    """Seconds of a step if nothing idled and nothing was computed twice."""
    stages, whole = even_stages(costs.model.layers, 1), costs.seq_length
    times = (costs.op_time(stage_work(kind, stages, 0, (Extent(whole, 0),), whole)) for kind in "FB")
    return sum(times) * problem.microbatches(costs) / ranks


class _Lengths:
    """Lengths of chunks that take equally long, found once for each tensor-parallel size."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], tuple[int, ...]] = {}

    def find(self, costs: ModelCosts, chunks: int) -> tuple[int, ...] | None:
        if chunks == 1:
            return None
        key = costs.layout.tensor_parallel, chunks
        if key not in self.known:
            alignment = default_alignment(costs.seq_length, chunks, costs.layout.unit)
            stages = even_stages(costs.model.layers, 1)
            self.known[key] = balanced_lengths(costs, stages, costs.seq_length, chunks, alignment)
        return self.known[key]


def _tried(problem: Problem, costs: ModelCosts, ranks: int, lengths: _Lengths, slowest: float) -> list[Solution]:
    """What was tried for one pair of sizes; nothing where the schedule takes no such shape. slowest: a step that takes
    longer is of no use."""
    counts = _counts(problem, costs, ranks)
    middle = max(index for index, count in enumerate(counts) if count <= FIRST_COUNT)
    # Placing recomputation in idle time takes longer than all else, so the search does without.
    attempt = _Attempts(problem, costs, ranks, lengths)
    try:
        tried = [attempt(counts[middle], choice, early=False) for choice in problem.choices]
    except ScheduleError:
        return []
    best = min(tried, key=lambda each: (max(each.peak, problem.limit), each.step))
    # At best bubbles fall as one over the number of chunks, and all else stays.
    if best.step * (1 - best.bubble * (1 - counts[middle] / counts[-1])) >= slowest:
        return tried
    for step in (1, -1):  # the time falls and rises again with the number of chunks
        index, before = middle + step, best
        while 0 <= index < len(counts):
            tried.append(attempt(counts[index], best.choice, early=False))
            if tried[-1].step >= before.step:
                break
            index, before = index + step, tried[-1]
    last = min(tried, key=lambda each: (max(each.peak, problem.limit), each.step))
    if last.choice.recompute.granularity is None:
        return tried
    tried.append(attempt(last.chunks, last.choice, early=True))
    kept = next((each for each in tried if each.choice.recompute.granularity is None), None)
    if problem.offloaded is not None and kept is not None and kept.step < min(tried[-1].step, slowest):
        with suppress(ScheduleError):  # nothing fits
            tried.append(attempt(last.chunks, problem.offloaded, early=True))
    return tried


def _counts(problem: Problem, costs: ModelCosts, ranks: int) -> list[int]:
    """The numbers of chunks that may be tried, upwards."""
    if not problem.schedule.chunks:
        return [1]
    micro, ops = costs.layout.micro_batch_size, 2 * ranks * problem.microbatches(costs)
    return [
        count
        for count in CHUNK_COUNTS
        if count == 1
        or (short_chunks(costs.seq_length, count, micro, costs.hardware) is None and ops * count <= MOST_OPS)
    ]


@dataclass(frozen=True)
class _Attempts:
    problem: Problem
    costs: ModelCosts
    ranks: int
    lengths: _Lengths

    def __call__(self, chunks: int, choice: Choice, early: bool) -> Solution:
        """A step of so many chunks. early: recomputation may be placed in idle time."""
        problem, costs = self.problem, self.costs
        shape = Shape(
            self.ranks,
            problem.microbatches(costs),
            costs.model.layers,
            chunks,
            chunk_lengths=self.lengths.find(costs, chunks),
            costs=costs,
            recompute=replace(choice.recompute, recompute_early=early),
            memory_limit=problem.limit,
            offload=choice.offload,
            host_limit=costs.host_memory,
        )
        program = problem.build(shape)
        return _simulated(program, costs, choice, early)


def _simulated(program: Program, costs: ModelCosts, choice: Choice, early: bool) -> Solution:
    simulation = simulate(lower(program, costs), costs, "s")
    step = simulation.makespan + sum(costs.after_time(program))
    return Solution(
        costs,
        program.num_ranks,
        program.num_microbatches,
        program.num_chunks,
        choice,
        early,
        step,
        simulation.bubble_ratio,
        max(simulation.device_needs),
        max(simulation.host_needs),
    )
