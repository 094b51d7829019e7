"""Keeps what `helixpipe simulate` and `helixpipe memory` print in figures.json for the commands of cases.txt.

    python -m tests.pins.record          # record commands that are new in cases.txt, forget those no longer there
    python -m tests.pins.record --all    # record every command again: only where a figure was wrong, and is explained

Only the command's entry point is imported, so that the figures outlast moves of what lies under it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
from pathlib import Path
from typing import Any

from schedules.command import main

HERE = Path(__file__).resolve().parent
CASES, FIGURES = HERE / "cases.txt", HERE / "figures.json"

KEYS = (
    *("makespan", "ideal", "bubble_time", "bubble_time_without_flush", "busy", "messages"),
    *("peak_activation", "peak_activation_unit", "makespan_recomputing_late", "chunk_lengths", "chunk_times"),
    "chunk_shares",
    *("memory", "memory_limit", "fits"),
)
STEP_KEYS = ("step_time", "reduction_time", "optimizer_time", "memory", "memory_limit", "fits")
"""Of `step`, which `simulate` prints beside a model."""

Result = dict[str, Any]


def commands() -> list[list[str]]:
    """The arguments of each line of cases.txt, without --json and --order."""
    lines = CASES.read_text(encoding="utf-8").splitlines()
    return [line.split() for line in lines if line and not line.startswith("#")]


def printed(command: list[str]) -> Any:
    """Return what the command prints as JSON. Names of files are taken in this folder. Raises AssertionError if it
    fails."""
    arguments = [str(HERE / word) if word.endswith((".csv", ".json")) else word for word in command]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*arguments, "--json"])
    if code != 0:
        raise AssertionError(f"helixpipe {' '.join(command)} ended with {code}: {err.getvalue().strip()}")
    return json.loads(out.getvalue())


def result(command: list[str]) -> Result:
    """The figures of one command that are pinned; `order` is a digest of the program's cells."""
    content = printed([*command, "--order"] if command[0] == "simulate" else command)
    pinned = {key: content[key] for key in KEYS if key in content}
    if "step" in content:
        pinned["step"] = {key: content["step"][key] for key in STEP_KEYS}
    if "order" in content:
        cells = "\n".join(",".join(row) for row in content["order"])
        pinned["order"] = hashlib.sha256(cells.encode()).hexdigest()[:16]
    return pinned


def load() -> list[dict[str, Any]]:
    """The recorded cases, each a `command` and its `result`."""
    cases: list[dict[str, Any]] = json.loads(FIGURES.read_text(encoding="utf-8"))
    return cases


def record(again: bool) -> int:
    """Write figures.json, in the order of cases.txt. again: of recorded commands too. Returns how many commands ran."""
    known = {} if again or not FIGURES.exists() else {tuple(case["command"]): case["result"] for case in load()}
    cases = [
        {"command": command, "result": known[tuple(command)] if tuple(command) in known else result(command)}
        for command in commands()
    ]
    lines = ",\n".join(json.dumps(case) for case in cases)
    FIGURES.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return sum(tuple(case["command"]) not in known for case in cases)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="also record again what is recorded")
    print(f"recorded {record(parser.parse_args().all)} commands in {FIGURES.name}")
