"""Documents of skewed lengths on emulated ranks (Linux, root): elastic chunks beside whole documents, best fit.

    sudo make bench-skewed ARGS="[--ranks 4] [--rate 50mbit] [--batches 3] [--json FILE] [--page]"

The same documents a step: in InfiniPipe's chunks under its own order and under seq1f1b-zb, and whole in rows as long as
the longest (best-fit decreasing) under 1f1b, zb1p and zbv. Lengths are drawn as the training program's generated
documents are (log-normal), and cut off at 16 times the median. Ranks, ops and network are those of `bench-emulate`; the
table has what a step of elastic chunks gains over the others, predicted and emulated.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from benchmarks.report import Outcome, markdown, progress, write_tables
from helixpipe.common.flags import option
from helixpipe.lowering.lower import lower
from helixpipe.lowering.project import LoweredProgram
from helixpipe.planning.documents.baselines import packed_whole
from helixpipe.planning.documents.chunk_times import ChunkTimes
from helixpipe.planning.documents.tuning import Predicted, tuned
from helixpipe.program.stages import even_stages
from helixpipe.program.workload import Workload
from megatron.pretrain.data.document_files import MockDocuments
from netlab.emulate import PAGE, Cluster, check_cluster, emulated_rows
from netlab.emulated_costs import EmulatedCosts, Size
from schedules import Shape, build

LEAST_CHUNK = 32
"""Tokens of a chunk on average: shorter ones are more messages than work."""

OURS = "infinipipe"
WAYS: Mapping[str, tuple[str, bool]] = MappingProxyType(
    {
        OURS: ("infinipipe", True),
        "the same chunks under seq1f1b-zb": ("seq1f1b-zb", True),
        "whole documents, best fit, under 1f1b": ("1f1b", False),
        "whole documents, best fit, under zb1p": ("zb1p", False),
        "whole documents, best fit, under zbv": ("zbv", False),
    }
)
"""Schedule, and whether documents are cut."""

SIZES = ("ranks", "ranks_per_host", "network", "rate", "time_scale", "documents", "median")
"""What a batch is of, beside its documents."""


@dataclass(frozen=True)
class Options(Cluster):
    ranks: int = option(4, "Ranks.", at_least=2)
    rate: str = option("50mbit", "Of a link in each direction.")
    steps: int = option(2, "That count.", at_least=1)
    documents: int = option(64, "Of a step.", at_least=1)
    median: int = option(128, "Of documents' lengths, in tokens.", at_least=2)
    batches: int = option(3, "Steps of unlike documents, each run in all ways.", at_least=1)


def run(options: Options) -> Outcome:
    """--json has the figures of this run alone."""
    check_cluster(options)
    sizes = {name: getattr(options, name) for name in SIZES}
    batches: list[dict[str, Any]] = []
    for seed in range(options.batches):
        rows = batch_rows(options, drawn_lengths(options, seed))
        batches.append({**sizes, "seed": seed, "rows": rows})
        progress(f"batch {seed}: " + ", ".join(f"{each['schedule']} {_median(each):.2f} s" for each in rows))
    lines = table(batches)
    if options.page:
        write_tables(PAGE, {"skewed": lines})
    return Outcome("\n".join(lines), figures=batches)


def drawn_lengths(options: Options, seed: int) -> list[int]:
    documents = MockDocuments(seed, 1, options.documents, options.median)
    return [int(length) for length in documents.lengths.clip(max=16 * options.median)]


def batch_rows(options: Options, lengths: Sequence[int]) -> list[dict[str, Any]]:
    size = Size(options.ranks, len(lengths), 2 * options.ranks, time_scale=options.time_scale)
    return emulated_rows(options, size, lambda costs: programs(size, costs, lengths))


def programs(size: Size, costs: EmulatedCosts, lengths: Sequence[int]) -> dict[str, LoweredProgram]:
    """By way. The number of slices of the longest document is the best by simulation, as in training."""
    times = ChunkTimes(costs, even_stages(size.layers, 1), float(size.tokens))
    predict = Predicted(costs, even_stages(size.layers, size.ranks))
    cut = tuned(lengths, times, size.ranks, least=LEAST_CHUNK, predict=predict).packing.workload
    whole = packed_whole(lengths, times).workload
    return {way: _lowered(schedule, size, costs, cut if chunks else whole) for way, (schedule, chunks) in WAYS.items()}


def _lowered(schedule: str, size: Size, costs: EmulatedCosts, workload: Workload) -> LoweredProgram:
    shape = Shape(size.ranks, len(workload), size.layers, costs=costs, ragged=workload)
    return lower(build(schedule, shape), costs)


def table(batches: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown: of each way the medians over batches of its ratio to `infinipipe`, predicted and emulated, the least
    and the greatest emulated ratio, and emulated over predicted time."""
    steps = [{row["schedule"]: row for row in each["rows"]} for each in batches]
    lines = []
    for way in WAYS:
        predicted = statistics.median(rows[way]["predicted"] / rows[OURS]["predicted"] for rows in steps)
        ratios = sorted(_median(rows[way]) / _median(rows[OURS]) for rows in steps)
        true = statistics.median(_median(rows[way]) / rows[way]["predicted"] for rows in steps)
        seconds = statistics.median(_median(rows[way]) for rows in steps)
        cells = (f"{seconds:.2f}", f"{predicted:.2f}", f"{statistics.median(ratios):.2f}")
        lines.append((way, *cells, f"{ratios[0]:.2f}–{ratios[-1]:.2f}", f"{true:.3f}"))
    heads = ("", "emulated s", "over infinipipe, predicted", "over infinipipe, emulated", "batches")
    return markdown((*heads, "emulated / predicted"), lines, "lrrrrr")


def _median(row: Mapping[str, Any]) -> float:
    return statistics.median(row["seconds"])
