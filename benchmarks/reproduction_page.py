"""The page and the picture of `make reproduce`: predicted beside published, and the errors of each table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.predicted_cells import Predicted
from benchmarks.published_cells import Cell
from benchmarks.report import markdown

BASELINE = "1f1b"

TIE = 0.01
"""Throughputs closer than this are equal."""


@dataclass(frozen=True)
class Line:
    """A cell and its prediction; reason: why there is none."""

    cell: Cell
    predicted: Predicted | None
    reason: str = ""

    @property
    def error(self) -> float | None:
        """Of throughput, in parts of what is published."""
        told = self.cell.published.tokens_per_second_per_gpu
        return None if told is None or self.predicted is None else self.predicted.tokens_per_gpu / told - 1


@dataclass(frozen=True)
class Table:
    """A published table, predicted. speed: see `reproduce`."""

    name: str
    speed: float
    lines: Sequence[Line]

    def baseline(self, line: Line) -> Line | None:
        """The line of 1f1b in the same row."""
        same = [other for other in self.lines if other.cell.row == line.cell.row and other.cell.schedule == BASELINE]
        return same[0] if same else None

    def ratios(self, line: Line) -> tuple[float | None, float | None]:
        """(predicted, published) over the row's 1f1b; None where either is missing."""
        base = self.baseline(line)
        if base is None or base is line:
            return None, None
        told, other = (each.cell.published.tokens_per_second_per_gpu for each in (line, base))
        predicted = None
        if line.predicted is not None and base.predicted is not None:
            predicted = line.predicted.tokens_per_gpu / base.predicted.tokens_per_gpu
        return predicted, told / other if told and other else None

    def ratio_error(self, line: Line) -> float | None:
        predicted, published = self.ratios(line)
        if line.cell.published.over_best is not None:
            predicted, published = self.over_best(line), line.cell.published.over_best
        return predicted / published - 1 if predicted and published else None

    def over_best(self, line: Line) -> float | None:
        """Predicted throughput over that of the fastest other schedule of the row that fits."""
        others = [
            other.predicted.tokens_per_gpu
            for other in self.lines
            if other.cell.row == line.cell.row and other is not line and other.predicted is not None
            if other.predicted.fits
        ]
        return line.predicted.tokens_per_gpu / max(others) if line.predicted is not None and others else None

    def memory_error(self, line: Line) -> float | None:
        told = line.cell.published.memory_gib
        if told is None or line.predicted is None:
            return None
        return line.predicted.reserved_gib / told - 1

    def best_named(self) -> tuple[int, int]:
        """Of the rows with several published figures, in how many the fastest schedule is predicted to be the fastest,
        or within `TIE` of it; and how many there are."""
        right = rows = 0
        for row in dict.fromkeys(line.cell.row for line in self.lines):
            rated = [
                (line.cell.published.tokens_per_second_per_gpu, line.predicted.tokens_per_gpu)
                for line in self.lines
                if line.cell.row == row and line.predicted is not None and not line.cell.published.oom
                if line.cell.published.tokens_per_second_per_gpu
            ]
            if len(rated) > 1:
                rows += 1
                right += max(rated)[1] >= max(predicted for _, predicted in rated) * (1 - TIE)
        return right, rows


def mean_error(errors: Iterable[float | None]) -> str:
    """Of absolute values, in percent."""
    known = [abs(error) for error in errors if error is not None]
    return f"{100 * sum(known) / len(known):.1f} % ({len(known)})" if known else "–"


def summary(tables: Sequence[Table]) -> list[str]:
    """Markdown: a line a table, with its errors."""
    heads = ("table", "ratio: mean error (cells)", "tokens/s", "memory", "out of memory, right", "best of a row")
    return markdown(heads, [*map(_summary, tables), *_total(tables)], "lrrrrr")


def page(tables: Sequence[Table]) -> str:
    """Markdown: the summary, and a line a cell."""
    lines = summary(tables)
    for table in tables:
        lines += ["", f"## {table.name}", "", *_lines(table)]
    return "\n".join(lines)


def _summary(table: Table) -> list[str]:
    """The cells of its line."""
    found = [line for line in table.lines if line.predicted is not None]
    told = [line for line in found if line.cell.published.says_whether_it_ran]
    right = sum(line.predicted is not None and line.predicted.fits != line.cell.published.oom for line in told)
    judged = [line for line in found if table.speed == 1 or not line.cell.calibrate]
    best, rows = table.best_named()
    return [
        table.name if table.speed == 1 else f"{table.name}, GPUs' speed {table.speed:.3f}",
        mean_error(map(table.ratio_error, found)),
        mean_error(line.error for line in judged),
        mean_error(map(table.memory_error, judged)),
        f"{right} of {len(told)}" if told else "–",
        f"{best} of {rows}" if rows else "–",
    ]


