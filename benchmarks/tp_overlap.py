"""Shows what halves and pairs gain over the overlap that every backward has, simulated: docs/tp_overlap.md's tables.

    make bench-tp-overlap ARGS="[--rows 1 3] [--context 1 2] [--jobs 2] [--output docs/tp_overlap.md]"

For each row of benchmarks/data/tp_overlap.toml steps of `1f1b`, of `seq1f1b` with four chunks and of `helix` are
simulated with each value of `--overlap-tp-comm`, and with NVLink infinitely fast, nothing recomputed but what helix
does; for those with context parallelism steps of `1f1b`, and with the network as fast, over which its ranks exchange.
`--output` replaces what stands between the page's marks. All figures come from the cost model
(docs/costs.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from benchmarks import data
from benchmarks.report import Outcome, Page, markdown
from benchmarks.simulated import Jobs, Scenario, Setting, in_processes, simulated
from helixpipe.common.collector import collector_paused
from helixpipe.common.flags import option
from helixpipe.costs.hardware import GIB
from helixpipe.costs.models import HALVES, PAIRS

ROWS = data.rows("tp_overlap.toml", "row", Scenario)
CONTEXT = data.rows("tp_overlap.toml", "context", Scenario)
SETTINGS = (Setting("1f1b"), Setting("seq1f1b", chunks=4))
HEADS = (
    *("model, GPUs", "tokens, m", "schedule", "off, s", "halves gain", "pairs gain"),
    *("all hidden", "GiB, off", "GiB, pairs"),
)


@dataclass(frozen=True)
class Options(Jobs, Page):
    rows: tuple[int, ...] = option(
        tuple(range(1, len(ROWS) + 1)), "Which rows (default: all).", metavar="N", at_least=1, at_most=len(ROWS)
    )
    context: tuple[int, ...] = option(
        tuple(range(1, len(CONTEXT) + 1)),
        "Which rows with context parallelism (default: all).",
        metavar="N",
        at_least=1,
        at_most=len(CONTEXT),
    )


class Step(NamedTuple):
    """Of one setting of a row. off, halves, pairs, free: seconds of the pipeline with each value of the flag, and were
    NVLink infinitely fast. gib: of the fullest GPU, with each value."""

    row: Scenario
    setting: Setting
    off: float
    halves: float
    pairs: float
    free: float
    gib: tuple[float, ...]


@collector_paused()
def measure(job: tuple[Scenario, Setting]) -> Step:
    row, setting = job
    plans = [row.plan(), row.plan(overlap_tp_comm=HALVES), row.plan(overlap_tp_comm=PAIRS)]
    costs = plans[0].costs
    fast = replace(costs.hardware, nvlink=float("inf"))
    fast = fast if row.context_parallel is None else replace(fast, network=float("inf"))
    plans.append(replace(plans[0], costs=replace(costs, hardware=fast)))
    steps = [simulated(plan, setting.program(plan, limited=False)) for plan in plans]
    off, halves, pairs, free = (step.simulation.makespan for step in steps)
    return Step(row, setting, off, halves, pairs, free, tuple(step.peak / GIB for step in steps[:3]))


def line(step: Step) -> list[str]:
    """The cells of a line of the table."""
    row, setting = step.row, step.setting
    chunks = f", {setting.chunks} chunks" if setting.chunks > 1 else ""
    return [
        f"{row.model}, {8 * row.nodes} {row.hardware}",
        f"{row.tokens}k, {row.microbatches}",
        f"`{setting.schedule}`{chunks}" if row.context_parallel is None else _ranks(row),
        f"{step.off:.3f}",
        f"{step.off / step.halves:.3f}",
        f"{step.off / step.pairs:.3f}",
        f"{step.off / step.free:.2f}",
        *(f"{each:.1f}" for each in (step.gib[0], step.gib[2])),
    ]


def _ranks(row: Scenario) -> str:
    return f"{row.tensor_parallel} x {row.context_parallel} `{row.cp_comm_type}`"


def table(steps: Sequence[Step], third: str) -> list[str]:
    heads = (*HEADS[:2], third, *HEADS[3:])
    return markdown(heads, [line(step) for step in steps], "lllrrrrrr")


def run(options: Options) -> Outcome:
    jobs = [(ROWS[number - 1], setting) for number in options.rows for setting in SETTINGS]
    jobs += [(CONTEXT[number - 1], SETTINGS[0]) for number in options.context]
    found = in_processes(measure, jobs, options)
    first = len(jobs) - len(options.context)
    tables = {
        "tp-overlap": table(found[:first], "schedule"),
        "cp-overlap": table(found[first:], "tensor x context"),
    }
    return Outcome("\n".join(["\n".join(lines) for lines in tables.values()]), tables=tables)
