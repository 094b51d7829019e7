"""`make bench-setups`: HelixPipe's published setups, simulated under 1f1b, zb1p, adapipe and helix.

    python benchmarks/setups.py [--hardware h20] [--models 7b] [--tokens 32 128] [--nodes 8] [--output table.md]

Prints two Markdown tables, which with `--output docs/helixpipe_setups.md` are that page. The first has a line for each
setup: tensor parallel 8 with sequence parallelism, one pipeline rank a node, microbatches of one sequence, 2p of them a
step. Every schedule has the recomputation with which it fits into the memory and is fastest. The second says for the
setups with a published gain where the time goes. All figures are simulated by the cost model (docs/costs.md), whose
assumptions are printed below the tables.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from benchmarks.setup_list import BASELINES, GPUS, MARKS, OURS, PAPER, SHIPPED, SLICED, SPREAD, Setting, Setup
from helixpipe.cli.model_report import report
from helixpipe.common.collector import collector_paused
from helixpipe.common.errors import ScheduleError
from helixpipe.costs.hardware import GIB, HARDWARE, RESERVED_MEMORY
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.lower import lower
from helixpipe.program.program import Program
from helixpipe.simulate.simulator import Simulation, simulate
from schedules import Shape, build

MODELS, TOKENS, NODES = ("1.3b", "3b", "7b"), (32, 64, 96, 128), (2, 4, 8)


@dataclass(frozen=True)
class Result:
    """One setting of one setup. Seconds a step; `work` without what is recomputed, both as means over the ranks.

    idle: means over the ranks, with messages that take no time; waiting: what messages add to that; both are not
    numbers where nothing is published. peak, limit: bytes of the fullest GPU, and of those that may be used.
    """

    setting: Setting
    tokens_per_gpu: float
    step: float
    work: float
    again: float
    idle: float
    waiting: float
    peak: float
    limit: float

    @property
    def fits(self) -> bool:
        return self.peak <= self.limit


def run(setup: Setup, setting: Setting) -> Result | None:
    """Simulate a step; None where the schedule itself finds that nothing fits."""
    plan = setup.plan(setting.chunk_size)
    shape = Shape(
        plan.ranks,
        plan.microbatches,
        plan.layers,
        costs=plan.costs,
        recompute=setting.recompute,
        memory_limit=plan.limit,
    )
    try:
        program = build(setting.schedule, shape, setting.options)
    except ScheduleError:
        return None
    simulation = simulate(lower(program, plan.costs), plan.costs, "s")
    step = report(simulation, plan)
    work = _work(program, plan.costs)
    idle = math.nan if setup.published is None else _free_of_messages(simulation, plan.costs) - simulation.ideal
    return Result(
        setting,
        step.tokens_per_gpu,
        step.step_time,
        work,
        max(simulation.ideal - work, 0.0),  # without the rounding of sums
        idle,
        simulation.bubble_time - idle,
        step.peak,
        step.limit,
    )


def _work(program: Program, costs: ModelCosts) -> float:
    """Seconds of a rank's ops, on average, if nothing were computed twice."""
    whole = replace(costs, layout=replace(costs.layout, mlp_chunk=0))
    once = replace(program, stages=tuple(replace(stage, recompute=()) for stage in program.stages))
    bound = BoundCosts(once, whole)
    return sum(bound.op_time(op) for rank in program.ranks for op in rank if op.kind != "R") / program.num_ranks


def _free_of_messages(simulation: Simulation, costs: ModelCosts) -> float:
    """The makespan of the same order with a network that carries any message in an instant."""
    instant = replace(costs, hardware=replace(costs.hardware, network=math.inf))
    return simulate(simulation.lowered, instant).makespan


def fastest(results: Iterable[Result | None]) -> Result | None:
    """Of those that fit the fastest, else the one that needs the least memory."""
    found = [result for result in results if result is not None]
    fitting = [result for result in found if result.fits]
    if fitting:
        return max(fitting, key=lambda result: result.tokens_per_gpu)
    return min(found, key=lambda result: result.peak, default=None)


@dataclass(frozen=True)
class Row:
    """All results of one setup."""

    setup: Setup
    baselines: Mapping[str, Result | None]
    paper: Result | None
    shipped: Result | None
    spread: Result | None
    ours: Result | None
    best: Result | None

    @property
    def baseline(self) -> Result | None:
        """The fastest of the baselines that fit."""
        found = fastest(self.baselines.values())
        return found if found is not None and found.fits else None

    def gain(self, result: Result | None) -> float:
        """Throughput over the best baseline's; not a number where there is none."""
        if result is None or self.baseline is None:
            return math.nan
        return result.tokens_per_gpu / self.baseline.tokens_per_gpu


@collector_paused()
def row(setup: Setup) -> Row:
    """Simulate all settings of a setup."""
    ours = [run(setup, setting) for setting in OURS]
    return Row(
        setup,
        {name: fastest(run(setup, setting) for setting in settings) for name, settings in BASELINES.items()},
        run(setup, PAPER),
        run(setup, SHIPPED),
        run(setup, SPREAD),
        fastest(ours),
        fastest([*ours, run(setup, SLICED)]),
    )


