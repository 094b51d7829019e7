"""The worked example of docs/planning.md, written anew; all figures are the cost model's.

    make bench-plans ARGS="[--output docs/planning.md]"

Runs the command that stands between the page's two marks and puts what it prints, but for the commands to train with,
behind it.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import ROOT, Outcome, Page
from helixpipe.common.errors import UserError
from helixpipe.common.flags import option
from schedules.command import main as helixpipe

MARK = "<!-- bench: plan -->\n"
PROMPT = "    $ helixpipe "


@dataclass(frozen=True)
class Options(Page):
    output: str = option(str(ROOT / "docs" / "planning.md"), "The page (default: docs/planning.md).", metavar="PAGE.md")


def run(options: Options) -> Outcome:
    command = example(Path(options.output).read_text(encoding="utf-8"))
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        if helixpipe(command.split()) != 0:
            raise UserError(f"--output {options.output} shows `helixpipe {command}`, which fails.")
    shown = output.getvalue().partition("\n1. torchrun")[0].rstrip()
    lines = ["", f"{PROMPT}{command}", *(f"    {line}".rstrip() for line in shown.splitlines()), ""]
    return Outcome(tables={"plan": lines})


def example(page: str) -> str:
    """The page's command, without the program's name. Raises UserError for a page without one."""
    for line in page.partition(MARK)[2].splitlines():
        if line.startswith(PROMPT):
            return line.removeprefix(PROMPT)
    raise UserError(f"--output must be a page with `{MARK.strip()}` and a line `{PROMPT.strip()} …` below it.")
