"""Chooses a schedule for each sequence, network and memory, simulated: docs/choosing.md's table.

    make bench-choosing ARGS="[--rows 1 7] [--jobs 8] [--output docs/choosing.md]"

For each row of benchmarks/data/choosing.toml every schedule of the catalogue is simulated with several numbers of
chunks, virtual stages and folds, each with the least recomputation that fits into the memory and nothing offloaded, the
best of them with the head where it is best as well; what does not fit is left out. The bound is what GPUs would do that
never wait, recompute nothing and run whole microbatches. Collectives inside ops are hidden as `--overlap-tp-comm` says.
`--output` replaces what stands between the page's two marks. All figures come from the cost model (docs/costs.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from benchmarks import data
from benchmarks.report import ROOT, Outcome, Page, markdown
from benchmarks.simulated import Jobs, Result, Scenario, Setting, in_processes, result_of, simulated
from helixpipe.cli.model import ModelOnCluster
from helixpipe.common.collector import collector_paused
from helixpipe.common.errors import UserError
from helixpipe.common.flags import option
from helixpipe.costs.hardware import GIB
from helixpipe.costs.models import AUTO, OFF
from helixpipe.planning.catalogue import Schedule
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.planning.order.chunk_lengths import chunk_counts
from helixpipe.planning.order.chunk_options import ChunkOptions
from helixpipe.planning.vocabulary.choice import head_place
from helixpipe.program.program import Program
from schedules import CATALOGUE
from schedules.helix import HelixOptions
from schedules.zero_bubble import ZeroBubbleOptions

CHUNKS = (2, 4, 8)
"""Numbers of chunks that are tried, where the chunks are long enough for the GPU."""

MOST_CHUNKS = 4
"""Of schedules that are not made for chunks, whose search takes long."""

SLICE = 16384
"""Tokens of a slice of the MLP (`--chunk-size`), tried on sequences of twice as many and more."""


@dataclass(frozen=True, kw_only=True)
class Row(Scenario):
    """A line of the table. network: as it names it."""

    network: str


PAGE = ROOT / "docs" / "choosing.md"

ROWS = data.rows("choosing.toml", "row", Row)


@dataclass(frozen=True)
class Options(Jobs, Page):
    rows: tuple[int, ...] = option(
        tuple(range(1, len(ROWS) + 1)), "Which rows (default: all).", metavar="N", at_least=1, at_most=len(ROWS)
    )
    overlap_tp_comm: Literal["off", "auto"] = option(
        OFF, "How collectives inside ops are hidden: auto tries halves and pairs, which takes three times as long."
    )


def flags_of(setting: Setting) -> str:
    """The schedule and its flags, as the table has them."""
    granularity = setting.recompute.recompute_granularity
    flags = [
        (f"--pipe-sp-splits {setting.chunks}", setting.chunks > 1),
        (f"--num-virtual-stages-per-pipeline-rank {setting.virtual_stages}", setting.virtual_stages is not None),
        (f"--helix-folds {getattr(setting.options, 'helix_folds', 0)}", setting.options is not None),
        (f"--recompute-granularity {granularity}", setting.recompute.granularity is not None),
        (f"--chunk-size {setting.chunk_size}", setting.chunk_size > 0),
        (f"--pipeline-vocab-parallel {setting.vocabulary}", setting.vocabulary != "ends"),
        (f"--overlap-tp-comm {setting.overlap}", setting.overlap != OFF),
    ]
    return " ".join([f"`{setting.schedule}`", *(f"`{flag}`" for flag, given in flags if given)])


def variants(schedule: Schedule, row: Row) -> Iterator[Setting]:
    """The numbers of chunks, virtual stages and folds that are tried."""
    whole = Setting(schedule.name)
    if schedule.options is HelixOptions:
        yield from (replace(whole, options=HelixOptions(helix_folds=folds)) for folds in (1, 2))
        return
    counts = [count for count in chunk_counts(row.tokens * 1024, 1, row.plan().costs.hardware) if count in CHUNKS]
    stages: tuple[int | None, ...] = (2, 4) if schedule.virtual_stages else (None,)
    if schedule.virtual_stages and (schedule.chunks or schedule.options is ZeroBubbleOptions):
        stages = (2,)  # whose search takes long, or whose chunks do what more stages would
    if not schedule.chunks:
        counts = [1, *(count for count in counts if schedule.units and count <= MOST_CHUNKS)]
    yield from (replace(whole, chunks=count, virtual_stages=each) for count in counts for each in stages)


def savings(setting: Setting, row: Row) -> Iterator[Setting]:
    """The setting with less and less kept. adapipe and helix choose themselves what they recompute."""
    slices = (0, SLICE) if row.tokens * 1024 >= 2 * SLICE else (0,)
    chooses = setting.schedule in ("adapipe", "helix")
    for granularity in (None,) if chooses else (None, "without-attention", "full"):
        for size in slices if granularity != "full" else (0,):
            yield replace(setting, recompute=RecomputeOptions(granularity), chunk_size=size)


def program_of(setting: Setting, plan: ModelOnCluster) -> Program:
    """Raises UserError where the schedule refuses the shape."""
    costs = plan.costs
    aligned: Any = (costs, plan.layers, costs.seq_length, costs.layout.tensor_parallel)
    return replace(setting, chunk_lengths=ChunkOptions().resolve(setting.chunks, *aligned)).program(plan)


def plan_of(setting: Setting, row: Row) -> ModelOnCluster:
    return row.plan(chunk_size=setting.chunk_size, overlap_tp_comm=setting.overlap)


def simulated_row(setting: Setting, row: Row) -> Result | None:
    """Simulate a step, with `auto` the fastest of the ways to hide collectives; None where the schedule refuses the
    shape or the step does not fit into the memory."""
    if setting.overlap == AUTO:
        ways = plan_of(replace(setting, overlap=OFF), row).costs.ways_to_hide(setting.chunks)
        steps = [simulated_row(replace(setting, overlap=costs.layout.overlap_tp_comm), row) for costs in ways]
        return max(filter(None, steps), key=lambda result: result.tokens, default=None)
    plan = plan_of(setting, row)
    try:
        program = program_of(setting, plan)
        if setting.vocabulary == "auto":
            setting = replace(setting, vocabulary=head_place(program))
        result = result_of(setting, simulated(plan, program))
    except UserError:
        return None
    return result if result.fits else None


@collector_paused()
def best(job: tuple[str, Row, str]) -> Result | None:
    """The fastest setting of one schedule on a row that fits. job: the last is how collectives inside ops are hidden.

    Of each variant that is the one with the least recomputation. Only zero-bubble schedules, which put off work to keep
    to a limit, may be faster with more of it: there as long as it helps.
    """
    name, row, overlap = job
    schedule, fastest = CATALOGUE[name], None
    for variant in variants(schedule, row):
        variant = replace(variant, overlap=overlap)
        found: Result | None = None
        for setting in savings(variant, row):
            result = simulated_row(setting, row)
            if result is not None and (found is None or result.tokens > found.tokens):
                found = result
            elif found is not None:
                break
            if found is not None and schedule.options is not ZeroBubbleOptions:
                break
        fastest = max((each for each in (fastest, found) if each), key=lambda result: result.tokens, default=None)
    if fastest is None or schedule.spread:
        return fastest
    other = simulated_row(replace(fastest.setting, vocabulary="auto", overlap=overlap), row)
    return other if other is not None and other.tokens > fastest.tokens else fastest


# --------------------------------------------------------------------------------------------------------------- table

HEADS = (
    *("", "tokens", "model, GPUs", "network, memory", "t x p, m", "fastest", "tokens/s/GPU", "of the bound", "GiB"),
    *("next", "`1f1b`"),
)


def line(number: int, row: Row, results: Sequence[Result], overlap: str) -> list[str]:
    """The cells of a line of the table; results: of the schedules that fit."""
    first = choice(results)
    rest = [result for result in results if _family(result) != _family(first)] if first else []
    base = next((result for result in results if result.setting.schedule == "1f1b"), None)
    other = choice(rest)
    return [
        str(number),
        f"{row.tokens}k",
        f"{row.model}, {8 * row.nodes} {row.hardware}",
        f"{row.network}, {row.gpu_memory:.0f} GiB",
        f"{row.tensor_parallel} x {8 * row.nodes // row.tensor_parallel}, {row.microbatches}",
        flags_of(first.setting) if first else "none fits",
        f"{first.tokens:.0f}" if first else "",
        f"{first.tokens / bound(row, overlap):.1%}" if first else "",
        f"{first.peak / GIB:.0f}" if first else "",
        f"`{other.setting.schedule}` {other.tokens:.0f}" if other else "",
        f"{base.tokens:.0f}" if base else "does not fit",
    ]


def bound(row: Row, overlap: str) -> float:
    """Tokens a second and GPU of GPUs that never wait for each other and do nothing twice."""
    speeds = []
    for costs in row.plan().costs.ways_to_hide() if overlap == AUTO else (row.plan().costs,):
        plan = replace(row.plan(), costs=costs)
        step = simulated(plan, Setting("1f1b").program(plan, limited=False))
        speeds.append(step.tokens_per_gpu * step.step_time / (step.step_time - step.simulation.bubble_time))
    return max(speeds)


def choice(results: Sequence[Result]) -> Result | None:
    """Of those within 1 % of the fastest the one that needs the least memory."""
    most = max((result.tokens for result in results), default=0.0)
    return min(
        (result for result in results if result.tokens >= 0.99 * most), key=lambda result: result.peak, default=None
    )


def _family(result: Result) -> str:
    """Schedules of one file are variants of one idea, and the next best is of another."""
    return CATALOGUE[result.setting.schedule].build.__module__


def said(result: Result | None) -> str:
    """A result as it is told while the others are found."""
    return "does not fit" if result is None else f"{flags_of(result.setting)} {result.tokens:.0f}"


def names() -> list[str]:
    """Of the schedules that are compared."""
    return [schedule.name for schedule in CATALOGUE.values() if not schedule.one_rank]


def run(options: Options) -> Outcome:
    tasks = [(name, ROWS[number - 1], options.overlap_tp_comm) for number in options.rows for name in names()]
    done = (f"row {number}, {name}" for number in options.rows for name in names())
    found = iter(in_processes(best, tasks, options, lambda result: f"{next(done)}: {said(result)}"))
    rows = []
    for number in options.rows:
        results = [result for _ in names() if (result := next(found)) is not None]
        rows.append(line(number, ROWS[number - 1], results, options.overlap_tp_comm))
    lines = markdown(HEADS, rows, "rrllllrrrlr")
    return Outcome("\n".join(lines), {"choosing": lines})
