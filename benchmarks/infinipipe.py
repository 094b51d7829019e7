"""`make bench-infinipipe`: documents of all lengths in chunks, and InfiniPipe's published setups, simulated.

    python benchmarks/infinipipe.py [--models 7b] [--context 192] [--corpora github] [--order seq1f1b] [--balance]

Prints Markdown tables. The first says how even chunks are and how long it takes to plan a batch of 512 documents; the
second has a line for each published setup: the step of `infinipipe` and of what a batch is otherwise made into, each
with the least recomputation with which it fits into the memory. All times of steps are simulated by the cost model
(docs/costs.md). No torch here.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from helixpipe.cli.model import ModelOptions, Plan, make_plan
from helixpipe.cli.model_report import report
from helixpipe.costs.hardware import GIB, RESERVED_MEMORY
from helixpipe.lowering.lower import lower
from helixpipe.planning.baselines import concatenated, packed_whole, padded
from helixpipe.planning.capacity import fits, over_capacity, token_capacity
from helixpipe.planning.catalogue import Shape
from helixpipe.planning.chunk_times import ChunkTimes
from helixpipe.planning.dealing import deal, document_times
from helixpipe.planning.filling import aligned
from helixpipe.planning.lengths import DOCUMENTS, LengthOptions, documents_of
from helixpipe.planning.packing import Packing, spread
from helixpipe.planning.recompute import RecomputeOptions
from helixpipe.planning.tuning import PackingOptions, Predicted, Tuned, tuned
from helixpipe.program.stages import even_stages
from helixpipe.program.workload import Workload
from helixpipe.simulate.simulator import simulate
from schedules import CATALOGUE

HARDWARE, NODES, TENSOR_PARALLEL = "a800", 4, 8
MODELS, CORPORA, CONTEXTS = ("7b", "13b", "30b"), ("github", "commoncrawl"), (48, 96, 192)
SEEDS = range(5)
SETTINGS: tuple[tuple[str, RecomputeOptions], ...] = (
    ("k", RecomputeOptions(recompute_early=False)),
    ("s", RecomputeOptions("selective", recompute_early=False)),
    ("w", RecomputeOptions("without-attention", recompute_early=False)),
    ("f", RecomputeOptions("full", recompute_early=False)),
)
"""Kept, and what is recomputed, always inside the backwards."""


def plan_of(model: str, context: int, ranks: int = NODES, nodes: int = NODES) -> Plan:
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


def times_of(plan: Plan, lengths: Sequence[int]) -> ChunkTimes:
    return ChunkTimes(plan.costs, even_stages(plan.layers, 1), sum(lengths) / len(lengths))


def tuned_for(
    plan: Plan, lengths: Sequence[int], options: PackingOptions | None = None, simulated: bool = True
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


def balance_table(models: Sequence[str], corpora: Sequence[str], contexts: Sequence[int]) -> list[str]:
    """A line a corpus, model and context, over batches of several seeds."""
    lines = [
        "| corpus | model | context | N | chunks | time | tokens | tokens, packed | Alg. 1: time | tokens | slowest |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for corpus in corpora:
        for model in models:
            for context in contexts:
                plan = plan_of(model, context)
                batches = [lengths_of(corpus, context, seed) for seed in SEEDS]
                found = [tuned_for(plan, lengths, simulated=False).packing for lengths in batches]
                alike = [_algorithm_1(plan, *each) for each in zip(batches, found, strict=True)]
                cells = [
                    corpus,
                    model,
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
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def _algorithm_1(plan: Plan, lengths: Sequence[int], packing: Packing) -> Packing:
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
    """Processor seconds of one batch of documents, without and with the simulation of the best few numbers."""
    lines = [
        "| ranks | N by estimate, s | and simulated, s | dealt over 8 replicas, s | longest over mean |",
        "|--:|--:|--:|--:|--:|",
    ]
    for ranks in (4, 8):
        plan, lengths = plan_of("7b", 192, ranks, ranks), lengths_of("github", 192, 0)
        seconds = []
        for simulation in (False, True):
            start = time.process_time()
            tuned_for(plan, lengths, simulated=simulation)
            seconds.append(time.process_time() - start)
        start = time.process_time()
        times = times_of(plan, lengths)
        each = document_times(lengths, times)
        sums = [sum(each[document] for document in hand) for hand in deal(each, lengths, 8)]
        spent = time.process_time() - start
        lines.append(f"| {ranks} | {seconds[0]:.1f} | {seconds[1]:.1f} | {spent:.2f} | {max(sums) / mean(sums):.3f} |")
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


def simulated(plan: Plan, schedule: str, workload: Workload, mark: str, recompute: RecomputeOptions) -> Result:
    shape = Shape(
        plan.ranks,
        len(workload),
        plan.layers,
        costs=plan.costs,
        recompute=recompute,
        memory_limit=plan.limit if schedule == "infinipipe" else None,
        ragged=workload,
    )
    program = CATALOGUE.build(schedule, shape)
    step = report(simulate(lower(program, plan.costs), plan.costs, "s"), plan)
    return Result(mark, step.step_time, step.simulation.bubble_ratio, step.peak, step.fits)


def best(plan: Plan, schedule: str, packing: Packing) -> Result:
    """With the least recomputation that fits; of none that does the one that needs the least memory."""
    results = []
    for mark, recompute in SETTINGS:
        results.append(simulated(plan, schedule, packing.workload, mark, recompute))
        if results[-1].fits:
            return results[-1]
    return min(results, key=lambda each: each.peak)


COLUMNS = ("packed and cut", "(a) pad", "(b) fixed chunks", "(c) whole", "(d) isolated", "(d) mixed")


def row(model: str, corpus: str, context: int, order: str) -> list[Result]:
    """The results in the order of the columns. order: the schedule of the first."""
    plan, lengths = plan_of(model, context), lengths_of(corpus, context, 0)
    times, tokens = times_of(plan, lengths), aligned(context * 1024, TENSOR_PARALLEL)
    ours = tuned_for(plan, lengths).packing
    fixed = tuned_for(plan, lengths, PackingOptions(infinipipe_split="fixed", infinipipe_packing="best-fit")).packing
    if order == "infinipipe":  # recomputes chunk by chunk, as much as it takes to fit
        first = simulated(plan, order, ours.workload, "c", RecomputeOptions(recompute_early=False))
    else:
        first = best(plan, order, ours)
    return [
        first,
        best(plan, "1f1b", padded(lengths, times, aligned(max(lengths), TENSOR_PARALLEL))),
        best(plan, "seq1f1b", fixed),
        best(plan, "1f1b", packed_whole(lengths, times, tokens, TENSOR_PARALLEL)),
        best(plan, "1f1b", concatenated(lengths, times, tokens, isolated=True)),
        best(plan, "1f1b", concatenated(lengths, times, tokens, isolated=False)),
    ]


def setups_table(models: Sequence[str], corpora: Sequence[str], contexts: Sequence[int], order: str) -> list[str]:
    """A line a setup: seconds of a step, in bold over the first, what is recomputed, the bubble."""
    lines = [
        f"| model | corpus | context | {' | '.join(COLUMNS)} |",
        f"|---|---|--:|{'--:|' * len(COLUMNS)}",
    ]
    for model in models:
        for corpus in corpora:
            for context in contexts:
                results = row(model, corpus, context, order)
                cells = [model, corpus, f"{context}K"]
                for result in results:
                    ratio = "" if result is results[0] else f" **{result.step / results[0].step:.2f}**"
                    size = f", {result.peak / GIB:.0f} GiB{'' if result.fits else '!'}"
                    cells.append(f"{result.step:.1f}{ratio} {result.mark}, {100 * result.bubble:.0f} %{size}")
                lines.append(f"| {' | '.join(cells)} |")
                print(lines[-1], flush=True)
    return lines


def text(models: Sequence[str], corpora: Sequence[str], contexts: Sequence[int], order: str | None) -> str:
    """The tables and the assumptions, as Markdown. order: of the steps; None: no steps."""
    hardware = plan_of("7b", 48).costs.hardware
    share, usable = hardware.efficiency, (hardware.memory - RESERVED_MEMORY) / GIB
    parts = [
        ["# Documents of all lengths, simulated"],
        ["Written by `make bench-infinipipe`; docs/infinipipe.md says what follows from it. Simulated, not measured."],
        [
            f"Batches of {DOCUMENTS} documents, seeds {SEEDS.start} to {SEEDS.stop - 1}: spread (standard deviation "
            "over mean) of all chunks' times and tokens, the largest of the batches; of tokens also over chunks that "
            "hold whole documents; with as many slices by Algorithm 1 as mended; the slowest chunk over the mean, by "
            "Algorithm 1 and here:"
        ],
        balance_table(models, corpora, contexts),
        ["Planning a batch of GitHub's lengths, 192K, 7B, in processor seconds of this machine:"],
        planning_table(),
    ]
    if order is not None:
        parts += [
            [
                f"Steps of {DOCUMENTS} documents on {8 * NODES} GPUs, pipeline {NODES} x tensor parallel "
                f"{TENSOR_PARALLEL}: seconds, in bold over the first, recomputation, bubble, fullest GPU. The "
                f"first is under {order}:"
            ],
            setups_table(models, corpora, contexts, order),
            [
                "c: chunk by chunk, what does not fit; k: everything is kept; s: core attention is recomputed; w: all "
                "but core attention; f: whole layers. `GiB!`: does not fit. (a), (c), (d) under 1f1b, rows as long as "
                "the longest document (a) or the context; (b) under seq1f1b, its number of chunks tuned as well."
            ],
        ]
    parts += [
        ["Assumed:"],
        [
            f"- {HARDWARE}: {share.matmul:.0%} of {hardware.flops / 1e12:.0f} TFLOP/s in matrix products, "
            f"{share.attention:.0%} in attention, {share.memory:.0%} of memory bandwidth and NVLink, "
            f"{share.network:.0%} of the network's {hardware.network / 1e9:.0f} GB/s a node; {usable:.0f} of "
            f"{hardware.memory / GIB:.0f} GiB usable",
            "- tensor parallelism with sequence parallelism inside a node, where InfiniPipe has Ulysses and ZeRO-3",
            "- lengths as docs/infinipipe.md has them: interpolated between the figures that are published",
        ],
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--corpora", nargs="+", default=CORPORA, choices=CORPORA)
    parser.add_argument("--context", nargs="+", type=int, default=CONTEXTS, metavar="K", help="units of 1024 tokens")
    parser.add_argument("--order", default="infinipipe", choices=("infinipipe", "seq1f1b"), help="of the first column")
    parser.add_argument("--balance", action="store_true", help="no steps, only how even chunks are")
    parser.add_argument("--output", metavar="FILE.md", help="write the tables there, too")
    arguments = parser.parse_args()
    order = None if arguments.balance else arguments.order
    written = text(arguments.models, arguments.corpora, arguments.context, order)
    print(written, end="")
    if arguments.output:
        Path(arguments.output).write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
