"""`make bench-choosing`: which schedule for which sequence, network and memory, simulated: docs/choosing.md's table.

    python benchmarks/choosing.py [--rows 1 7] [--jobs 8] [--output docs/choosing.md]

For each row every schedule of the catalogue is simulated with several numbers of chunks, virtual stages and folds, each
with the least recomputation that fits into the memory and nothing offloaded; what does not fit is left out. `--output`
replaces what stands between the page's two marks. All figures come from the cost model (docs/costs.md).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from helixpipe.cli.model import ModelOnCluster, ModelOptions, make_plan
from helixpipe.cli.model_report import report
from helixpipe.common.collector import collector_paused
from helixpipe.common.errors import UserError
from helixpipe.costs.hardware import GIB
from helixpipe.lowering.lower import lower
from helixpipe.planning.memory.offload import OffloadOptions
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.planning.order.chunk_lengths import chunk_counts
from helixpipe.planning.order.chunk_options import ChunkOptions
from helixpipe.program.program import Program
from helixpipe.simulate.simulator import simulate
from schedules import CATALOGUE, Schedule, Shape, build
from schedules.helix import HelixOptions
from schedules.zero_bubble import ZeroBubbleOptions

BEGIN, END = "<!-- table: written by make bench-choosing -->\n", "<!-- end of table -->\n"
CHUNKS = (2, 4, 8)
"""Numbers of chunks that are tried, where the chunks are long enough for the GPU."""

SLICE = 16384
"""Tokens of a slice of the MLP (`--chunk-size`), tried on sequences of twice as many and more."""

NETWORKS: Mapping[str, float | None] = MappingProxyType(
    {"NVLink": None, "InfiniBand": None, "25 Gb/s": 25e9 / 8, "10 Gb/s": 10e9 / 8}
)
"""Bytes a second that a node sends; None: the hardware's own (one node needs no network)."""


@dataclass(frozen=True)
class Row:
    """A line of the table. tokens: of a sequence, in units of 1024. microbatches: of one sequence, a step. memory: GiB.

    One pipeline, no data parallelism: p x tensor_parallel GPUs, of nodes of 8.
    """

    tokens: int
    model: str
    hardware: str
    nodes: int
    tensor_parallel: int
    microbatches: int
    network: str
    memory: int

    @property
    def ranks(self) -> int:
        return 8 * self.nodes // self.tensor_parallel

    def plan(self, chunk_size: int) -> ModelOnCluster:
        options = ModelOptions(
            model=self.model,
            seq_length=self.tokens * 1024,
            hardware=self.hardware,
            nodes=self.nodes,
            tensor_parallel=self.tensor_parallel,
            chunk_size=chunk_size,
        )
        plan = make_plan(options, self.ranks, self.microbatches, None)
        assert plan is not None
        hardware = replace(plan.costs.hardware, memory=self.memory * GIB)
        if (network := NETWORKS[self.network]) is not None:
            hardware = replace(hardware, network=network, adapters=1)
        return replace(plan, costs=replace(plan.costs, hardware=hardware))


ROWS = (
    Row(4, "llama2-7b", "a800", 1, 2, 32, "NVLink", 80),
    Row(4, "llama2-7b", "a800", 1, 2, 32, "NVLink", 40),
    Row(4, "llama2-13b", "h100", 4, 8, 32, "25 Gb/s", 80),
    Row(32, "llama2-7b", "a800", 1, 2, 16, "NVLink", 80),
    Row(32, "llama2-7b", "a800", 1, 2, 16, "NVLink", 40),
    Row(32, "llama2-13b", "h20", 4, 8, 16, "InfiniBand", 96),
    Row(32, "llama2-13b", "h100", 4, 8, 16, "25 Gb/s", 80),
    Row(128, "llama2-7b", "a800", 1, 2, 8, "NVLink", 80),
    Row(128, "llama2-13b", "h20", 4, 8, 8, "InfiniBand", 96),
    Row(128, "infinipipe-30b", "h20", 4, 8, 8, "InfiniBand", 96),
    Row(128, "llama2-13b", "a800", 4, 8, 8, "10 Gb/s", 40),
    Row(512, "llama2-7b", "h20", 4, 8, 8, "InfiniBand", 96),
    Row(512, "llama2-7b", "h100", 4, 8, 8, "25 Gb/s", 80),
)


