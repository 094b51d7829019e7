"""FlexSP, simulated: documents over sequence-parallel groups of different sizes, without a pipeline.

    make bench-flexsp ARGS="[--models 7b] [--context 192] [--corpora github]"

Yujie Wang et al., "FlexSP: Accelerating Large Language Model Training via Flexible Sequence Parallelism" (arXiv
2412.01523), as a baseline of InfiniPipe's setups. All GPUs hold parts of all weights (ZeRO's third stage). A step is a
few micro-batches, of documents of similar length; in each the GPUs form groups, and a group shares out the tokens of
its documents and swaps them for heads around core attention (Ulysses). Which groups there are, and which documents each
has, is chosen such that the slowest group takes the least time and all fit into the memory.

The paper solves that as a mixed integer program. Here every division of the GPUs into groups whose sizes are powers of
two is tried, with the longest document first to the group that is done first with it, by a quadratic in a document's
tokens that goes through three times of the cost model; sizes divide the heads. The slowest group of each micro-batch is
then simulated as it is, with its gathers and scatters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf, isfinite
from operator import attrgetter

from benchmarks.infinipipe import (
    CONTEXTS,
    CORPORA,
    HARDWARE,
    KEEP,
    MODELS,
    NODES,
    Batch,
    Compared,
    Setups,
    extremes,
    lengths_of,
    packed,
    plan_of,
    tuned_for,
)
from benchmarks.report import Outcome, markdown, write_tables
from benchmarks.simulated import RECOMPUTED, Granularity, Result, Setting, in_processes, simulated
from helixpipe.cli.model import ModelOnCluster, ModelOptions, make_plan
from helixpipe.planning.documents.capacity import token_capacity
from helixpipe.planning.documents.chunk_times import ChunkTimes
from helixpipe.planning.documents.filling import aligned
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.program.stages import even_stages
from helixpipe.program.workload import Slice, Workload

USUAL = 8192
"""Tokens a GPU at which a document's time and the room for tokens are asked of the cost model."""

MORE_MICROBATCHES = (1.0, 1.25, 1.5, 2.0)
"""How many times the fewest micro-batches that fit are tried."""

ROOM = 0.95
"""Share of the room for tokens that is filled: it is an estimate, and simulation judges."""


@dataclass(frozen=True)
class Group:
    """Sequence-parallel groups of `size` GPUs. plan: a step of one of them, whose copies do the rest of the batch."""

    size: int
    plan: ModelOnCluster
    recompute: RecomputeOptions

    @cached_property
    def _terms(self) -> tuple[float, float, float]:
        """(seconds of a micro-batch whatever is in it, of a token, of a squared token of a document)."""
        times = ChunkTimes(self.plan.costs, even_stages(self.plan.layers, 1), USUAL)
        short, long = USUAL * self.size, 4 * USUAL * self.size
        once = 2 * times.of_slice(short) - times.of_chunk([(short, 0), (short, 0)])
        low, high = ((times.of_slice(tokens) - once) / tokens for tokens in (short, long))
        square = (high - low) / (long - short)
        return once, low - square * short, square

    @property
    def once(self) -> float:
        return self._terms[0]

    def seconds(self, tokens: int) -> float:
        """That a document of so many tokens adds to its group's time."""
        _, each, square = self._terms
        return (each + square * tokens) * tokens

    @cached_property
    def room(self) -> float:
        """Tokens that a group has room for; with two layers whole, their gradients too."""
        plan, costs = self.plan, self.plan.costs
        stages = self.recompute.stages(even_stages(plan.layers, 1))
        layer = [piece for piece in stages[0].pieces if piece.layer == 0]
        whole = 2 * costs.bytes.parameters(layer) * (costs.layout.element_bytes + 4)
        tokens = float(USUAL * self.size)
        for _ in range(3):  # what an op needs beside is that of so many tokens
            (tokens_there,) = token_capacity(costs, stages, plan.limit - whole, max(int(tokens), self.size), USUAL)
            tokens = tokens_there if tokens_there < tokens else (tokens + tokens_there) / 2
        return ROOM * tokens

    def simulated(self, lengths: Sequence[int]) -> tuple[float, float]:
        """(seconds, bytes of the fullest GPU) of a micro-batch of these documents, each filled up to what the group
        can share."""
        unit = self.plan.costs.layout.unit
        chunk = tuple(Slice(number, 0, aligned(tokens, unit)) for number, tokens in enumerate(lengths))
        setting = Setting("none", recompute=self.recompute)
        program = setting.program(self.plan, False, microbatches=1, ragged=Workload(((chunk,),)))
        report = simulated(self.plan, program)
        return report.simulation.makespan, report.peak


