"""The page and the picture of `make reproduce`: predicted beside published, and the errors of each table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.predicted_cells import Predicted
from benchmarks.published_cells import Cell

BASELINE = "1f1b"
HEAD = """# Published figures, predicted

**Simulated, nothing here was measured.** Each line is a cell of a published table: the run's own flags, on the hardware
and with the runtime that its authors had, put through the cost model of [costs.md](costs.md). `make reproduce` writes
this page; `make reproduce CELLS=file.json` prints it for cells of one's own (`benchmarks/published_cells.py` has the
form).

A table has one factor for speed: what its GPUs reach of what the cost model assumes of them, arithmetic and memory
alike, found from the cells marked * alone; and one for memory, published (what torch's allocator had reserved) over
predicted (what is allocated), from the same cells. Networks are not touched. No other number depends on a table, and
none on a cell. Ratios are those to `1f1b` in the same row, of HelixPipe's table to the fastest other schedule.
"""
NOTES = """
## What is assumed of each runtime

- `megatron`: no rank computes while it sends or receives (`--p2p blocking`), an op takes 11 ms beside its kernels where
  messages leave a node and 0.5 ms where none does, ranks with several stages exchange once for a forward and a
  backward, keys and values of chunks are held twice and their gradients added in ten passes, values are copied out of
  QKV's output.
- WeiPipe's model is plain PyTorch: norms and RoPE in float32, a kernel for each function. Its rings pass weights on
  turn by turn, with three buffers to receive and three to send, gradients in bfloat16. FSDP there gathers, computes and
  scatters in turn.
- HelixPipe's is its published variant (`--helix-ship qkv`, one head, all but attention recomputed), unless a cell's
  flags say otherwise.
- SPPO's activations stay where there is room for all, else all that may leave are in the host's memory; InfiniPipe
  recomputes what there is no room for.
- Ethernet of up to 25 Gb/s is used to 94 %, what TCP leaves of a frame; other networks as costs.md says.
- Out of memory: more allocated than the GPU has but for 3 GiB, whatever a schedule that searches would have been told.
"""


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
    """A published table, predicted. speed: see `reproduce`; reserved: published memory over allocated, None: unknown,
    and compared as it is."""

    name: str
    speed: float
    reserved: float | None
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
        return line.predicted.gib * (self.reserved or 1.0) / told - 1


def mean_error(errors: Iterable[float | None]) -> str:
    """Of absolute values, in percent."""
    known = [abs(error) for error in errors if error is not None]
    return f"{100 * sum(known) / len(known):.1f} % ({len(known)})" if known else "–"


def page(tables: Sequence[Table], image: str | None = None) -> str:
    """Markdown."""
    lines = [HEAD]
    if image is not None:
        lines.append(f"![predicted over published, a dot a cell]({image})\n")
    lines.append(
        "| table | GPUs' speed | published / allocated memory | ratio: mean error (cells) | tokens/s | memory "
        "| out of memory |\n|---|--:|--:|--:|--:|--:|--:|"
    )
    for table in tables:
        lines.append(_summary(table))
    for table in tables:
        lines += ["", f"## {table.name}", "", *_lines(table)]
    return "\n".join([*lines, NOTES])


def _summary(table: Table) -> str:
    found = [line for line in table.lines if line.predicted is not None]
    told = [line for line in found if line.cell.published.says_whether_it_ran]
    right = sum(line.predicted is not None and line.predicted.fits != line.cell.published.oom for line in told)
    reserved = "–" if table.reserved is None else f"{table.reserved:.2f}"
    judged = [line for line in found if not line.cell.calibrate]
    return (
        f"| {table.name} | {table.speed:.3f} | {reserved} | {mean_error(map(table.ratio_error, found))} | "
        f"{mean_error(line.error for line in judged)} | {mean_error(map(table.memory_error, judged))} | "
        f"{f'{right} of {len(told)} right' if told else '–'} |"
    )


def _lines(table: Table) -> list[str]:
    """A line a cell; behind them what could not be predicted."""
    lines = [
        "| row | schedule | tokens/s/GPU published | predicted | error | ratio published | predicted | error | "
        "GiB published | allocated | error |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    notes = []
    for line in table.lines:
        cell, predicted, told = line.cell, line.predicted, line.cell.published
        if predicted is None:
            notes.append(f"- `{cell.id}` is not predicted: {line.reason}")
            continue
        ratio, published = table.ratios(line)
        throughput = "out of memory" if told.oom else _number(told.tokens_per_second_per_gpu, ".0f")
        fits = "" if predicted.fits else " (out of memory)"
        lines.append(
            f"| {cell.row} | `{cell.schedule}`{' *' if cell.calibrate else ''} | {throughput} | "
            f"{predicted.tokens_per_gpu:.0f}{fits} | {_percent(line.error)} | {_number(published, '.3f')} | "
            f"{_number(ratio, '.3f')} | {_percent(table.ratio_error(line))} | {_number(told.memory_gib, '.1f')} | "
            f"{predicted.gib:.1f} | {_percent(table.memory_error(line))} |"
        )
        if told.over_best is not None and (best := table.over_best(line)) is not None:
            notes.append(
                f"- {cell.row}, `{cell.schedule}` over the fastest other: published {told.over_best:.2f}, predicted "
                f"{best:.2f} ({_percent(best / told.over_best - 1)})"
            )
    return [*lines, *(["", *notes] if notes else [])]


def _number(value: float | None, how: str) -> str:
    return "" if value is None else format(value, how)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f} %"


WIDTH, HEIGHT, LEFT, BOTTOM = 640, 340, 60, 40
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def picture(tables: Sequence[Table]) -> str:
    """SVG: a dot a cell, published tokens a second and GPU against predicted, both logarithmic; a line where equal."""
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
    for number, published, predicted in dots:
        color = COLORS[number % len(COLORS)]
        parts.append(
            f'<circle cx="{x(published or 1):.1f}" cy="{y(predicted):.1f}" r="3.5" fill="{color}" opacity="0.7"/>'
        )
    for number, table in enumerate(tables):
        color, top = COLORS[number % len(COLORS)], 24 + 15 * number
        parts.append(f'<circle cx="{LEFT + 12}" cy="{top - 4}" r="3.5" fill="{color}"/>')
        parts.append(f'<text x="{LEFT + 20}" y="{top}">{table.name}</text>')
    parts.append(f'<text x="{WIDTH / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">published tokens/s/GPU</text>')
    parts.append(f'<text x="12" y="{HEIGHT / 2:.0f}" transform="rotate(-90 12 {HEIGHT / 2:.0f})">predicted</text>')
    return "\n".join([*parts, "</svg>", ""])