# -------------------------------------------------------------------------------------------------------------- tables


def throughput_table(rows: Sequence[Row]) -> list[str]:
    """A line a setup: tokens a second and GPU, and of helix the ratio to the best baseline."""
    lines = [
        "| GPUs | model | tokens | nodes | 1f1b | zb1p | adapipe | paper's helix | helix | helix, best | published |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for each in rows:
        setup = each.setup
        cells = [setup.hardware, setup.model, f"{setup.tokens}k", str(setup.nodes)]
        cells += [_cell(result) for result in each.baselines.values()]
        cells += [_cell(result, each.gain(result)) for result in (each.paper, each.ours, each.best)]
        cells.append(f"{setup.published:.2f}" if setup.published else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(result: Result | None, gain: float | None = None) -> str:
    if result is None:
        return "too large"
    ratio = "" if gain is None or math.isnan(gain) else f" **{gain:.2f}**"
    too_large = "" if result.fits else f", {result.peak / GIB:.0f} GiB!"
    return f"{result.tokens_per_gpu:.0f}{ratio} {result.setting.marks}{too_large}"


def breakdown_table(rows: Sequence[Row]) -> list[str]:
    """For each published gain, a line a schedule: where the seconds of a step go."""
    lines = [
        "| setup | schedule | step | work | recomputed | idle | for messages | gain | memory, GiB |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for each in rows:
        name = f"{each.setup.hardware}, {each.setup.model}, published {each.setup.published:.2f}"
        named = [
            *each.baselines.items(),
            ("paper's helix", each.paper),
            ("+ ships attention", each.shipped),
            ("+ spread head", each.spread),
            ("+ recomputes as little as fits: helix", each.ours),
            ("helix, best", each.best),
        ]
        for label, result in named:
            if result is not None:
                seconds = (result.step, result.work, result.again, result.idle, result.waiting)
                cells = [name, f"{label} ({result.setting.marks})", *(f"{value:.1f}" for value in seconds)]
                cells += [f"{each.gain(result):.2f}", f"{result.peak / GIB:.0f}{'' if result.fits else '!'}"]
                lines.append(f"| {' | '.join(cells)} |")
                name = ""
    return lines


def assumptions(names: Iterable[str], network: float | None) -> list[str]:
    """What the figures rest on. network: the share of it that is reached, if not the hardware's."""
    lines = []
    for name in names:
        hardware, share = HARDWARE[name], HARDWARE[name].efficiency
        usable, whole = (hardware.memory - RESERVED_MEMORY) / GIB, hardware.memory / GIB
        lines.append(
            f"- {name}: {share.matmul:.0%} of {hardware.flops / 1e12:.0f} TFLOP/s in matrix products, "
            f"{share.attention:.0%} in attention, {share.memory:.0%} of memory bandwidth and of NVLink, "
            f"{network or share.network:.0%} of the network's {hardware.network / 1e9:.0f} GB/s a node, of which each "
            f"of 8 GPUs has an eighth; {usable:.0f} of {whole:.0f} GiB usable"
        )
    return lines


def text(rows: Sequence[Row]) -> str:
    """Both tables and the assumptions, as Markdown."""
    setups = [each.setup for each in rows]
    published = [each for each in rows if each.setup.published]
    parts = [
        ["# HelixPipe's published setups, simulated"],
        ["Written by `make bench-setups`; [helixpipe.md](helixpipe.md) says what follows from it."],
        ["Simulated, not measured. Tokens a second and GPU; in bold the ratio to the best of 1f1b, zb1p and adapipe."],
        throughput_table(rows),
        [MARKS, "`GiB!`: does not fit, and is no baseline."],
    ]
    if published:
        parts += [["Seconds of a step, means over the ranks (simulated):"], breakdown_table(published)]
    parts += [
        ["Assumed:"],
        assumptions(dict.fromkeys(setup.hardware for setup in setups), setups[0].network_efficiency),
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hardware", nargs="+", default=GPUS, choices=GPUS)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, metavar="K", help="thousands of tokens")
    parser.add_argument("--nodes", nargs="+", type=int, default=NODES, choices=NODES)
    parser.add_argument("--output", metavar="FILE.md", help="write the tables there, too")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    parser.add_argument("--network-efficiency", type=float, metavar="X", help="share of the network that is reached")
    arguments = parser.parse_args()
    if not 0 < (arguments.network_efficiency or 1.0) <= 1:
        parser.error("--network-efficiency must be above 0 and at most 1")
    if min(arguments.tokens) < 1:
        parser.error("--tokens must be at least 1")
    axes = (arguments.hardware, arguments.models, arguments.tokens, arguments.nodes, [arguments.network_efficiency])
    setups = [Setup(*each) for each in product(*axes)]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        written = text(list(pool.map(row, setups)))
    print(written, end="")
    if arguments.output:
        Path(arguments.output).write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