@dataclass(frozen=True)
class Setting:
    """A schedule with its flags."""

    schedule: Schedule
    chunks: int = 1
    virtual_stages: int | None = None
    options: Any = None
    recompute: RecomputeOptions = field(default_factory=RecomputeOptions)
    chunk_size: int = 0

    def __str__(self) -> str:
        flags = [
            (f"--pipe-sp-splits {self.chunks}", self.chunks > 1),
            (f"--num-virtual-stages-per-pipeline-rank {self.virtual_stages}", self.virtual_stages is not None),
            (f"--helix-folds {getattr(self.options, 'helix_folds', 0)}", self.options is not None),
            (f"--recompute-granularity {self.recompute.recompute_granularity}", self.recompute.granularity is not None),
            (f"--chunk-size {self.chunk_size}", self.chunk_size > 0),
        ]
        return " ".join([f"`{self.schedule.name}`", *(f"`{flag}`" for flag, given in flags if given)])


@dataclass(frozen=True)
class Result:
    """tokens: a second and GPU. peak: bytes of the fullest GPU."""

    setting: Setting
    tokens: float
    peak: float


def variants(schedule: Schedule, row: Row) -> Iterator[Setting]:
    """The numbers of chunks, virtual stages and folds that are tried."""
    whole = Setting(schedule)
    if schedule.options is HelixOptions:
        yield from (replace(whole, options=HelixOptions(helix_folds=folds)) for folds in (1, 2))
    elif schedule.chunks:
        for count in chunk_counts(row.tokens * 1024, 1, row.plan(0).costs.hardware):
            if count in CHUNKS:
                yield replace(whole, chunks=count, virtual_stages=2 if schedule.virtual_stages else None)
    elif schedule.virtual_stages:
        stages = (2,) if schedule.options is ZeroBubbleOptions else (2, 4)  # whose search takes long
        yield from (replace(whole, virtual_stages=count) for count in stages)
    else:
        yield whole


def savings(setting: Setting, row: Row) -> Iterator[Setting]:
    """The setting with less and less kept. adapipe and helix choose themselves what they recompute."""
    slices = (0, SLICE) if row.tokens * 1024 >= 2 * SLICE else (0,)
    chooses = setting.schedule.name in ("adapipe", "helix")
    for granularity in (None,) if chooses else (None, "without-attention", "full"):
        for size in slices if granularity != "full" else (0,):
            yield replace(setting, recompute=RecomputeOptions(granularity), chunk_size=size)


def program_of(setting: Setting, row: Row, plan: ModelOnCluster) -> Program:
    """Raises UserError where the schedule refuses the shape."""
    costs = plan.costs
    lengths = ChunkOptions().resolve(setting.chunks, costs, plan.layers, row.tokens * 1024, row.tensor_parallel)
    shape = Shape(
        plan.ranks,
        plan.microbatches,
        plan.layers,
        setting.chunks,
        setting.virtual_stages,
        lengths,
        costs,
        setting.recompute,
        plan.limit,
        OffloadOptions("off"),
    )
    return build(setting.schedule.name, shape, setting.options)


def run(setting: Setting, row: Row) -> Result | None:
    """Simulate a step; None where the schedule refuses the shape or the step does not fit into the memory."""
    plan = row.plan(setting.chunk_size)
    costs = plan.costs
    try:
        program = program_of(setting, row, plan)
    except UserError:
        return None
    step = report(simulate(lower(program, costs), costs, "s"), plan)
    return Result(setting, step.tokens_per_gpu, step.peak) if step.peak <= step.limit else None


