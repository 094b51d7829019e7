"""Writes what a benchmark has found: standard output, a file of figures, a page's tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helixpipe.common.errors import UserError
from helixpipe.common.flags import option
from helixpipe.common.json_values import parse_json

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks" / "data"


@dataclass(frozen=True)
class Figures:
    """Options of a benchmark that has figures for a program to read."""

    json: str | None = option(None, "Write all figures there.", metavar="FILE")


@dataclass(frozen=True)
class Page:
    """Options of a benchmark that has a document or tables of one."""

    output: str | None = option(
        None, "Write what is printed there, or the tables into their places.", metavar="FILE.md"
    )


@dataclass(frozen=True)
class Outcome:
    """text: for standard output, and for --output unless there are tables. tables: by the marks that enclose them in
    the page of --output. figures: for --json. status: the exit status."""

    text: str = ""
    tables: Mapping[str, Sequence[str]] = field(default_factory=dict)
    figures: Any = None
    status: int = 0

    def deliver(self, options: Any) -> int:
        """Write it where the options say; the exit status."""
        if self.text:
            print(self.text, end="" if self.text.endswith("\n") else "\n")
        if isinstance(options, Figures) and options.json is not None:
            write_figures(options.json, self.figures)
        if isinstance(options, Page) and options.output is not None:
            if self.tables:
                write_tables(options.output, self.tables)
            elif self.text:
                Path(options.output).write_text(self.text.rstrip("\n") + "\n", encoding="utf-8")
        return self.status


def progress(line: str) -> str:
    """The line, once it is on standard error."""
    print(line, file=sys.stderr, flush=True)
    return line


def write_figures(path: str | Path, figures: Any) -> None:
    Path(path).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def read_figures(path: str | Path | None) -> dict[str, Any]:
    """Return what an earlier run has written; nothing where there is no file. Raises UserError for one that it cannot
    be."""
    if path is None or not Path(path).exists():
        return {}
    try:
        figures = parse_json(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"--json {path} is no JSON: {error}.") from None
    if not isinstance(figures, dict):
        raise UserError(f"--json {path} must hold an object, as this benchmark writes it, not {str(figures)[:40]}.")
    return figures


# -------------------------------------------------------------------------------------------------------------- tables


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """A table's lines. align: for each column `l` or `r`."""
    rule = "".join("---|" if each == "l" else "--:|" for each in align)
    return ["|" + "".join(f" {each} |" if each else " |" for each in headers), f"|{rule}", *map(markdown_row, rows)]


def markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write_tables(path: str | Path, tables: Mapping[str, Sequence[str]]) -> None:
    """Into their places in a page. Raises UserError for a page that lacks one."""
    try:
        page = written_into(Path(path).read_text(encoding="utf-8"), tables)
    except ValueError as error:
        raise UserError(f"--output {path}: {error}.") from None
    Path(path).write_text(page, encoding="utf-8")


def written_into(page: str, tables: Mapping[str, Sequence[str]]) -> str:
    """The page with each table in place of the one between its marks, `<!-- bench: NAME -->` and `<!-- end -->`. Raises
    ValueError for a page without them."""
    for name, lines in tables.items():
        before, mark, rest = page.partition(f"<!-- bench: {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not (mark and end):
            raise ValueError(
                f"the page has no place for the table {name}, between `<!-- bench: {name} -->` and `<!-- end -->`"
            )
        page = f"{before}{mark}" + "".join(f"{line}\n" for line in lines) + f"{end}{after}"
    return page
