"""Published figures and what the cost model predicts for them, side by side, with the errors.

    make reproduce CELLS=file.json
    make bench-reproduce ARGS="[--cells file.json] [--output page.md] [--jobs 2]"

The file's form is `published_cells`; `predicted_cells` simulates a cell. Each table has one factor: what its GPUs reach
of what the cost model assumes (arithmetic and memory bandwidth alike), such that the cells with `calibrate` are right
on average; and one for memory, from allocated to published. Nothing else is fitted to a table, nothing to a cell. A
cell that cannot be predicted is listed with the reason, in one sentence. Without `--output` the page is printed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks.predicted_cells import Predicted, predict, prepare
from benchmarks.published_cells import Cell, load
from benchmarks.report import FOLDER, Outcome, Page, progress
from benchmarks.reproduction_page import Line, Table, page, picture
from benchmarks.simulated import Jobs
from helixpipe.common.errors import UserError
from helixpipe.common.flags import option

CELLS = FOLDER / "cells.json"


@dataclass(frozen=True)
class Options(Page, Jobs):
    cells: str = option(str(CELLS), "JSON or TOML file of cells (default: the repository's).", metavar="FILE")
    output: str | None = option(None, "Markdown page to write; a picture goes beside it.", metavar="FILE.md")


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


def table_of(name: str, cells: Sequence[Cell], run: Run) -> Table:
    """A table's cells beside their predictions, at the table's speed."""
    speed = speed_of(cells, run)
    answers = list(run(answer, [(cell, speed) for cell in cells]))
    weighed = [
        cell.published.memory_gib / each.predicted.gib
        for cell, each in zip(cells, answers, strict=True)
        if cell.calibrate and cell.published.memory_gib and each.predicted is not None
    ]
    lines = [Line(cell, each.predicted, each.reason) for cell, each in zip(cells, answers, strict=True)]
    return Table(name, speed, mean_ratio(weighed) if weighed else None, lines)


def _announced(name: str, cells: Sequence[Cell], run: Run) -> Table:
    progress(f"{name}: {len(cells)} cells")
    return table_of(name, cells, run)


def tables_of(cells: Sequence[Cell], jobs: int) -> list[Table]:
    """Every table of the cells, in their order."""
    names = list(dict.fromkeys(cell.table for cell in cells))
    with ProcessPoolExecutor(jobs) as pool:
        of = partial(_announced, run=pool.map)
        return [of(name, [cell for cell in cells if cell.table == name]) for name in names]


def run(options: Options) -> Outcome:
    tables = tables_of(load(options.cells), options.jobs or os.cpu_count() or 1)
    if options.output is None:
        return Outcome(page(tables))
    image = Path(options.output).with_suffix(".svg")
    image.write_text(picture(tables), encoding="utf-8")
    return Outcome(page(tables, image.name))
