"""`make bench-predict`: step time and memory as `helixpipe simulate` predicts them from a profile, and as measured.

    python benchmarks/predict.py [--steps 20] [--cases 128 512] [--schedules 1f1b helix] [--profiles DIR]
                                 [--json out.json] [--output docs/costs.md] [--ops]

For each case, `helixpipe profile` measures the model on this machine, the simulator predicts steps under several
schedules, and the ranks run them, the schedules in turn, so that what else the machine does hits all alike. A step is
forward and backward (no optimizer). Memory is the most that was kept for a backward at once on each rank, by the
simulator and by saved-tensor hooks. On the CPU a rank has one thread. On GPUs it has one of its own, with NCCL, where
there are enough of them, else the ranks share them over gloo. Where ranks share, a step takes at least all their ops
together over what computes them, and where that is more than the simulator says, that is the prediction.

--profiles: a profile that is there already is used as it is. --json: rows that are in the file already and are not
measured now stay, so that a machine need only be left alone for a part at a time; --steps 0 measures nothing. --output:
a Markdown file with a place for the table of ratios. --ops: what each kind of op was predicted to take, and took.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEEPING = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
"""For glibc: keep what is freed, as torch does on a GPU. Else a step that keeps much takes new memory from the system,
page by page, each time; so measured, a schedule would take the longer the more it keeps."""

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.pages import written_into
from benchmarks.predict_cases import CASES, DEFAULT, WAYS, Case
from helixpipe.common.child import python_command

LEAST_STEPS = 5
MOST_OTHERS = 0.05
"""Of all processors' time, in a step that counts, that processes other than the ranks have taken."""
LEAST_ALONE = 3
"""Steps, for others not to count."""
TABLE = "predict"
"""Of the table's place in a page."""

Rows = dict[str, dict[str, Any]]
"""Of a case, by way."""


def main(words: list[str] | None = None) -> None:
    arguments = parsed(words)
    known = read(arguments.json)
    for name in arguments.cases:
        ways = [way for way in CASES[name].ways if arguments.schedules is None or way in arguments.schedules]
        if arguments.steps and ways:
            known[name] = in_order(name, {**known.get(name, {}), **run_case(name, ways, arguments)})
            if arguments.json:
                arguments.json.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        rows = {way: row for way, row in known.get(name, {}).items() if way in ways}
        report(name, rows, arguments.ops)
    if arguments.output:
        page = arguments.output.read_text(encoding="utf-8")
        arguments.output.write_text(written_into(page, {TABLE: table(known)}), encoding="utf-8")


