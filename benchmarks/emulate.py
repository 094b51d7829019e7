"""`make bench-emulate`: emulated clusters of 8 to 32 ranks, step time as predicted and as run (Linux, root).

    python benchmarks/emulate.py [--ranks 8] [--schedules 1f1b helix] [--network pairs] [--rate 100mbit] [--json FILE]

Every rank is a process with the real executor, transport and lowered program; its tensors have the shapes of a narrow
model, and its ops wait until as much time has passed as the simulator says they take. Each rank is a host of
tools/netlab.py, and what it sends to each other host is limited (`--network pairs`, which is what the simulator
assumes), or what it sends and receives in all (`--network adapters`); with `--ranks-per-host` several share one host
and its link. The link is measured with the executor's transport before. A figure is the median of `--steps` steps; all
schedules run in turn. `--json` adds to what the file has.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.emulated_costs import CASES, Size
from benchmarks.emulated_ranks import Emulated, emulated_steps, measured_link, run_ranks
from benchmarks.pages import written_into
from helixpipe.common.errors import UserError
from helixpipe.common.flags import nearest_name
from helixpipe.simulate.simulator import Simulation, simulate
from tools.hosts import Lab
from tools.netlab import parse_rate

PAGE = ROOT / "docs" / "emulation.md"
NETWORKS = ("pairs", "adapters")
GOAL = 0.03


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", metavar="NAME", help=f"of {', '.join(map(repr, CASES))}")
    parser.add_argument("--ranks", type=int, default=8, help="default: 8")
    parser.add_argument("--microbatches", type=int, help="default: twice the ranks")
    parser.add_argument("--layers", type=int, help="default: twice the ranks")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="default: 1")
    parser.add_argument("--network", default="pairs", choices=NETWORKS, help="what is limited (default: pairs)")
    parser.add_argument("--rate", default="100mbit", help="of a link in each direction (default: 100mbit)")
    parser.add_argument("--time-scale", type=float, default=1.0, help="of all op times (default: 1)")
    parser.add_argument("--steps", type=int, default=3, help="that count (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add all figures to those there")
    parser.add_argument("--page", action="store_true", help="write all figures of --json into docs/emulation.md")
    options = parser.parse_args(arguments)
    try:
        check(options)
        rows = emulate(options)
    except UserError as error:
        print(f"emulate.py: {error}", file=sys.stderr)
        return 2
    report(rows)
    if options.json is not None:
        known = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else {}
        known |= {key(row): row for row in rows}
        options.json.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        rows = list(known.values())
    if options.page:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    return 0


def check(options: argparse.Namespace) -> None:
    """Fill in what was left out. Raises UserError in one sentence."""
    options.schedules = options.schedules or list(CASES)
    for name in options.schedules:
        if name not in CASES:
            near = nearest_name(name, CASES)
            hint = f"did you mean {near!r}? " if near else ""
            raise UserError(f"--schedules {name!r} is unknown: {hint}known are {', '.join(map(repr, CASES))}.")
    for flag, least in (("ranks", 2), ("ranks_per_host", 1), ("steps", 1)):
        if (value := getattr(options, flag)) < least:
            raise UserError(f"--{flag.replace('_', '-')} {value} must be at least {least}.")
    if options.ranks % options.ranks_per_host or options.ranks == options.ranks_per_host:
        raise UserError(
            f"--ranks-per-host {options.ranks_per_host} must divide --ranks {options.ranks} into two or more."
        )
    if not options.time_scale > 0:
        raise UserError(f"--time-scale {options.time_scale} must be above 0.")
    options.microbatches = options.microbatches or 2 * options.ranks
    options.layers = options.layers or 2 * options.ranks
    options.rate_bits = parse_rate(options.rate)


def emulate(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each schedule."""
    size = Size(options.ranks, options.microbatches, options.layers, time_scale=options.time_scale)
    hosts = options.ranks // options.ranks_per_host
    with Lab(hosts, options.rate_bits, pairs=options.network == "pairs") as lab:
        names = [lab.namespace(rank // options.ranks_per_host) for rank in range(options.ranks)]
        far = measured_link([names[0], names[-1]])
        near = measured_link(names[:2]) if options.ranks_per_host > 1 else far
        costs = size.costs(near, far, options.ranks_per_host)
        programs = {name: CASES[name].lowered(size, costs) for name in options.schedules}
        simulations = {name: simulate(lowered, costs, "s") for name, lowered in programs.items()}
        expected = sum(each.makespan for each in simulations.values()) * (options.steps + 1)
        results = run_ranks(emulated_steps, names, 60 + 3 * expected, programs, size, costs, options.steps)
    where = {
        "ranks": options.ranks, "microbatches": size.microbatches, "layers": size.layers, "network": options.network,
        "rate": options.rate, "ranks_per_host": options.ranks_per_host, "time_scale": size.time_scale,
        "link": vars(far),
    }  # fmt: skip
    return [
        {"schedule": name, **where, **row_of(simulations[name], [result[name] for result in results])}
        for name in programs
    ]


def row_of(simulation: Simulation, emulated: Sequence[Emulated]) -> dict[str, Any]:
    """ops_late: what ops took beyond their time, the mean over all."""
    predicted = {(event.rank, event.op): event.end - event.start for event in simulation.timeline.ops}
    beyond = [
        end - start - predicted[rank, op] for rank, each in enumerate(emulated) for op, start, end in each.record.ops
    ]
    return {
        "predicted": simulation.makespan,
        "seconds": emulated[0].seconds,
        "ideal": simulation.ideal,
        "ops_late": statistics.mean(beyond),
    }


def key(row: dict[str, Any]) -> str:
    return " ".join(str(row[name]) for name in ("schedule", "ranks", "network", "rate", "ranks_per_host", "time_scale"))


def report(rows: Iterable[dict[str, Any]]) -> None:
    head, *lines = table(rows)
    print("\n".join((head, *lines)), flush=True)


def table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Markdown: predicted step, median of the emulated ones, their ratio, and the ratios of the fastest and slowest."""
    lines = ["| schedule | ranks | op times, rate | predicted s | emulated s | ratio | fastest, slowest | over ideal |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        measured, predicted = statistics.median(row["seconds"]), row["predicted"]
        low, high = min(row["seconds"]) / predicted, max(row["seconds"]) / predicted
        mark = "" if abs(measured / predicted - 1) <= GOAL else " (!)"
        size = f"{row['time_scale']:g} x, {row['rate']}"
        lines.append(
            f"| {row['schedule']} | {row['ranks']} | {size} | {predicted:.3f} | {measured:.3f} | "
            f"{measured / predicted:.3f}{mark} | {low:.3f}, {high:.3f} | {predicted / row['ideal']:.2f} |"
        )
    return lines


def written(page: str, rows: Sequence[dict[str, Any]]) -> str:
    """The page with its tables of the rows: `pairs`, at the least rank count; `more`, of more ranks; `adapters`."""
    pairs = [row for row in rows if row["network"] == "pairs"]
    least = min((row["ranks"] for row in pairs), default=0)
    tables = {
        "pairs": [row for row in pairs if row["ranks"] == least],
        "more": [row for row in pairs if row["ranks"] > least],
        "adapters": [row for row in rows if row["network"] == "adapters"],
    }
    return written_into(page, {name: table(own) for name, own in tables.items()})


if __name__ == "__main__":
    sys.exit(main())
