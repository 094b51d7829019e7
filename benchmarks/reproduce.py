"""Published figures and what the cost model predicts for them, side by side, with the errors.

    make reproduce CELLS=file.json
    make bench-reproduce ARGS="[--cells file.json] [--output docs/reproduction.md] [--jobs 2]"

The file's form is `published_cells`; `predicted_cells` simulates a cell. Nothing is fitted to a table or a cell, but
the op overhead of tables whose cells ask for it, and with --calibrate one factor a table: what its GPUs reach of what
the cost model assumes (arithmetic and memory bandwidth alike), such that the cells with `calibrate` are right on
average. A cell that cannot be predicted is listed with the reason, in one sentence. With `--output`
the errors of each table go into docs/reproduction.md, with a picture beside it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks.predicted_cells import Predicted, predict, prepare
from benchmarks.published_cells import FIT, Cell, load
from benchmarks.report import FOLDER, Outcome, Page, progress
from benchmarks.reproduction_page import Line, Table, page, picture, summary
from benchmarks.simulated import Jobs
from helixpipe.common.errors import UserError
from helixpipe.common.flags import option

CELLS = FOLDER / "cells.json"


@dataclass(frozen=True)
class Options(Page, Jobs):
    cells: str = option(str(CELLS), "JSON or TOML file of cells (default: the repository's).", metavar="FILE")
    output: str | None = option(
        None, "Write the table of errors into its place in that page, and a picture beside it.", metavar="FILE.md"
    )
    calibrate: bool = option(False, "Find the speed of each table's GPUs from its cells with `calibrate`.")


@dataclass(frozen=True)
class Answer:
    """The outcome of a cell: a prediction, or a sentence why there is none."""

    predicted: Predicted | None
    reason: str = ""


def answer(job: tuple[Cell, float]) -> Answer:
    """Predict a cell at a speed. job: as one argument, for processes."""
    cell, speed = job
    try:
        return Answer(predict(cell, speed))
    except UserError as error:
        return Answer(None, str(error))
    except Exception as error:  # a table is worth more than its worst cell
        return Answer(None, f"{type(error).__name__}: {error}")


def own_speed(cell: Cell) -> float | None:
    """The speed with which a cell's prediction is what was published; None where there is no prediction."""
    try:
        return prepare(cell).fitting_speed()
    except Exception:  # `answer` says why
        return None


def own_overhead(cell: Cell) -> float | None:
    """The seconds an op with which a cell's prediction is what was published; None where there is no prediction."""
    try:
        return prepare(cell).fitting_overhead()
    except Exception:  # `answer` says why
        return None


class Run(Protocol):
    """`map`, in processes or without."""

    def __call__(self, function: Callable[[Any], Any], work: Iterable[Any], /) -> Iterable[Any]: ...


def mean_ratio(ratios: Sequence[float]) -> float:
    """Geometric; 1 of nothing."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0


def speed_of(cells: Sequence[Cell], run: Run) -> float:
    """Return what GPUs reach of what is assumed: the mean of the speeds with which each cell to calibrate on would be
    right; 1 where there are none."""
    chosen = [cell for cell in cells if cell.calibrate and cell.published.tokens_per_second_per_gpu]
    return mean_ratio([speed for speed in run(own_speed, chosen) if speed is not None])


def with_overhead(cells: Sequence[Cell], run: Run) -> list[Cell]:
    """The cells with the op overhead that those which ask for it have on average."""
    asking = [cell for cell in cells if cell.op_overhead == FIT and cell.published.tokens_per_second_per_gpu]
    found = [seconds for seconds in run(own_overhead, asking) if seconds is not None]
    mean = sum(found) / len(found) if found else 0.0
    return [replace(cell, op_overhead=mean) if cell.op_overhead == FIT else cell for cell in cells]


def table_of(name: str, cells: Sequence[Cell], run: Run, calibrate: bool = False) -> Table:
    """A table's cells beside their predictions, at the table's speed where that is asked for."""
    cells = with_overhead(cells, run)
    speed = speed_of(cells, run) if calibrate else 1.0
    answers = list(run(answer, [(cell, speed) for cell in cells]))
    return Table(
        name, speed, [Line(cell, each.predicted, each.reason) for cell, each in zip(cells, answers, strict=True)]
    )


def _announced(name: str, cells: Sequence[Cell], run: Run, calibrate: bool) -> Table:
    progress(f"{name}: {len(cells)} cells")
    return table_of(name, cells, run, calibrate)


def tables_of(cells: Sequence[Cell], jobs: int, calibrate: bool = False) -> list[Table]:
    """Every table of the cells, in their order."""
    names = list(dict.fromkeys(cell.table for cell in cells))
    with ProcessPoolExecutor(jobs) as pool:
        of = partial(_announced, run=pool.map, calibrate=calibrate)
        return [of(name, [cell for cell in cells if cell.table == name]) for name in names]


def run(options: Options) -> Outcome:
    tables = tables_of(load(options.cells), options.jobs or os.cpu_count() or 1, options.calibrate)
    if options.output is not None:
        Path(options.output).with_suffix(".svg").write_text(picture(tables), encoding="utf-8")
    return Outcome(page(tables), {"summary": summary(tables)})
