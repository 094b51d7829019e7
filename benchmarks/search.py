"""`make bench-search`: what a search over orders gains over the catalogue, simulated: docs/schedule_search.md's tables.

    python -m benchmarks.search [--rows 1 7] [--few 4 2] [--evaluations 20000] [--output docs/schedule_search.md]
    python -m benchmarks.search --speed

The rows are those of docs/choosing.md, and the search begins with what that page's table names as best, under the same
memory limit; where that lets weights travel, also with seq1f1b in four chunks. `--few` repeats rows with as few
microbatches as there are ranks, or half as many, and tries all of the catalogue for each. `--speed` prints how many
orders a second either evaluator judges.
"""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import replace
from math import inf
from pathlib import Path

from benchmarks.choosing import ROWS, Row, Setting, best, program_of
from benchmarks.pages import written_into
from helixpipe.common.collector import collector_paused
from helixpipe.costs.hardware import GIB
from helixpipe.lowering.lower import lower
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.planning.reorder.evaluate import Evaluator, Judge, compiled_evaluator
from helixpipe.planning.reorder.improve import Budget, Improved, improve
from helixpipe.planning.reorder.instance import instance_of
from schedules import CATALOGUE

CHOOSING = Path(__file__).parents[1] / "docs" / "choosing.md"
FEW = (4, 8)
"""Rows, counted from 1, that are repeated with few microbatches: 32k and 128k tokens on one node."""

HEAD = (
    "| | tokens, p, m | best of the catalogue | tokens/s/GPU | GiB "
    "| found from | tokens/s/GPU | GiB | gain | at most |\n"
    "|--:|---|---|--:|--:|---|--:|--:|--:|--:|"
)


def named_best(number: int) -> Setting:
    """What the table of docs/choosing.md names as the best of a row."""
    table = CHOOSING.read_text(encoding="utf-8")
    cells = next(line for line in table.splitlines() if line.startswith(f"| {number} |")).split(" | ")
    name, *flags = re.findall("`([^`]+)`", cells[5])
    given = dict(flag.split() for flag in flags)
    stages = given.get("--num-virtual-stages-per-pipeline-rank")
    return Setting(
        CATALOGUE[name],
        int(given.get("--pipe-sp-splits", 1)),
        None if stages is None else int(stages),
        recompute=RecomputeOptions(given.get("--recompute-granularity")),
        chunk_size=int(given.get("--chunk-size", 0)),
    )


def improved(setting: Setting, row: Row, evaluations: int) -> Improved:
    plan = row.plan(setting.chunk_size)
    costs, program = plan.costs, program_of(setting, row, plan)
    return improve(program, costs, Budget(evaluations), plan.limit, lambda program: sum(costs.after_time(program)))


@collector_paused()
def line(number: int, row: Row, setting: Setting, evaluations: int) -> str:
    """One line of a table."""
    plan, found = row.plan(setting.chunk_size), improved(setting, row, evaluations)
    before, after = found.before, found.after
    if any(stage.placement != "resident" for stage in before.program.stages):
        for size in sorted({0, setting.chunk_size}):
            chunked = replace(setting, schedule=CATALOGUE["seq1f1b"], chunks=4, chunk_size=size)
            other = improved(chunked, row, evaluations).after
            if other.fullest <= plan.limit and other.time < after.time:
                after = replace(other, start=f"seq1f1b, 4 chunks, {other.start}")
    least = after.least + after.time - after.simulation.makespan
    cells = [
        str(number),
        f"{row.tokens}k, {row.ranks}, {row.microbatches}",
        str(setting),
        f"{plan.tokens / before.time / plan.gpus:.0f}",
        f"{before.fullest / GIB:.0f}",
        "" if after is before else "its own order" if after.start == before.start else after.start,
        f"{plan.tokens / after.time / plan.gpus:.0f}",
        f"{after.fullest / GIB:.0f}",
        f"{100 * (before.time / after.time - 1):.1f} %",
        f"{100 * max(0.0, after.time / least - 1):.1f} %",
    ]
    return f"| {' | '.join(cells)} |"


def few(number: int, microbatches: int, evaluations: int) -> str:
    """A row with other microbatches, beginning with the best of all the catalogue for it."""
    row = replace(ROWS[number - 1], microbatches=microbatches)
    results = [best(name, row) for name, schedule in CATALOGUE.items() if not schedule.one_rank]
    fastest = max((each for each in results if each is not None), key=lambda result: result.tokens)
    return line(number, row, fastest.setting, evaluations)


def speed() -> str:
    """Orders a second of either evaluator, of row 8's best."""
    setting, row = named_best(8), ROWS[7]
    plan = row.plan(setting.chunk_size)
    given = instance_of(lower(program_of(setting, row, plan), plan.costs), plan.costs)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    every = range(1, len(ROWS) + 1)
    parser.add_argument("--rows", nargs="*", type=int, default=every, choices=every, metavar="N", help="default: all")
    parser.add_argument("--few", nargs="*", type=int, default=(4, 2), metavar="M", help="microbatches (default: 4 2)")
    parser.add_argument("--evaluations", type=int, default=20_000, help="orders for each row (default: 20000)")
    parser.add_argument(
        "--output", type=Path, metavar="PAGE.md", help="write the tables between the marks of this page"
    )
    parser.add_argument("--speed", action="store_true", help="how many orders a second are judged, and nothing else")
    arguments = parser.parse_args()
    if arguments.speed:
        print(speed())
        return
    tables = {"rows": HEAD.splitlines(), "few": HEAD.splitlines()}
    for number in arguments.rows:
        tables["rows"].append(line(number, ROWS[number - 1], named_best(number), arguments.evaluations))
        print(tables["rows"][-1], flush=True)
    for number in FEW:
        for microbatches in arguments.few:
            tables["few"].append(few(number, microbatches, arguments.evaluations))
            print(tables["few"][-1], flush=True)
    if arguments.output:
        page = written_into(arguments.output.read_text(encoding="utf-8"), tables)
        arguments.output.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
