"""How far schedules are from the best order of their work: docs/certificates.md's tables.

    make bench-certificates ARGS="[--rows 1 7] [--jobs 8] [--output docs/certificates.md]"

First the winners of docs/choosing.md's table, as that page has them, each with the bound that `helixpipe simulate
--certify` prints. Then small steps with times of whole steps, where the bound is exact: proven to be as short as any
order in their memory, or made shorter by `helixpipe improve --orders-only`. `--output` replaces what stands between the
page's marks. All figures are simulated (docs/costs.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.choosing import ROWS, plan_of, program_of, winners
from benchmarks.report import Outcome, Page, markdown
from benchmarks.simulated import Jobs, Setting, in_processes, simulated
from helixpipe.certify.certificate import EQUAL, Certificate, certify
from helixpipe.common.errors import ScheduleError
from helixpipe.common.flags import option
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.lower import lower
from helixpipe.planning.reorder.improve import Budget, improve
from helixpipe.planning.setup import Setup
from helixpipe.simulate.simulator import simulate
from schedules import CATALOGUE

PLACEMENTS: tuple[tuple[str, int | None], ...] = (
    ("gpipe", None),
    ("1f1b", None),
    ("zb1p", None),
    ("zb2p", None),
    ("interleaved-1f1b", 2),
    ("zb-interleaved", 2),
    ("chimera", None),
    ("hanayo", None),
    ("zbv", None),
    ("v-half", None),
    ("v-min", None),
)
"""Schedules of the small steps, with their stages a rank."""

SIZES = ((2, 2), (2, 4), (2, 8), (3, 3), (3, 6), (4, 4), (4, 6), (4, 8))
"""Ranks and microbatches of the small steps."""

ON_PAGE = ((2, 8), (3, 6), (4, 4), (4, 8))
"""Sizes that the table shows; all are counted."""

EVALUATIONS = 200_000
"""Orders judged in search of a shorter one, where the bound leaves room."""


@dataclass(frozen=True)
class Options(Jobs, Page):
    rows: tuple[int, ...] = option(
        tuple(range(1, len(ROWS) + 1)), "Which rows of docs/choosing.md.", metavar="N", at_least=1, at_most=len(ROWS)
    )


class Certified(NamedTuple):
    """A schedule and its step's certificate."""

    schedule: str
    certificate: Certificate


def row(job: tuple[int, Setting]) -> Certified:
    """The winner of a row of docs/choosing.md. job: the row's number, its setting."""
    number, setting = job
    plan = plan_of(setting, ROWS[number - 1])
    step = simulated(plan, program_of(setting, plan))
    return Certified(setting.schedule, certify(step.simulation, plan.limit))


class Small(NamedTuple):
    """A small step, in units of the forward of one of a rank's stages. shorter: the makespan of the best order found,
    that of the schedule itself if none is shorter."""

    schedule: str
    ranks: int
    microbatches: int
    certificate: Certificate
    shorter: float


def small(job: tuple[str, int | None, int, int]) -> Small | None:
    """A small step; None where the schedule refuses its size."""
    schedule, virtual, ranks, microbatches = job
    costs = PieceTimes({"mlp": 1.0})
    try:
        program = CATALOGUE.build(schedule, Setup(ranks, 2 * ranks, costs, virtual).shape(microbatches), None)
    except ScheduleError:
        return None
    certificate = certify(simulate(lower(program, costs), costs))
    shorter = certificate.makespan
    if not certificate.optimal:
        shorter = improve(program, costs, Budget(EVALUATIONS, 0, True)).after.time
    return Small(schedule, ranks, microbatches, certificate, shorter)


def of_rows(found: Sequence[Certified], numbers: Sequence[int]) -> list[str]:
    """The lines of the first table."""
    lines = []
    for number, (schedule, certificate) in zip(numbers, found, strict=True):
        value, makespan = certificate.bound.value, certificate.makespan
        lines.append(
            [str(number), f"`{schedule}`", f"{makespan:.4g}", f"{value:.4g}", f"{100 * certificate.gap:.1f} %"]
        )
    return markdown(("", "schedule", "simulated, s", "bound, s", "gap"), lines, "rlrrr")


def of_sizes(found: Sequence[Small]) -> list[str]:
    """The lines of the second table, a line a schedule and a column a size."""
    by_size = {(each.schedule, each.ranks, each.microbatches): each for each in found}
    lines = []
    for name, _ in PLACEMENTS:
        own = [by_size.get((name, *size)) for size in ON_PAGE]
        lines.append([f"`{name}`", *("" if each is None else verdict(each) for each in own)])
    return markdown(
        ("", *(f"p {ranks}, m {microbatches}" for ranks, microbatches in ON_PAGE)), lines, "l" + "r" * len(ON_PAGE)
    )


def verdict(small: Small) -> str:
    """The makespan where it is proven to be the least; else what was found, the bound, and what the schedule takes."""
    makespan, least = small.certificate.makespan, small.certificate.bound.value
    if small.certificate.optimal:
        return f"{makespan:g}"
    if small.shorter <= least * (1 + EQUAL):
        return f"{makespan:g} → **{least:g}**"
    return f"{makespan:g}, {small.shorter:g} found, bound {least:g}"


def run(options: Options) -> Outcome:
    settings = winners()
    jobs = [(number, settings[number]) for number in options.rows]
    rows = of_rows(in_processes(row, jobs, options), options.rows)
    sizes = [(name, virtual, *size) for name, virtual in PLACEMENTS for size in SIZES]
    found = [each for each in in_processes(small, sizes, options) if each is not None]
    optimal = sum(each.certificate.optimal for each in found)
    improved = sum(each.shorter <= each.certificate.bound.value * (1 + EQUAL) for each in found) - optimal
    text = f"{len(found)} small steps: {optimal} proven to be as short as any, {improved} made so."
    tables = {"rows": rows, "small": of_sizes(found), "summary": [text]}
    return Outcome("\n\n".join("\n".join(lines) for lines in tables.values()), tables)