def parsed(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--steps", type=int, default=20, help=f"of each schedule that count: {LEAST_STEPS} or more")
    parser.add_argument("--cases", nargs="+", default=DEFAULT, choices=CASES)
    parser.add_argument("--schedules", nargs="+", choices=WAYS, help="of each case these, where it has them")
    parser.add_argument("--profiles", type=Path, metavar="DIR", help="keep the profiles there, and use those there are")
    parser.add_argument("--repeats", type=int, default=15, help="of a profile's measurements")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--output", type=Path, metavar="FILE", help="put the table of ratios into this page")
    parser.add_argument("--ops", action="store_true", help="also print each kind of op")
    arguments = parser.parse_args(words)
    if arguments.steps < LEAST_STEPS and (arguments.steps or not arguments.json):
        parser.error(f"--steps must be at least {LEAST_STEPS}, or 0 to read the file of --json, not {arguments.steps}")
    own = {way for name in arguments.cases for way in CASES[name].ways}
    if foreign := [way for way in arguments.schedules or () if way not in own]:
        parser.error(f"--schedules: {', '.join(foreign)} is in none of the cases {', '.join(arguments.cases)}")
    return arguments


def read(path: Path | None) -> dict[str, Rows]:
    """What was measured before."""
    if path is None or not path.exists():
        return {}
    found: dict[str, Rows] = json.loads(path.read_text(encoding="utf-8"))
    return found


def in_order(name: str, rows: Rows) -> Rows:
    """Of ways that the case still has."""
    return {way: rows[way] for way in CASES[name].ways if way in rows}


def run_case(name: str, ways: list[str], arguments: argparse.Namespace) -> Rows:
    """Profile, then ranks that predict and measure."""
    case = CASES[name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent), **KEEPING}
    with tempfile.TemporaryDirectory() as folder:
        profile, output = (arguments.profiles or Path(folder)) / f"profile-{name}.json", Path(folder, "result.json")
        if not profile.exists():
            command = python_command("schedules.command", "profile", "--output", str(profile), *case.flags())
            command += ["--repeats", str(arguments.repeats)]
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        command = python_command("torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks))
        command += [str(HERE / "predict_ranks.py"), name, str(profile), str(output), str(arguments.steps)]
        subprocess.run([*command, "ops" if arguments.ops else "-", ";".join(ways)], check=True, env=environment)
        rows: Rows = json.loads(output.read_text(encoding="utf-8"))
        return rows


def counting(row: Mapping[str, Any]) -> list[int]:
    """The numbers of the steps in which others left the processors alone; all, where these are too few."""
    alone = [number for number, others in enumerate(row["others"]) if others <= MOST_OTHERS]
    return alone if len(alone) >= LEAST_ALONE else list(range(len(row["others"])))


def ratio(row: Mapping[str, Any]) -> float:
    """Measured over predicted step time, the median."""
    return statistics.median(row["seconds"][number] for number in counting(row)) / float(row["predicted"])


def paced(row: Mapping[str, Any]) -> float:
    """The same over the machine's pace, the median of the same rounds."""
    return ratio(row) / statistics.median(row["pace"])


def report(name: str, rows: Rows, ops: bool = False) -> None:
    """Ratios are measured over predicted. pace: of what a rank computes alone, in the same rounds; paced: the step's
    ratio over that. least: of the fastest step, which says more where others use the machine.
    busy: processor time of each rank's computing thread over the predicted time of its ops; all: of all its threads."""
    case = CASES[name]
    print(f"\n{name}: {case.layers} layers, {case.model}, {case.sequence} tokens, {case.dtype}")
    print(f"  micro batch {case.micro}, {case.microbatches} microbatches, p = {case.ranks}")
    print(
        f"  {'schedule':<20} {'predicted s':>11} {'measured s':>11} {'ratio':>6} {'pace':>6} {'paced':>6} {'least':>6}",
        end="",
    )
    print(f" {'quartiles':>13} {'busy':>11} {'all':>11}  {'predicted MB':>14} {'measured MB':>14} {'ratios':>13}")
    for way, row in rows.items():
        predicted, seconds = row["predicted"], row["seconds"]
        low, high = (each / predicted for each in statistics.quantiles(seconds, n=4)[::2])
        busy, processor = (
            [statistics.median(times) for times in zip(*row[key], strict=True)] for key in ("busy", "processor")
        )
        simulated, kept = (" ".join(f"{x / 1e6:.2f}" for x in row[key]) for key in ("predicted_bytes", "bytes"))
        print(f"  {way:<20} {predicted:>11.4f} {statistics.median(seconds):>11.4f} {ratio(row):>6.3f}", end="")
        print(f" {statistics.median(row['pace']):>6.3f} {paced(row):>6.3f}", end="")
        print(f" {min(seconds) / predicted:>6.3f} {f'{low:.3f}–{high:.3f}':>13}", end="")
        print(
            f" {_ratios(busy, row['predicted_busy'], 2):>11} {_ratios(processor, row['predicted_busy'], 2):>11}", end=""
        )
        print(f"  {simulated:>14} {kept:>14} {_ratios(row['bytes'], row['predicted_bytes'], 3):>13}")
        if ops:
            print_ops(row.get("ops", {}))


def print_ops(ops: Mapping[str, Mapping[str, float]]) -> None:
    """A line a kind of op: rank, stage, kind and chunk."""
    for key, each in ops.items():
        predicted, measured = each["predicted"] * 1e3, each["measured"] * 1e3
        share = f"{measured / predicted:.3f}" if predicted else "-"
        print(f"    {key:<12} {each['count']:>3} of {predicted:>9.3f} ms, measured {measured:>9.3f}: {share}")


def _ratios(measured: list[float], predicted: list[float], digits: int) -> str:
    return " ".join(f"{m / p:.{digits}f}" for m, p in zip(measured, predicted, strict=True))


def table(known: Mapping[str, Rows]) -> list[str]:
    """Markdown: measured over predicted step time, in brackets that over the machine's pace; a line a schedule and a
    column a case."""
    cases = [name for name in DEFAULT if known.get(name)]
    ways = [way for way in WAYS if any(way in known[name] for name in cases)]
    heads = " | ".join(_title(CASES[name]) for name in cases)
    lines = [f"| | {heads} |", f"|---|{'--:|' * len(cases)}"]
    for way in ways:
        rows = [known[name].get(way) for name in cases]
        cells = ["–" if row is None else f"{ratio(row):.3f} ({paced(row):.3f})" for row in rows]
        lines.append(f"| `{way}` | {' | '.join(cells)} |")
    return lines


def _title(case: Case) -> str:
    times = f"{case.micro} × " if case.micro > 1 else ""
    return f"{times}{case.sequence} tokens, m = {case.microbatches}"


if __name__ == "__main__":
    main()
