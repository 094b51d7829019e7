"""Step time and memory as `helixpipe simulate` predicts them from a profile, and as measured.

    make bench-predict ARGS="[--steps 20] [--cases 128 512] [--schedules 1f1b helix] [--profiles DIR]
                             [--json out.json] [--output docs/costs.md] [--ops]"

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

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.predict_cases import CASES, DEFAULT, WAYS, Case
from benchmarks.ranks import on_ranks, run_module
from benchmarks.report import Figures, Outcome, Page, markdown, read_figures, write_figures
from benchmarks.rounds import quartiles
from helixpipe.common.errors import UserError
from helixpipe.common.flags import option
from helixpipe.draw.table import right_aligned

KEEPING = MappingProxyType(
    {
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TOP_PAD_": str(1 << 26),
    }
)
"""For glibc: keep what is freed, as torch does on a GPU. Else a step that keeps much takes new memory from the system,
page by page, each time; so measured, a schedule would take the longer the more it keeps."""

LEAST_STEPS = 5
MOST_OTHERS = 0.05
"""Of all processors' time, in a step that counts, that processes other than the ranks have taken."""
LEAST_ALONE = 3
"""Steps, for others not to count."""
TABLE = "predict"
"""Of the table's place in a page."""

Rows = dict[str, dict[str, Any]]
"""Of a case, by way."""


@dataclass(frozen=True)
class Options(Figures, Page):
    steps: int = option(
        20, f"Of each schedule that count: {LEAST_STEPS} or more, or 0 to read --json alone.", at_least=0
    )
    cases: tuple[str, ...] = option(DEFAULT, "Which models.", choices=tuple(CASES))
    schedules: tuple[str, ...] = option((), "Of each case these, where it has them.", choices=tuple(WAYS))
    profiles: str | None = option(None, "Keep the profiles there, and use those there are.", metavar="DIR")
    repeats: int = option(15, "Of a profile's measurements.", at_least=1)
    ops: bool = option(False, "Also print each kind of op.", flags=("--ops",))


def run(options: Options) -> Outcome:
    check(options)
    known: dict[str, Rows] = read_figures(options.json)
    for name in options.cases:
        ways = [way for way in CASES[name].ways if not options.schedules or way in options.schedules]
        if options.steps and ways:
            known[name] = in_order(name, {**known.get(name, {}), **run_case(name, ways, options)})
            if options.json:
                write_figures(options.json, known)
        report(name, {way: row for way, row in known.get(name, {}).items() if way in ways}, options.ops)
    return Outcome(tables={TABLE: table(known)}, figures=known)


def check(options: Options) -> None:
    """Raises UserError in one sentence."""
    if options.steps < LEAST_STEPS and (options.steps or not options.json):
        raise UserError(
            f"--steps must be at least {LEAST_STEPS}, or 0 to read the file of --json, not {options.steps}."
        )
    own = {way for name in options.cases for way in CASES[name].ways}
    if foreign := [way for way in options.schedules if way not in own]:
        raise UserError(f"--schedules: {', '.join(foreign)} is in none of the cases {', '.join(options.cases)}.")


def in_order(name: str, rows: Rows) -> Rows:
    """Of ways that the case still has."""
    return {way: rows[way] for way in CASES[name].ways if way in rows}


def run_case(name: str, ways: Sequence[str], options: Options) -> Rows:
    """Profile, then ranks that predict and measure."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(options.profiles or folder, f"profile-{name}.json").resolve()
        if not profile.exists():
            flags = (*case.flags(), "--repeats", str(options.repeats))
            run_module("schedules.command", "profile", "--output", str(profile), *flags, environment=KEEPING)
        call = ("benchmarks.predict_ranks:measure", name, str(profile), options.steps, options.ops, ways)
        rows: Rows = on_ranks(*call, ranks=case.ranks, environment=KEEPING)
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
    heads = ["schedule", "predicted s", "measured s", "ratio", "pace", "paced", "least", "quartiles", "busy", "all"]
    heads += ["predicted MB", "measured MB", "ratios"]
    head, *lines = right_aligned(heads, [_cells(way, row) for way, row in rows.items()], [20] + [0] * 12)
    print(head)
    for line, row in zip(lines, rows.values(), strict=True):
        print(line)
        if ops:
            print_ops(row.get("ops", {}))


def _cells(way: str, row: Mapping[str, Any]) -> list[str]:
    predicted, seconds = row["predicted"], row["seconds"]
    times = (ratio(row), statistics.median(row["pace"]), paced(row), min(seconds) / predicted)
    busy, processor = (
        [statistics.median(times) for times in zip(*row[key], strict=True)] for key in ("busy", "processor")
    )
    return [
        way,
        f"{predicted:.4f}",
        f"{statistics.median(seconds):.4f}",
        *(f"{each:.3f}" for each in times),
        "–".join(f"{each / predicted:.3f}" for each in quartiles(seconds)),
        *(_ratios(each, row["predicted_busy"], 2) for each in (busy, processor)),
        *(" ".join(f"{x / 1e6:.2f}" for x in row[key]) for key in ("predicted_bytes", "bytes")),
        _ratios(row["bytes"], row["predicted_bytes"], 3),
    ]


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
    lines = []
    for way in WAYS:
        rows = [known[name].get(way) for name in cases]
        if any(rows):
            cells = ["–" if row is None else f"{ratio(row):.3f} ({paced(row):.3f})" for row in rows]
            lines.append([f"`{way}`", *cells])
    return markdown(["", *(_title(CASES[name]) for name in cases)], lines, "l" + "r" * len(cases))


def _title(case: Case) -> str:
    times = f"{case.micro} × " if case.micro > 1 else ""
    return f"{times}{case.sequence} tokens, m = {case.microbatches}"
