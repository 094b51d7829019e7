"""Documents of all lengths in chunks, and InfiniPipe's published setups, simulated.

    make bench-infinipipe ARGS="[--models 7b] [--context 192] [--corpora github] [--order seq1f1b] [--balance]"

Prints Markdown tables. The first says how even chunks are (of the first model) and how long it takes to plan a batch of
512 documents; the second has a line for each published setup: the step of `infinipipe` and of what a batch is otherwise
made into, each with the least recomputation with which it fits into the memory. All times of steps are simulated by the
cost model (docs/costs.md). A run of everything also writes the tables into docs/infinipipe_figures.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from operator import attrgetter
from statistics import mean
from typing import Any, Literal

from benchmarks.report import ROOT, Outcome, markdown, markdown_row, page, write_tables
from benchmarks.report import Page as Output
from benchmarks.simulated import (
    RECOMPUTED,
    Jobs,
    Result,
    Scenario,
    Setting,
    assumed,
    in_processes,
    result_of,
    simulated,
)
from helixpipe.cli.model import ModelOnCluster
from helixpipe.common.flags import option
from helixpipe.planning.documents.baselines import concatenated, packed_whole, padded
from helixpipe.planning.documents.capacity import fits, over_capacity, token_capacity
from helixpipe.planning.documents.chunk_times import ChunkTimes
from helixpipe.planning.documents.document_steps import StepPacker
from helixpipe.planning.documents.filling import aligned
from helixpipe.planning.documents.lengths import DOCUMENTS, LengthOptions, documents_of
from helixpipe.planning.documents.packing import Packing, spread
from helixpipe.planning.documents.tuning import PackingOptions, Predicted, Tuned, tuned
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.planning.plan import make_plan
from helixpipe.planning.setup import Setup
from helixpipe.program.stages import even_stages
from helixpipe.program.workload import Workload

MODELS, CORPORA, CONTEXTS = ("7b", "13b", "30b"), ("github", "commoncrawl"), (48, 96, 192)
HARDWARE, NODES, TENSOR_PARALLEL = "a800", 4, 8
SEEDS = range(5)
PAGE = ROOT / "docs" / "infinipipe_figures.md"
KEEP = RecomputeOptions(recompute_early=False)

Batch = tuple[str, str, int]
"""Model, corpus and context."""


@dataclass(frozen=True)
class Setups(Jobs, Output):
    """Which of the published setups, and where their tables are."""

    models: tuple[str, ...] = option(MODELS, "Which models.", choices=MODELS)
    corpora: tuple[str, ...] = option(CORPORA, "Lengths of which documents.", choices=CORPORA)
    context: tuple[int, ...] = option(CONTEXTS, "Units of 1024 tokens.", metavar="K", at_least=1)
    page: str = option(str(PAGE), "Where a run of everything writes its tables (default: docs/infinipipe_figures.md).")


@dataclass(frozen=True)
class Options(Setups):
    order: Literal["infinipipe", "seq1f1b"] = option("infinipipe", "Of the first column.")
    balance: bool = option(False, "No steps, only how even chunks are.", flags=("--balance",))


def plan_of(model: str, context: int, nodes: int = NODES, hardware: str = HARDWARE) -> ModelOnCluster:
    """One pipeline of a rank a node. context: in units of 1024 tokens."""
    cluster = Scenario(
        model=f"infinipipe-{model}", hardware=hardware, tokens=context, nodes=nodes, tensor_parallel=TENSOR_PARALLEL
    )
    return cluster.plan()


def lengths_of(corpus: str, context: int, seed: int, count: int = DOCUMENTS) -> tuple[int, ...]:
    documents = documents_of(LengthOptions(corpus, count, context * 1024, seed))
    assert documents is not None
    return documents.lengths


def times_of(plan: ModelOnCluster, lengths: Sequence[int]) -> ChunkTimes:
    return ChunkTimes(plan.costs, even_stages(plan.layers, 1), sum(lengths) / len(lengths))


def tuned_for(
    plan: ModelOnCluster, lengths: Sequence[int], options: PackingOptions | None = None, simulated: bool = True
) -> Tuned:
    """The packing with the number of slices that is best; what does not fit with all layers recomputed is left out."""
    times, even = times_of(plan, lengths), even_stages(plan.layers, plan.ranks)
    held = token_capacity(plan.costs, RecomputeOptions("full").stages(even), plan.limit, 8192, times.whole)
    kept = token_capacity(plan.costs, even, plan.limit, 8192, times.whole)
    predict = Predicted(plan.costs, even) if simulated else None
    least = plan.costs.hardware.short_chunk
    return tuned(
        lengths,
        times,
        plan.ranks,
        options,
        TENSOR_PARALLEL,
        least,
        lambda packing: fits(packing.workload, held),
        predict,
        lambda packing: over_capacity(packing.workload, kept),
    )


# ------------------------------------------------------------------------------------------------- balance and planning

BALANCE_HEADS = (
    *("corpus, model", "context", "N", "chunks", "time", "tokens", "tokens, packed", "Alg. 1 mended: time", "tokens"),
    "slowest chunk over mean, Alg. 1 / here",
)


def balance(setup: Batch) -> list[str]:
    """The cells of a line: of a corpus and context, over batches of several seeds."""
    model, corpus, context = setup
    plan = plan_of(model, context)
    batches = [lengths_of(corpus, context, seed) for seed in SEEDS]
    found = [tuned_for(plan, lengths, simulated=False).packing for lengths in batches]
    alike = [_algorithm_1(plan, *each) for each in zip(batches, found, strict=True)]
    return [
        f"{corpus}, {model.upper()}",
        f"{context}K",
        _range(packing.mesh.slices for packing in found if packing.mesh),
        _range(len(packing.chunk_tokens) for packing in found),
        _percent(packing.spread_of_time for packing in found),
        _percent(packing.spread_of_tokens for packing in found),
        _percent(map(_packed_spread, found)),
        _percent(packing.spread_of_time for packing in alike),
        _percent(packing.spread_of_tokens for packing in alike),
        f"{mean(map(_slowest, alike)):.2f} / {mean(map(_slowest, found)):.2f}",
    ]


def _algorithm_1(plan: ModelOnCluster, lengths: Sequence[int], packing: Packing) -> Packing:
    """The same number of slices by Algorithm 1 with the mended line."""
    assert packing.mesh is not None
    options = PackingOptions(infinipipe_chunks=str(packing.mesh.slices), infinipipe_packing="best-fit")
    return tuned_for(plan, lengths, options).packing


def _packed_spread(packing: Packing) -> float:
    """Of the tokens of chunks that hold a whole document or more: batched and hybrid ones."""
    chunks = (row[-1] for row in packing.workload.microbatches)
    return spread([sum(part.length for part in chunk) for chunk in chunks if not chunk[-1].start])


def _slowest(packing: Packing) -> float:
    """The slowest chunk's time over the mean."""
    return max(map(max, packing.chunk_times)) * len(packing.chunk_tokens) / packing.time


