"""Emulated clusters of 8 to 32 ranks, step time as predicted and as run (Linux, root).

    sudo make bench-emulate ARGS="[--ranks 8] [--schedules 1f1b helix] [--network pairs] [--rate 100mbit] [--json FILE]"

Every rank is a process with the real executor, transport and lowered program; its tensors have the shapes of a narrow
model, and its ops wait until as much time has passed as the simulator says they take. Each rank is a host of
tools/netlab.py, and what it sends to each other host is limited (`--network pairs`, which is what the simulator
assumes), or what it sends and receives in all (`--network adapters`); with `--ranks-per-host` several share one host
and its link. The link is measured with the executor's transport before. A figure is the median of `--steps` steps; all
schedules run in turn. `--json` adds to what the file has.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.report import ROOT, Figures, Outcome, markdown, read_figures, write_tables
from helixpipe.common.errors import UserError
from helixpipe.common.flags import nearest_name, option
from helixpipe.lowering.project import LoweredProgram
from helixpipe.simulate.simulator import Simulation, simulate
from netlab.emulated_costs import CASES, EmulatedCosts, Size
from netlab.emulated_ranks import Emulated, emulated_steps, measured_link, run_ranks
from netlab.hosts import Lab
from netlab.job import parse_rate

PAGE = ROOT / "docs" / "emulation.md"
NETWORKS = ("pairs", "adapters")
GOAL = 0.03


FEWEST = 8
"""Ranks of a line that does not name their number."""


@dataclass(frozen=True)
class Cluster(Figures):
    """The emulated ranks and their network."""

    ranks: int = option(FEWEST, "Ranks.", at_least=2)
    ranks_per_host: int = option(1, "Ranks that share a host and its link.", at_least=1)
    network: str = option("pairs", "What is limited.", choices=NETWORKS)
    rate: str = option("100mbit", "Of a link in each direction.")
    time_scale: float = option(1.0, "Of all op times.", more_than=0)
    steps: int = option(3, "That count.", at_least=1)
    page: bool = option(False, "Write all figures of --json into docs/emulation.md.", flags=("--page",))


@dataclass(frozen=True)
class Options(Cluster):
    schedules: tuple[str, ...] = option((), f"Of {', '.join(map(repr, CASES))} (default: all).", metavar="NAME")
    microbatches: int | None = option(None, "Of a step (default: twice the ranks).", at_least=1)
    layers: int | None = option(None, "Of the model (default: twice the ranks).", at_least=1)


def run(options: Options) -> Outcome:
    """Figures are added to those that --json has."""
    check(options)
    rows = emulate(options)
    known = {**read_figures(options.json), **{key(row): row for row in rows}}
    if options.page:
        write_tables(PAGE, tables(list(known.values())))
    return Outcome("\n".join(table(rows)), figures=known)


def check(options: Options) -> None:
    """Raises UserError in one sentence."""
    for name in options.schedules:
        if name not in CASES:
            near = nearest_name(name, CASES)
            hint = f"did you mean {near!r}? " if near else ""
            raise UserError(f"--schedules {name!r} is unknown: {hint}known are {', '.join(map(repr, CASES))}.")
    check_cluster(options)


def check_cluster(options: Cluster) -> None:
    """Raises UserError in one sentence."""
    if options.ranks % options.ranks_per_host or options.ranks == options.ranks_per_host:
        raise UserError(
            f"--ranks-per-host {options.ranks_per_host} must divide --ranks {options.ranks} into two or more."
        )
    parse_rate(options.rate)


def emulate(options: Options) -> list[dict[str, Any]]:
    """A row for each schedule."""
    twice = 2 * options.ranks
    size = Size(options.ranks, options.microbatches or twice, options.layers or twice, time_scale=options.time_scale)

    def programs(costs: EmulatedCosts) -> dict[str, LoweredProgram]:
        return {name: CASES[name].lowered(size, costs) for name in options.schedules or CASES}

    return emulated_rows(options, size, programs)


def emulated_rows(
    options: Cluster, size: Size, programs_of: Callable[[EmulatedCosts], Mapping[str, LoweredProgram]]
) -> list[dict[str, Any]]:
    """Measure the link, predict and run the programs that are made for it; a row for each."""
    hosts = options.ranks // options.ranks_per_host
    with Lab(hosts, parse_rate(options.rate), pairs=options.network == "pairs") as lab:
        names = [lab.namespace(rank // options.ranks_per_host) for rank in range(options.ranks)]
        far = measured_link([names[0], names[-1]])
        near = measured_link(names[:2]) if options.ranks_per_host > 1 else far
        costs = size.costs(near, far, options.ranks_per_host)
        programs = programs_of(costs)
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


def table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Markdown: the predicted step, the median of the emulated ones over it, and it over the ideal one."""
    lines = []
    for row in rows:
        measured, predicted = statistics.median(row["seconds"]), row["predicted"]
        mark = "" if abs(measured / predicted - 1) <= GOAL else " (!)"
        size = f"{row['time_scale']:g} x, {row['rate']}"
        cells = (f"{predicted:.3f}", f"{measured / predicted:.3f}{mark}", f"{predicted / row['ideal']:.2f}")
        ranks = "" if row["ranks"] == FEWEST else f", {row['ranks']} ranks"
        lines.append((row["schedule"] + ranks, size, *cells))
    heads = ("schedule", "op times, rate", "predicted s", "ratio", "over ideal")
    return markdown(heads, lines, "lrrrr")


def tables(rows: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the tables of the page: `pairs`, at the least rank count; `more`, of more ranks; `adapters`."""
    pairs = [row for row in rows if row["network"] == "pairs"]
    least = min((row["ranks"] for row in pairs), default=0)
    return {
        "pairs": table(row for row in pairs if row["ranks"] == least),
        "more": table(row for row in pairs if row["ranks"] > least),
        "adapters": table(row for row in rows if row["network"] == "adapters"),
    }
