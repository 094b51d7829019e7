"""`make bench-infinipipe`: documents of all lengths in chunks, and InfiniPipe's published setups, simulated.

    python benchmarks/infinipipe.py [--models 7b] [--context 192] [--corpora github] [--order seq1f1b] [--balance]

Prints Markdown tables. The first says how even chunks are (of the first model) and how long it takes to plan a batch of
512 documents; the second has a line for each published setup: the step of `infinipipe` and of what a batch is otherwise
made into, each with the least recomputation with which it fits into the memory. All times of steps are simulated by the
cost model (docs/costs.md). A run of everything also writes the tables into docs/infinipipe.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean

from benchmarks.infinipipe_page import HARDWARE, NODES, SEEDS, TENSOR_PARALLEL, text
from benchmarks.pages import written_into
from helixpipe.cli.model import ModelOnCluster, ModelOptions, make_plan
from helixpipe.cli.model_report import report
from helixpipe.costs.hardware import GIB
from helixpipe.lowering.lower import lower
from helixpipe.planning.catalogue import Shape
from helixpipe.planning.documents.baselines import concatenated, packed_whole, padded
from helixpipe.planning.documents.capacity import fits, over_capacity, token_capacity
from helixpipe.planning.documents.chunk_times import ChunkTimes
from helixpipe.planning.documents.filling import aligned
from helixpipe.planning.documents.lengths import DOCUMENTS, LengthOptions, documents_of
from helixpipe.planning.documents.packing import Packing, spread
from helixpipe.planning.documents.tuning import PackingOptions, Predicted, Tuned, tuned
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.program.stages import even_stages
from helixpipe.program.workload import Workload
from helixpipe.simulate.simulator import simulate
from schedules import CATALOGUE

MODELS, CORPORA, CONTEXTS = ("7b", "13b", "30b"), ("github", "commoncrawl"), (48, 96, 192)
PAGE = Path(__file__).resolve().parents[1] / "docs" / "infinipipe.md"

Setup = tuple[str, str, int]
"""Model, corpus and context."""

Run = Callable[[Callable[[Setup], str], Sequence[Setup]], list[str]]
"""Makes a line of each setup."""

SETTINGS: tuple[tuple[str, RecomputeOptions], ...] = (
    ("k", RecomputeOptions(recompute_early=False)),
    ("s", RecomputeOptions("selective", recompute_early=False)),
    ("w", RecomputeOptions("without-attention", recompute_early=False)),
    ("f", RecomputeOptions("full", recompute_early=False)),
)
"""Kept, and what is recomputed, always inside the backwards."""


def plan_of(model: str, context: int, ranks: int = NODES, nodes: int = NODES) -> ModelOnCluster:
    """One pipeline of `ranks` nodes. context: in units of 1024 tokens."""
    options = ModelOptions(
        model=f"infinipipe-{model}",
        seq_length=context * 1024,
        hardware=HARDWARE,
        nodes=nodes,
        tensor_parallel=TENSOR_PARALLEL,
    )
    plan = make_plan(options, ranks, None, None)
    assert plan is not None
    return plan


def lengths_of(corpus: str, context: int, seed: int) -> tuple[int, ...]:
    documents = documents_of(LengthOptions(corpus, DOCUMENTS, context * 1024, seed))
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


def balance_table(model: str, corpora: Sequence[str], contexts: Sequence[int], run: Run) -> list[str]:
    """A line a corpus and context, over batches of several seeds."""
    lines = [
        "| corpus, model | context | N | chunks | time | tokens | tokens, packed | Alg. 1 mended: time | tokens | "
        "slowest chunk over mean, Alg. 1 / here |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    return [*lines, *run(_balance, [(model, corpus, context) for corpus in corpora for context in contexts])]


def _balance(setup: Setup) -> str:
    model, corpus, context = setup
    plan = plan_of(model, context)
    batches = [lengths_of(corpus, context, seed) for seed in SEEDS]
    found = [tuned_for(plan, lengths, simulated=False).packing for lengths in batches]
    alike = [_algorithm_1(plan, *each) for each in zip(batches, found, strict=True)]
    cells = [
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
    return _line(cells)


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


def planning_table() -> list[str]:
    """Processor seconds of one batch of documents, part by part."""
    lines = [
        "| model, ranks | N, estimated | N, simulated | order, recomputation | streams, simulation | all |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for model, ranks in (("7b", 4), ("7b", 8), ("30b", 4), ("30b", 8)):
        plan, lengths = plan_of(model, 192, ranks, ranks), lengths_of("github", 192, 0)
        times = [time.process_time()]
        tuned_for(plan, lengths, simulated=False)
        times.append(time.process_time())
        packing = tuned_for(plan, lengths).packing
        times.append(time.process_time())
        program = CATALOGUE.build("infinipipe", _shape(plan, "infinipipe", packing.workload, KEEP))
        times.append(time.process_time())
        simulate(lower(program, plan.costs), plan.costs)
        times.append(time.process_time())
        estimate, both, order, rest = (end - start for start, end in pairwise(times))
        seconds = (estimate, max(both - estimate, 0.0), order, rest, both + order + rest)
        lines.append(_line([f"{model.upper()}, {ranks}", *(f"{each:.1f}" for each in seconds)]))
    return lines


# ----------------------------------------------------------------------------------------------------- published setups


@dataclass(frozen=True)
class Result:
    """One way to train the batch. step: seconds. bubble: share of the pipeline's time. peak: bytes of the fullest
    GPU."""

    mark: str
    step: float
    bubble: float
    peak: float
    fits: bool


KEEP = RecomputeOptions(recompute_early=False)


def _shape(plan: ModelOnCluster, schedule: str, workload: Workload, recompute: RecomputeOptions) -> Shape:
    limit = plan.limit if schedule == "infinipipe" else None
    shape = Shape(plan.ranks, len(workload), plan.layers, costs=plan.costs, recompute=recompute, memory_limit=limit)
    return replace(shape, ragged=workload)


def simulated(
    plan: ModelOnCluster, schedule: str, workload: Workload, mark: str, recompute: RecomputeOptions
) -> Result:
    program = CATALOGUE.build(schedule, _shape(plan, schedule, workload, recompute))
    step = report(simulate(lower(program, plan.costs), plan.costs, "s"), plan)
    return Result(mark, step.step_time, step.simulation.bubble_ratio, step.peak, step.fits)


def best(plan: ModelOnCluster, schedule: str, packing: Packing) -> Result:
    """With the least recomputation that fits; of none that does the one that needs the least memory."""
    results = []
    for mark, recompute in SETTINGS:
        results.append(simulated(plan, schedule, packing.workload, mark, recompute))
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
        first = simulated(plan, order, ours.workload, "c", KEEP)
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


def setups_table(
    models: Sequence[str], corpora: Sequence[str], contexts: Sequence[int], order: str, run: Run
) -> list[str]:
    """A line a setup: seconds of a step, in bold over the first, what is recomputed, the bubble."""
    lines = [f"| model, lengths, context | `{order}` | {' | '.join(COLUMNS)} |", f"|---|{'--:|' * (1 + len(COLUMNS))}"]
    setups = [(model, corpus, context) for model in models for corpus in corpora for context in contexts]
    return [*lines, *run(partial(_setup, order), setups)]


def _setup(order: str, setup: Setup) -> str:
    model, corpus, context = setup
    cells = [f"{model.upper()}, {corpus}, {context}K"]
    first, *others = row(model, corpus, context, order)
    for result in (first, *others):
        ratio = "" if result is first else f" **{result.step / first.step:.2f}**"
        mark = "" if result.mark in "ck" else f" {result.mark}"
        over = "" if result.fits else f", {result.peak / GIB:.0f} GiB!"
        cells.append(f"{result.step:.1f}{ratio}{mark}, {100 * result.bubble:.0f} %{over}")
    return _line(cells)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def tables(
    models: Sequence[str], corpora: Sequence[str], contexts: Sequence[int], order: str | None, run: Run
) -> dict[str, list[str]]:
    """By name. order: of the steps; None: no steps."""
    found = {"planning": planning_table(), "balance": balance_table(models[0], corpora, contexts, run)}
    if order is not None:
        found["steps"] = setups_table(models, corpora, contexts, order, run)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--corpora", nargs="+", default=CORPORA, choices=CORPORA)
    parser.add_argument("--context", nargs="+", type=int, default=CONTEXTS, metavar="K", help="units of 1024 tokens")
    parser.add_argument("--order", default="infinipipe", choices=("infinipipe", "seq1f1b"), help="of the first column")
    parser.add_argument("--balance", action="store_true", help="no steps, only how even chunks are")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--output", metavar="FILE.md", help="write the tables there, too")
    parser.add_argument("--page", type=Path, default=PAGE, help="where a run of everything writes its tables")
    arguments = parser.parse_args()
    order = None if arguments.balance else arguments.order
    with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn")) as pool:

        def run(function: Callable[[Setup], str], setups: Sequence[Setup]) -> list[str]:
            lines = []
            for line in pool.map(function, setups):
                print(line, file=sys.stderr, flush=True)
                lines.append(line)
            return lines

        found = tables(arguments.models, arguments.corpora, arguments.context, order, run)
    written = text(found)
    print(written, end="")
    if arguments.output:
        Path(arguments.output).write_text(written, encoding="utf-8")
    asked = (tuple(arguments.models), tuple(arguments.corpora), tuple(arguments.context), order)
    if asked == (MODELS, CORPORA, CONTEXTS, "infinipipe"):
        arguments.page.write_text(written_into(arguments.page.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