def _range(values: Iterable[int]) -> str:
    found = sorted(values)
    return f"{found[0]}" if found[0] == found[-1] else f"{found[0]}-{found[-1]}"


def _percent(values: Iterable[float]) -> str:
    return f"{100 * max(values):.1f} %"


PLANNED = [(model, HARDWARE, nodes, "github", 192, DOCUMENTS) for model in ("7b", "30b") for nodes in (4, 8)]
SHORT = ("7b", "h100", 4, "commoncrawl", 32, 64)
"""Model, hardware, nodes, corpus, context and documents of steps whose planning is timed; the last are short steps."""


@dataclass(frozen=True)
class Planning:
    """Processor seconds of planning steps as training does, part by part, and what the steps take."""

    packing: float
    order: float
    streams: float
    step: float

    @property
    def seconds(self) -> float:
        return self.packing + self.order + self.streams

    @property
    def share(self) -> float:
        return self.seconds / self.step


def planning(setup: tuple[str, str, int, str, int, int]) -> Planning:
    """The mean of steps of several batches, but for the first, whose costs are new."""
    model, hardware, nodes, corpus, context, documents = setup
    plan = plan_of(model, context, nodes, hardware)
    shape = Setup(plan.ranks, plan.layers, plan.costs, None, KEEP, plan.limit).shape(microbatches=1, chunks=1)
    packer = StepPacker(shape, PackingOptions(), True, TENSOR_PARALLEL, plan.costs.hardware.short_chunk)
    found = []
    for seed in SEEDS:
        times = [time.process_time()]
        packing = packer.pack(lengths_of(corpus, context, seed, documents))
        times.append(time.process_time())
        program = Setting("infinipipe", recompute=KEEP).program(plan, **ragged(packing.workload))
        times.append(time.process_time())
        step = make_plan(program, plan.costs).simulation.makespan
        times.append(time.process_time())
        found.append((*(end - start for start, end in pairwise(times)), step))
    return Planning(*map(mean, zip(*found[1:], strict=True)))