def _total(tables: Sequence[Table]) -> list[list[str]]:
    """The line of all tables, as one; nothing where there is one."""
    if len(tables) < 2:
        return []
    found = [(table, line) for table in tables for line in table.lines if line.predicted is not None]
    told = [line for _, line in found if line.cell.published.says_whether_it_ran]
    right = sum(line.predicted is not None and line.predicted.fits != line.cell.published.oom for line in told)
    best, rows = (sum(counts) for counts in zip(*(table.best_named() for table in tables), strict=True))
    return [
        [
            "all",
            mean_error(table.ratio_error(line) for table, line in found),
            mean_error(line.error for _, line in found),
            mean_error(table.memory_error(line) for table, line in found),
            f"{right} of {len(told)}",
            f"{best} of {rows}",
        ]
    ]


def _lines(table: Table) -> list[str]:
    """A line a cell; behind them what could not be predicted."""
    rows, notes = [], []
    for line in table.lines:
        cell, predicted, told = line.cell, line.predicted, line.cell.published
        if predicted is None:
            notes.append(f"- `{cell.id}` is not predicted: {line.reason}")
            continue
        ratio, published = table.ratios(line)
        rows.append(
            [
                cell.row,
                f"`{cell.schedule}`{' *' if cell.calibrate else ''}",
                "out of memory" if told.oom else _number(told.tokens_per_second_per_gpu, ".0f"),
                f"{predicted.tokens_per_gpu:.0f}{'' if predicted.fits else ' (out of memory)'}",
                *(_percent(line.error), _number(published, ".3f"), _number(ratio, ".3f")),
                *(_percent(table.ratio_error(line)), _number(told.memory_gib, ".1f")),
                *(f"{predicted.gib:.1f}", f"{predicted.reserved_gib:.1f}", _percent(table.memory_error(line))),
            ]
        )
        if told.over_best is not None and (best := table.over_best(line)) is not None:
            notes.append(
                f"- {cell.row}, `{cell.schedule}` over the fastest other: published {told.over_best:.2f}, predicted "
                f"{best:.2f} ({_percent(best / told.over_best - 1)})"
            )
    heads = ("row", "schedule", "tokens/s/GPU published", "predicted", "error", "ratio published", "predicted")
    lines = markdown((*heads, "error", "GiB published", "allocated", "reserved", "error"), rows, "ll" + "r" * 10)
    return [*lines, *(["", *notes] if notes else [])]


def _number(value: float | None, how: str) -> str:
    return "" if value is None else format(value, how)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f} %"


WIDTH, HEIGHT, LEFT, BOTTOM = 640, 340, 60, 40
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def picture(tables: Sequence[Table]) -> str:
    """SVG: a mark a cell, published tokens a second and GPU against predicted, both logarithmic; a line where equal."""
    dots = [
        (number, line.cell.published.tokens_per_second_per_gpu, line.predicted.tokens_per_gpu)
        for number, table in enumerate(tables)
        for line in table.lines
        if line.predicted is not None and line.cell.published.tokens_per_second_per_gpu
    ]
    values = [math.log10(value) for _, *pair in dots for value in pair if value] or [0.0, 1.0]
    low, high = min(values) - 0.05, max(values) + 0.05

    def x(value: float) -> float:
        return LEFT + (math.log10(value) - low) / (high - low) * (WIDTH - LEFT - 20)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (math.log10(value) - low) / (high - low) * (HEIGHT - BOTTOM - 20)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tick in (base * 10**power for power in range(7) for base in (1, 2, 5)):
        if low <= math.log10(tick) <= high:
            parts.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - 24}" text-anchor="middle">{tick}</text>')
            parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick}</text>')
    ends = 10**low, 10**high
    parts.append(
        f'<line x1="{x(ends[0]):.1f}" y1="{y(ends[0]):.1f}" x2="{x(ends[1]):.1f}" y2="{y(ends[1]):.1f}" stroke="#999"/>'
    )
    parts += [_mark(number, x(published or 1), y(predicted), 0.7) for number, published, predicted in dots]
    for number, table in enumerate(tables):
        top = 24 + 15 * number
        parts.append(_mark(number, LEFT + 12, top - 4))
        parts.append(f'<text x="{LEFT + 20}" y="{top}">{table.name}</text>')
    parts.append(f'<text x="{WIDTH / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">published tokens/s/GPU</text>')
    parts.append(f'<text x="12" y="{HEIGHT / 2:.0f}" transform="rotate(-90 12 {HEIGHT / 2:.0f})">predicted</text>')
    return "\n".join([*parts, "</svg>", ""])


def _mark(number: int, x: float, y: float, opacity: float = 1) -> str:
    """A table's mark: circles, squares, then triangles, each in all colours."""
    shape, color = divmod(number, len(COLORS))
    look = f'fill="{COLORS[color]}" opacity="{opacity:g}"'
    if shape == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" {look}/>'
    if shape == 1:
        return f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6" {look}/>'
    return f'<path d="M{x:.1f} {y - 4:.1f}l4 7h-8z" {look}/>'
