"""Measures what a search over orders gains over the catalogue, simulated: docs/schedule_search.md's tables.

    make bench-search ARGS="[--rows 1 7] [--few 4 2] [--evaluations 20000] [--output docs/schedule_search.md]"
    make bench-search ARGS="--speed"

The rows are those of docs/choosing.md, and the search begins with what that page's table names as best, under the same
memory limit, but for pairs, which it has no moves for; where that lets weights travel, also with seq1f1b in 4 chunks.
`--few` repeats rows with as few microbatches as there are ranks, or half as many, and tries all of the catalogue for
each. `--speed` prints how many orders a second either evaluator judges.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from math import inf

from benchmarks.choosing import ROWS, Row, best, names, plan_of, program_of, winners
from benchmarks.report import Outcome, Page, markdown, markdown_row, progress
from benchmarks.simulated import Setting
from helixpipe.common.collector import collector_paused
from helixpipe.common.flags import option
from helixpipe.costs.hardware import GIB
from helixpipe.costs.models import OFF, PAIRS
from helixpipe.lowering.lower import lower
from helixpipe.planning.reorder.evaluate import Evaluator, Judge, compiled_evaluator
from helixpipe.planning.reorder.improve import Budget, Improved, improve
from helixpipe.planning.reorder.instance import instance_of

FEW = (4, 8)
"""Rows, counted from 1, that are repeated with few microbatches: 32k and 128k tokens on one node."""

HEADS = (
    *("", "tokens, p, m", "best of the catalogue", "tokens/s/GPU", "GiB"),
    *("found from", "tokens/s/GPU", "GiB", "gain", "at most"),
)

GAIN = HEADS.index("gain")
"""The column that decides which rows the page has: those that gain 1 % or more."""


def named_best(number: int) -> Setting:
    """Return what the table of docs/choosing.md names as the best of a row, its forwards beside nothing: the search
    knows no pairs."""
    setting = winners()[number]
    return replace(setting, overlap=OFF) if setting.overlap == PAIRS else setting


def improved(setting: Setting, row: Row, evaluations: int) -> Improved:
    plan = plan_of(setting, row)
    costs, program = plan.costs, program_of(setting, plan)
    return improve(program, costs, Budget(evaluations), plan.limit, lambda program: sum(costs.after_time(program)))


@collector_paused()
def line(number: int, row: Row, setting: Setting, evaluations: int) -> list[str]:
    """The cells of a line of a table."""
    plan, found = plan_of(setting, row), improved(setting, row, evaluations)
    before, after = found.before, found.after
    if any(stage.placement != "resident" for stage in before.program.stages):
        for size in sorted({0, setting.chunk_size}):
            chunked = replace(setting, schedule="seq1f1b", chunks=4, chunk_size=size)
            other = improved(chunked, row, evaluations).after
            if other.fullest <= plan.limit and other.time < after.time:
                after = replace(other, start=f"seq1f1b, 4 chunks, {other.start}")
    least = after.least + after.time - after.simulation.makespan
    return [
        str(number),
        f"{row.tokens}k, {plan.ranks}, {row.microbatches}",
        f"`{setting.schedule}`" + f", k = {setting.chunks}" * (setting.chunks > 1),
        f"{plan.tokens / before.time / plan.gpus:.0f}",
        f"{before.fullest / GIB:.0f}",
        "" if after is before else "its own order" if after.start == before.start else after.start,
        f"{plan.tokens / after.time / plan.gpus:.0f}",
        f"{after.fullest / GIB:.0f}",
        f"{100 * (before.time / after.time - 1):.1f} %",
        f"{100 * max(0.0, after.time / least - 1):.1f} %",
    ]


def few(number: int, microbatches: int, evaluations: int) -> list[str]:
    """A row with other microbatches, beginning with the best of all the catalogue for it."""
    row = replace(ROWS[number - 1], microbatches=microbatches)
    results = [best((name, row, OFF)) for name in names()]
    fastest = max((each for each in results if each is not None), key=lambda result: result.tokens)
    return line(number, row, fastest.setting, evaluations)


def speed() -> str:
    """Orders a second of either evaluator, of row 8's best."""
    setting, row = named_best(8), ROWS[7]
    plan = plan_of(setting, row)
    given = instance_of(lower(program_of(setting, plan), plan.costs), plan.costs)
    judges: list[tuple[str, Judge | None, int]] = [
        ("Python", Evaluator(given), 20),
        ("C++", compiled_evaluator(given), 1000),
    ]
    words = []
    for name, judge, count in judges:
        if judge is None:
            words.append(f"{name}: not built")
            continue
        start = time.perf_counter()
        for _ in range(count):
            judge.makespan(given.orders, inf)
        words.append(f"{name}: {count / (time.perf_counter() - start):.0f} orders a second")
    return f"{len(given.ops)} ops, {len(given.durations) - len(given.ops)} transfers; {', '.join(words)}"


@dataclass(frozen=True)
class Options(Page):
    rows: tuple[int, ...] = option(
        tuple(range(1, len(ROWS) + 1)), "Which (default: all).", nargs="*", metavar="N", at_least=1, at_most=len(ROWS)
    )
    few: tuple[int, ...] = option((4, 2), "Microbatches.", nargs="*", metavar="M", at_least=1)
    evaluations: int = option(20_000, "Orders for each row.", at_least=1)
    speed: bool = option(False, "How many orders a second are judged, and nothing else.", flags=("--speed",))


def run(options: Options) -> Outcome:
    if options.speed:
        return Outcome(speed())
    rows, few_rows = [], []
    for number in options.rows:
        rows.append(line(number, ROWS[number - 1], named_best(number), options.evaluations))
        progress(markdown_row(rows[-1]))
    for number in FEW:
        for microbatches in options.few:
            few_rows.append(few(number, microbatches, options.evaluations))
            progress(markdown_row(few_rows[-1]))
    gained = [row for row in rows if float(row[GAIN].split(" ")[0]) >= 1]
    tables = {name: markdown(HEADS, found, "rllrrlrrrr") for name, found in (("rows", gained), ("few", few_rows))}
    return Outcome("\n".join([*markdown(HEADS, rows, "rllrrlrrrr"), *map(markdown_row, few_rows)]), tables)