def planning_table(found: Sequence[Planning]) -> list[str]:
    lines = []
    for (model, hardware, nodes, corpus, context, documents), each in zip((*PLANNED, SHORT), found, strict=True):
        name = f"{model.upper()}, {nodes} {hardware}, {documents} {corpus} to {context}K"
        parts = (each.packing, each.order, each.streams, each.seconds)
        lines.append([name, *(f"{part:.2f}" for part in parts), f"{each.step:.2f}", f"{each.share:.1%}"])
    heads = (
        "model, nodes, documents",
        "packing",
        "order, recomputation",
        "streams, simulation",
        "all",
        "step",
        "share",
    )
    return markdown(heads, lines, "lrrrrrr")


def planning_sentence(found: Sequence[Planning]) -> list[str]:
    """What the page says of it."""
    *long, short = found
    seconds, shares = sorted(each.seconds for each in long), sorted(each.share for each in long)
    return [
        f"Planning 512 documents of `github` up to 192K takes {seconds[0]:.1f} to {seconds[-1]:.1f} s of a processor,",
        f"{100 * shares[0]:.0f} to {100 * shares[-1]:.0f} % of a step (7B, 30B; 4, 8 nodes); 64 of `commoncrawl` up to",
        f"32K, on 4 H100 nodes, {short.seconds:.2f} s, {100 * short.share:.0f} %.",
    ]


# ----------------------------------------------------------------------------------------------------- published setups


def ragged(workload: Workload) -> dict[str, Any]:
    """Return what a step of these documents is, for `Setting.program`."""
    return {"microbatches": len(workload), "ragged": workload}


def packed(plan: ModelOnCluster, setting: Setting, packing: Packing) -> Result:
    limited = setting.schedule == "infinipipe"
    return result_of(setting, simulated(plan, setting.program(plan, limited, **ragged(packing.workload))))


def best(plan: ModelOnCluster, schedule: str, packing: Packing) -> Result:
    """With the least recomputation that fits; of none that does the one that needs the least memory."""
    results: list[Result] = []
    for mark, granularity in RECOMPUTED.items():
        setting = Setting(schedule, mark, RecomputeOptions(granularity, recompute_early=False))
        results.append(packed(plan, setting, packing))
        if results[-1].fits:
            return results[-1]
    return min(results, key=lambda each: each.peak)


COLUMNS = ("(b) fixed chunks, `seq1f1b`", "(c) whole, `1f1b`", "(d) isolated", "(d) mixed", "(a) padded")


