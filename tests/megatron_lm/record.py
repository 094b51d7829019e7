"""Writes what `make test-megatron` has measured into docs/megatron_lm.md.

python -m tests.megatron_lm.record runs/megatron_lm.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.integration.launching import ROOT

PAGE = ROOT / "docs" / "megatron_lm.md"
BEGIN, END = "<!-- megatron: written by make test-megatron MEGATRON_LM=DIR -->\n", "<!-- end of megatron -->\n"


def table(commit: str, rows: list[list[str]]) -> str:
    """Return the table. rows: of a group of flags, a schedule and the losses and norms that it printed.

    A group's first row is NVIDIA's 1F1B.
    """
    lines = [
        f"Commit {commit}:\n\n",
        "| flags | NVIDIA's 1F1B: losses, last norm | equal as printed | other losses |\n|---|---|---|---|\n",
    ]
    for name in dict.fromkeys(group for group, _, _ in rows):
        (_, theirs), *others = [(schedule, steps) for group, schedule, steps in rows if group == name]
        equal = ", ".join(_name(schedule) for schedule, steps in others if steps == theirs)
        unequal = "; ".join(
            f"{schedule.replace('--', '')}: {_steps(steps)}" for schedule, steps in others if steps != theirs
        )
        lines.append(f"| {name} | {_steps(theirs)} | {equal} | {unequal} |\n")
    return "".join(lines)


def _name(schedule: str) -> str:
    return schedule.split()[0] + "-in-chunks" * ("--pipe-sp-splits" in schedule)


def _steps(steps: dict[str, list[str]]) -> str:
    values = list(steps.values())
    return f"{' '.join(f'{float(loss):.6f}' for loss, _ in values)}, {values[-1][1]}"


def main(results: Path) -> None:
    recorded = json.loads(results.read_text())
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(*recorded)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