@collector_paused()
def best(name: str, row: Row) -> Result | None:
    """The fastest setting of one schedule that fits.

    Of each variant that is the one with the least recomputation. Only zero-bubble schedules, which put off work to keep
    to a limit, may be faster with more of it: there as long as it helps.
    """
    schedule, fastest = CATALOGUE[name], None
    for variant in variants(schedule, row):
        found: Result | None = None
        for setting in savings(variant, row):
            result = run(setting, row)
            if result is not None and (found is None or result.tokens > found.tokens):
                found = result
            elif found is not None:
                break
            if found is not None and schedule.options is not ZeroBubbleOptions:
                break
        fastest = max((each for each in (fastest, found) if each), key=lambda result: result.tokens, default=None)
    return fastest


# --------------------------------------------------------------------------------------------------------------- table

HEAD = (
    "| | tokens | model, GPUs | network, memory | t x p, m | fastest | tokens/s/GPU | GiB | next | `1f1b` |\n"
    "|--:|--:|---|---|---|---|--:|--:|---|--:|"
)


def line(number: int, row: Row, results: Sequence[Result]) -> str:
    """One line of the table; results: of the schedules that fit."""
    first = choice(results)
    rest = [result for result in results if _family(result) != _family(first)] if first else []
    base = next((result for result in results if result.setting.schedule.name == "1f1b"), None)
    cells = [
        str(number),
        f"{row.tokens}k",
        f"{row.model}, {8 * row.nodes} {row.hardware}",
        f"{row.network}, {row.memory} GiB",
        f"{row.tensor_parallel} x {row.ranks}, {row.microbatches}",
        str(first.setting) if first else "none fits",
        f"{first.tokens:.0f}" if first else "",
        f"{first.peak / GIB:.0f}" if first else "",
        _next(choice(rest)),
        f"{base.tokens:.0f}" if base else "does not fit",
    ]
    return f"| {' | '.join(cells)} |"


def choice(results: Sequence[Result]) -> Result | None:
    """Of those within 1 % of the fastest the one that needs the least memory."""
    most = max((result.tokens for result in results), default=0.0)
    return min(
        (result for result in results if result.tokens >= 0.99 * most), key=lambda result: result.peak, default=None
    )


def _family(result: Result) -> str:
    """Schedules of one file are variants of one idea, and the next best is of another."""
    return result.setting.schedule.build.__module__


def _next(result: Result | None) -> str:
    return "" if result is None else f"`{result.setting.schedule.name}` {result.tokens:.0f}"


def lines(numbers: Sequence[int], jobs: int) -> list[str]:
    """The lines of these rows, counted from 1."""
    names = [schedule.name for schedule in CATALOGUE.values() if not schedule.one_rank]
    with ProcessPoolExecutor(jobs) as pool:
        tasks = {(number, name): pool.submit(best, name, ROWS[number - 1]) for number in numbers for name in names}
        found = {key: task.result() for key, task in tasks.items()}
    results = {number: [found[number, name] for name in names] for number in numbers}
    return [line(each, ROWS[each - 1], [result for result in results[each] if result]) for each in numbers]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    every = range(1, len(ROWS) + 1)
    parser.add_argument("--rows", nargs="+", type=int, default=every, choices=every, metavar="N", help="default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    parser.add_argument("--output", type=Path, metavar="PAGE.md", help="write the table between the marks of this page")
    arguments = parser.parse_args()
    table = "\n".join([HEAD, *lines(arguments.rows, arguments.jobs)])
    print(table)
    if arguments.output:
        before, _, rest = arguments.output.read_text(encoding="utf-8").partition(BEGIN)
        page = f"{before}{BEGIN}\n{table}\n\n{END}{rest.partition(END)[2]}"
        arguments.output.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
