"""`make bench-plans`: the worked example of docs/planning.md, written anew; all figures are the cost model's.

    python benchmarks/plans.py [--output docs/planning.md]

Runs the command that stands between the page's two marks and puts what it prints, but for the commands to train with,
behind it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from pathlib import Path

from schedules.command import main as helixpipe

BEGIN, END = "<!-- example: written by make bench-plans -->\n", "<!-- end of example -->\n"
PROMPT = "    $ helixpipe "


def example(page: str) -> str:
    """The page's command, without the program's name."""
    line = next(line for line in page.partition(BEGIN)[2].splitlines() if line.startswith(PROMPT))
    return line.removeprefix(PROMPT)


def written(page: str) -> str:
    """The page with what its command prints now."""
    command = example(page)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        if helixpipe(command.split()) != 0:
            raise SystemExit(f"helixpipe {command} failed")
    shown = output.getvalue().partition("\n1. torchrun")[0].rstrip()
    lines = [f"{PROMPT}{command}", *(f"    {line}".rstrip() for line in shown.splitlines())]
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("docs/planning.md"), metavar="PAGE.md")
    page = parser.parse_args().output
    page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
