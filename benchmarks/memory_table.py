"""Counts what ranks of jobs allocate on the fake CUDA device, beside what the cost model predicts: docs/dry_run.md.

    make bench-memory-table ARGS="[--rows 1 2] [--jobs 2] [--output docs/dry_run.md] [--json figures.json]"

The jobs of benchmarks/data/memory_table.toml run the training program itself, two steps of it, at the sizes of real
models; the most that is allocated in the second step is compared. Nothing is computed, so a GPU's memory is not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from benchmarks.data import read
from benchmarks.fake_jobs import Job
from benchmarks.fake_jobs import run as run_jobs
from benchmarks.report import FOLDER, Figures, Outcome, Page, markdown, progress
from helixpipe.common.errors import UserError
from helixpipe.common.flags import option
from helixpipe.costs.hardware import GIB
from helixpipe.simulate.memory import RankMemory

WITHIN = 0.02
"""What a prediction may differ from what is counted before the table marks it."""

_TABLE = read(FOLDER / "memory_table.toml")


@dataclass(frozen=True)
class Options(Figures, Page):
    """Options of this benchmark."""

    jobs: int = option(2, "Processes.", at_least=1)
    rows: tuple[int, ...] | None = option(None, "Which jobs, from 1 on (default: all).", metavar="N")


@dataclass(frozen=True)
class Setup:
    """A job. p, t, c, d: pipeline, tensor-parallel, context-parallel and data-parallel ranks; microbatches: of a
    pipeline and step, 0 for one more than there are pipeline ranks."""

    flags: str
    model: str = "8b"
    layers: int = 16
    tokens: int = 8192
    microbatches: int = 0
    p: int = 4
    t: int = 1
    c: int = 1
    d: int = 1

    @property
    def name(self) -> str:
        sizes = {"t": self.t, "c": self.c, "d": self.d}
        beside = "".join(f" {name}{size}" for name, size in sizes.items() if size > 1)
        return f"{self.model}, {self.layers} layers, {self.tokens // 1024}k: p{self.p}{beside}"

    def job(self, number: int) -> Job:
        each = self.t * self.c * self.d
        batch = (self.microbatches or self.p + 1) * self.d
        flags = (
            f"{_TABLE['always']['flags']} {_TABLE['model'][self.model]} --num-layers {self.layers} "
            f"--seq-length {self.tokens} --max-position-embeddings {self.tokens} --global-batch-size {batch} "
            f"--pipeline-model-parallel-size {self.p} --tensor-model-parallel-size {self.t} "
            f"--context-parallel-size {self.c} {'--sequence-parallel' * (self.t > 1)} {self.flags}"
        )
        ranks = tuple(sorted({0, self.p // 2 * each, self.p * each - 1}))
        return Job(str(number), self.p * each, tuple(flags.split()), ranks)


@dataclass(frozen=True)
class Row:
    """A rank of a job: bytes that were counted at most in a step, and what is predicted of the same."""

    job: int
    setup: Setup
    rank: int
    pipeline_rank: int
    counted: int
    predicted: RankMemory

    @property
    def error(self) -> float:
        return self.predicted.total / self.counted - 1


SETUPS: tuple[Setup, ...] = tuple(Setup(**each) for each in _TABLE["job"])


def run(options: Options) -> Outcome:
    numbers = options.rows or tuple(range(1, len(SETUPS) + 1))
    if wrong := [number for number in numbers if not 1 <= number <= len(SETUPS)]:
        raise UserError(f"--rows {wrong[0]}: there are jobs 1 to {len(SETUPS)}.")
    with ThreadPoolExecutor(options.jobs) as pool:
        groups = [tuple(numbers[at :: options.jobs]) for at in range(min(options.jobs, len(numbers)))]
        rows = sorted((row for found in pool.map(rows_of, groups) for row in found), key=lambda row: row.job)
    missing = sum(len(SETUPS[number - 1].job(number).ranks) for number in numbers) - len(rows)
    if not rows:
        return Outcome("No rank came through.", status=1)
    table = markdown(*table_of(rows))
    within = sum(abs(row.error) <= WITHIN for row in rows)
    worst = max(abs(row.error) for row in rows)
    summary = f"{within} of {len(rows)} ranks are within {WITHIN:.0%}; the largest difference is {worst:.1%}."
    figures = [{**asdict(row), "error": row.error} for row in rows]
    return Outcome("\n".join([*table, "", summary]), {"memory": [*table, "", summary]}, figures, status=min(missing, 1))


def rows_of(numbers: Sequence[int]) -> list[Row]:
    """Run the ranks of jobs one after another. Those that do not come through are told on standard error."""
    rows = []
    for number, ran in run_jobs([SETUPS[number - 1].job(number) for number in numbers]).items():
        setup = SETUPS[int(number) - 1]
        for rank, said in ran.failures.items():
            progress(f"{number} ({setup.name}; {setup.flags}), rank {rank} failed: {said.strip()[-400:]}")
        for report in ran.reports:
            assert report.predicted is not None, "costs are not of a profile"
            peak = report.steps[-1].peak
            rows.append(Row(int(number), setup, report.rank, report.pipeline_rank, peak, report.predicted))
    return rows


def table_of(rows: Sequence[Row]) -> tuple[Sequence[str], list[list[str]], str]:
    """Return headers, cells and alignment: a line a job, its first, middle and last rank in each cell."""
    by_job: dict[int, list[Row]] = {}
    for row in rows:
        by_job.setdefault(row.job, []).append(row)
    cells = []
    for ranks in by_job.values():
        errors = [f"**{row.error:+.1%}**" if abs(row.error) > WITHIN else f"{row.error:+.1%}" for row in ranks]
        counted = ", ".join(f"{row.counted / GIB:.1f}" for row in ranks)
        cells.append([ranks[0].setup.name, f"`{short(ranks[0].setup.flags)}`", counted, ", ".join(errors)])
    return ("sizes", "flags", "counted", "predicted beyond it"), cells, "llrr"


def short(flags: str) -> str:
    """Flags without those that every row has, or that say the same."""
    for long, brief in (
        ("--pipeline-schedule ", ""),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "full recomputation"),
        ("--num-virtual-stages-per-pipeline-rank", "v ="),
    ):
        flags = flags.replace(long, brief)
    return flags