@dataclass(frozen=True)
class Microbatch:
    """sizes: of the groups. documents: lengths, of each. seconds: of each, as estimated."""

    sizes: tuple[int, ...]
    documents: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]

    @property
    def slowest(self) -> int:
        return max(range(len(self.sizes)), key=lambda group: self.seconds[group])


def divisions(gpus: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way to make groups of these sizes, ascending, of all the GPUs, the largest group first."""
    if not gpus:
        yield ()
    elif sizes:
        largest = sizes[-1]
        for count in range(gpus // largest, -1, -1):
            for rest in divisions(gpus - count * largest, sizes[:-1]):
                yield (*[largest] * count, *rest)


def shared_out(
    lengths: Sequence[int], sizes: Sequence[int], groups: dict[int, Group], most: float
) -> Microbatch | None:
    """Documents, the longest first, each to the group that has room and is done first with it; None where one has no
    place, or where a group takes as long as `most`."""
    seconds, room = [groups[size].once for size in sizes], [groups[size].room for size in sizes]
    documents: list[list[int]] = [[] for _ in sizes]
    for tokens in lengths:
        ends = [
            (seconds[number] + groups[size].seconds(tokens) if room[number] >= tokens else inf, number)
            for number, size in enumerate(sizes)
        ]
        end, number = min(ends)
        if end >= most:
            return None
        seconds[number], room[number] = end, room[number] - tokens
        documents[number].append(tokens)
    return Microbatch(tuple(sizes), tuple(map(tuple, documents)), tuple(seconds))


def grouped(lengths: Sequence[int], gpus: int, groups: dict[int, Group]) -> Microbatch | None:
    """The division of the GPUs under which a micro-batch takes the least time; None where it does not fit."""
    best: Microbatch | None = None
    for sizes in divisions(gpus, sorted(groups)):
        found = shared_out(lengths, sizes, groups, best.seconds[best.slowest] if best else inf)
        best = found or best
    return best


def in_microbatches(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Documents of descending length in so many runs of about as many tokens."""
    share, filled = sum(lengths) / count, 0
    runs: list[list[int]] = [[]]
    for tokens in lengths:
        if filled >= share * len(runs) and len(runs) < count:
            runs.append([])
        runs[-1].append(tokens)
        filled += tokens
    return runs


def groups_of(model: str, context: int, hardware: str, nodes: int, granularity: Granularity | None) -> dict[int, Group]:
    """By size, those that divide the heads. context: in units of 1024 tokens."""
    groups, size = dict[int, Group](), 1
    while not groups or (size <= groups[1].plan.gpus and groups[1].plan.costs.model.heads % size == 0):
        options = ModelOptions(
            model=model, hardware=hardware, nodes=nodes, tensor_parallel=1, context_parallel=size, cp_comm_type="a2a",
            seq_length=context * 1024, data_parallel_sharding_strategy="optim_grads_params",
        )  # fmt: skip
        plan = make_plan(options, 1, 1, None)
        assert plan is not None
        groups[size] = Group(size, plan, RecomputeOptions(granularity, recompute_early=False))
        size *= 2
    return groups


def planned(lengths: Sequence[int], gpus: int, groups: dict[int, Group]) -> list[Microbatch] | None:
    """The micro-batches of a step, as many as take the least time by estimate; None where a document does not fit."""
    ordered, room = sorted(lengths, reverse=True), max(gpus / size * group.room for size, group in groups.items())
    if ordered[0] > max(group.room for group in groups.values()):
        return None
    fewest, best, least = max(1, -int(-sum(lengths) // room)), None, inf
    for times in MORE_MICROBATCHES:
        found = [grouped(run, gpus, groups) for run in in_microbatches(ordered, round(fewest * times))]
        whole = [each for each in found if each is not None]
        seconds = sum(each.seconds[each.slowest] for each in whole) if len(whole) == len(found) else inf
        if isfinite(seconds) and seconds < least:
            best, least = whole, seconds
    return best


def step(model: str, context: int, hardware: str, nodes: int, lengths: Sequence[int]) -> Result | None:
    """A step with the recomputation that makes it the shortest; None where none fits."""
    results = []
    for mark, granularity in RECOMPUTED.items():
        groups = groups_of(model, context, hardware, nodes, granularity)
        plan = next(iter(groups.values())).plan
        made = planned(lengths, plan.gpus, groups)
        if made is None:
            continue
        runs = [groups[each.sizes[each.slowest]].simulated(each.documents[each.slowest]) for each in made]
        optimizer = sum(plan.costs.after_time(Setting("none").program(plan, False, microbatches=1)))
        seconds = sum(time for time, _ in runs) + optimizer
        busy = sum(size * time for each in made for size, time in zip(each.sizes, each.seconds, strict=True))
        span = sum(plan.gpus * each.seconds[each.slowest] for each in made)
        tokens = sum(lengths) / seconds / plan.gpus
        peak = max(peak for _, peak in runs)
        results.append(Result(Setting("flexsp", mark), seconds, tokens, peak, peak <= plan.limit, 1 - busy / span))
    fitting = [result for result in results if result.fits]
    return min(fitting or results, key=lambda each: each.step, default=None)


# ---------------------------------------------------------------------------------------------------- beside InfiniPipe

Options = Setups

LAYOUTS = ("`infinipipe`, TP 8", "`infinipipe`, Ulysses and ZeRO-3")
HEADS = ("model, lengths, context", *LAYOUTS, "FlexSP")


def ulysses_plan(model: str, context: int) -> ModelOnCluster:
    """InfiniPipe's own layout: a pipeline rank a node, whose GPUs share tokens, heads and parts of weights."""
    options = ModelOptions(
        model=f"infinipipe-{model}", hardware=HARDWARE, nodes=NODES, tensor_parallel=1, context_parallel=8,
        cp_comm_type="a2a", seq_length=context * 1024, data_parallel_sharding_strategy="optim_grads_params",
    )  # fmt: skip
    plan = make_plan(options, NODES, 2 * NODES, None)
    assert plan is not None
    return plan


def row(batch: Batch) -> Compared:
    """Seconds of a step, in bold FlexSP's over it, what is recomputed, the share of idle time."""
    model, corpus, context = batch
    lengths = lengths_of(corpus, context, 0)
    pipelines = [
        packed(plan, Setting("infinipipe", "c", KEEP), tuned_for(plan, lengths).packing)
        for plan in (plan_of(model, context), ulysses_plan(model, context))
    ]
    flexsp = step(f"infinipipe-{model}", context, HARDWARE, NODES, lengths)
    cells = [f"{model.upper()}, {corpus}, {context}K"]
    named = zip(LAYOUTS, pipelines, strict=True)
    ratios = {name: flexsp.step / own.step for name, own in named if flexsp and flexsp.fits and own.fits}
    for result in (*pipelines, flexsp):
        if result is None:
            cells.append("–")
            continue
        ratio = "" if flexsp is None or result is flexsp else f" **{flexsp.step / result.step:.2f}**"
        mark = "" if result.setting.mark in "ck" else f" {result.setting.mark}"
        over = "" if result.fits else f", {result.gib}"
        cells.append(f"{result.step:.1f}{ratio}{mark}, {100 * result.bubble:.0f} %{over}")
    return Compared(model, cells, ratios)


def run(options: Setups) -> Outcome:
    """The table; what one of everything says of each model is written into the page of InfiniPipe."""
    batches = list(product(options.models, options.corpora, options.context))
    compared = in_processes(row, batches, options, attrgetter("line"))
    table = markdown(HEADS, [each.cells for each in compared], "l" + "r" * len(HEADS[1:]))
    if (options.models, options.corpora, options.context) == (MODELS, CORPORA, CONTEXTS):
        write_tables(options.page, {"flexsp": extremes(compared, LAYOUTS)})
    return Outcome("\n".join(table))