def row(model: str, corpus: str, context: int, order: str) -> list[Result]:
    """The result under `order`, and those of the columns."""
    plan, lengths = plan_of(model, context), lengths_of(corpus, context, 0)
    times, tokens = times_of(plan, lengths), aligned(context * 1024, TENSOR_PARALLEL)
    ours = tuned_for(plan, lengths).packing
    fixed = tuned_for(plan, lengths, PackingOptions(infinipipe_split="fixed", infinipipe_packing="best-fit")).packing
    if order == "infinipipe":  # recomputes chunk by chunk, as much as it takes to fit
        first = packed(plan, Setting(order, "c", KEEP), ours)
    else:
        first = best(plan, order, ours)
    return [
        first,
        best(plan, "seq1f1b", fixed),
        best(plan, "1f1b", packed_whole(lengths, times, tokens, TENSOR_PARALLEL)),
        best(plan, "1f1b", concatenated(lengths, times, tokens, isolated=True)),
        best(plan, "1f1b", concatenated(lengths, times, tokens, isolated=False)),
        best(plan, "1f1b", padded(lengths, times, aligned(max(lengths), TENSOR_PARALLEL))),
    ]


@dataclass(frozen=True)
class Compared:
    """A batch. cells: of its line. ratios: of two steps, by column, where both fit."""

    model: str
    cells: list[str]
    ratios: Mapping[str, float]

    @property
    def line(self) -> str:
        return markdown_row(self.cells)


def extremes(batches: Sequence[Compared], columns: Sequence[str]) -> list[str]:
    """A table's lines, one a model: the least and the largest ratio of its batches in each column."""
    lines = []
    for model in dict.fromkeys(each.model for each in batches):
        cells = [model.upper()]
        for column in columns:
            ratios = [each.ratios[column] for each in batches if each.model == model and column in each.ratios]
            cells.append(f"{min(ratios):.2f}–{max(ratios):.2f}" if ratios else "–")
        lines.append(cells)
    return markdown(("model", *columns), lines, "l" + "r" * len(columns))


def steps(order: str, setup: Batch) -> Compared:
    """Seconds of a step, in bold over the first, what is recomputed, the bubble."""
    model, corpus, context = setup
    cells = [f"{model.upper()}, {corpus}, {context}K"]
    first, *others = row(model, corpus, context, order)
    named = zip(COLUMNS, others, strict=True)
    ratios = {name: result.step / first.step for name, result in named if first.fits and result.fits}
    for result in (first, *others):
        ratio = "" if result is first else f" **{result.step / first.step:.2f}**"
        mark = "" if result.setting.mark in "ck" else f" {result.setting.mark}"
        over = "" if result.fits else f", {result.gib}"
        cells.append(f"{result.step:.1f}{ratio}{mark}, {100 * result.bubble:.0f} %{over}")
    return Compared(model, cells, ratios)


def run(options: Options) -> Outcome:
    """The tables; of steps the page has what they say of each model."""
    batches = list(product(options.models[:1], options.corpora, options.context))
    rows = in_processes(balance, batches, options, markdown_row)
    plans = [*map(planning, (*PLANNED, SHORT))]
    found = {"planning": planning_table(plans), "balance": markdown(BALANCE_HEADS, rows, "l" + "r" * 9)}
    if not options.balance:
        batches = list(product(options.models, options.corpora, options.context))
        compared = in_processes(partial(steps, options.order), batches, options, attrgetter("line"))
        heads = ("model, lengths, context", f"`{options.order}`", *COLUMNS)
        found["steps"] = markdown(heads, [each.cells for each in compared], "l" + "r" * (1 + len(COLUMNS)))
        asked = (options.models, options.corpora, options.context, options.order)
        if asked == (MODELS, CORPORA, CONTEXTS, "infinipipe"):
            steps_table, sentence = extremes(compared, COLUMNS), planning_sentence(plans)
            write_tables(options.page, {"balance": found["balance"], "planning": sentence, "steps": steps_table})
    return Outcome(text(found))


def text(found: Mapping[str, Sequence[str]]) -> str:
    """The tables and the assumptions, as Markdown."""
    steps = page("infinipipe_steps.md", steps=found["steps"]).splitlines() if "steps" in found else []
    return page(
        "infinipipe.md",
        planning=found["planning"],
        balance=found["balance"],
        steps=steps,
        assumed=[assumed(HARDWARE)],
    )
