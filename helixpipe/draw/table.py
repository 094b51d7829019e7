"""Tables and lists of figures as text, for every report."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence


def figure_lines(figures: Sequence[tuple[str, str, str]], name_width: int = 10) -> list[str]:
    """Return a line for each name, value and note: names to the left, values to the right of their column."""
    width = max(len(value) for _, value, _ in figures)
    return [f"{name:<{name_width}}  {value:>{width}}  {note}".rstrip() for name, value, note in figures]


def right_aligned(headers: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    """Return the header's line and a line a row, every cell right-aligned in its column, which is as wide as its header
    or more.
    """
    columns = [max(width, len(header)) for width, header in zip(widths, headers, strict=True)]
    return ["  ".join(cell.rjust(w) for cell, w in zip(row, columns, strict=True)) for row in (headers, *rows)]


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table for standard output: ruled on a wide terminal, a block a row on a narrow one, aligned text in a
    pipe.
    """
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    if not sys.stdout.isatty():
        aligned = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (headers, *rows)
        )
        return "\n".join(line.rstrip() for line in aligned)
    from rich.console import Console  # a tenth of a second to import: only terminals wait for it
    from rich.table import Table

    console = Console()
    if console.width < sum(widths) + 3 * len(widths) + 1:
        lines = []
        for name, *cells in rows:
            lines.append(name)
            for header, cell in zip(headers[1:], cells, strict=True):
                lines += textwrap.wrap(
                    f"  {header}: {cell}" if cell else "",
                    console.width,
                    subsequent_indent="    ",
                    break_long_words=False,
                    break_on_hyphens=False,
                )
        return "\n".join(lines)
    ruled = Table(*headers)
    for row in rows:
        ruled.add_row(*(cell.replace("[", r"\[") for cell in row))
    with console.capture() as capture:
        console.print(ruled)
    return capture.get().rstrip("\n")
