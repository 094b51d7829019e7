"""HelixPipe's published setups, simulated under 1f1b, zb1p, adapipe and helix.

    make bench-setups ARGS="[--hardware h20] [--models 7b] [--tokens 32 128] [--nodes 8] [--output table.md]"

Prints two Markdown tables; `--output docs/helixpipe_setups.md` writes what the first says of each model, and the
second for the largest, into that page. The first has a line for each setup: tensor parallel 8 with sequence
parallelism, one pipeline rank a node, microbatches of one sequence, 2p of them a step. Every schedule has the
recomputation with which it fits into the memory and is fastest. The second says for the setups with a published gain
where the time goes. The setups are in benchmarks/data/helixpipe.toml; the assumptions of the cost model
(docs/costs.md) are printed below the tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Literal

from benchmarks import data
from benchmarks.report import Outcome, Page, markdown, page
from benchmarks.simulated import (
    Granularity,
    Jobs,
    Result,
    Scenario,
    Setting,
    assumed,
    fastest,
    in_processes,
    result_of,
    simulated,
)
from helixpipe.cli.model import ModelOnCluster
from helixpipe.common.collector import collector_paused
from helixpipe.common.errors import ScheduleError
from helixpipe.common.flags import option
from helixpipe.costs.hardware import GIB
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.lowering.bound import BoundCosts
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.program.program import Program
from helixpipe.simulate.simulator import Simulation, simulate
from schedules.helix import HelixOptions

FILE = "helixpipe.toml"
GPUS, MODELS, TOKENS, NODES = ("h20", "a800"), ("1.3b", "3b", "7b"), (32, 64, 96, 128), (2, 4, 8)
BASELINES = ("1f1b", "zb1p", "adapipe")
PAPER, OURS, BEST = "paper's helix", "+ recomputes as little as fits: helix", "helix, best"


@dataclass(frozen=True)
class Options(Jobs, Page):
    hardware: tuple[str, ...] = option(GPUS, "GPUs.", choices=GPUS)
    models: tuple[str, ...] = option(MODELS, "Models.", choices=MODELS)
    tokens: tuple[int, ...] = option(TOKENS, "Thousands of tokens of a sequence.", metavar="K", at_least=1)
    nodes: tuple[int, ...] = option(NODES, "Nodes.", choices=NODES)
    network_efficiency: float | None = option(None, "Share of the network that is reached.", more_than=0, at_most=1)


@dataclass(frozen=True)
class Published:
    """The measured gain of a setup."""

    hardware: str
    model: str
    tokens: int
    nodes: int
    over_best: float


@dataclass(frozen=True)
class SettingRow:
    """A setting as the file has it; its column counts the best of its settings."""

    column: str
    schedule: str
    mark: str
    recompute: Granularity | None = None
    folds: int | None = None
    ship: Literal["qkv", "attention"] = "attention"
    spread_head: bool = False
    chunk_size: int = 0

    @property
    def setting(self) -> Setting:
        helix = None
        if self.folds is not None:
            helix = HelixOptions(helix_folds=self.folds, helix_ship=self.ship, helix_spread_head=self.spread_head)
        return Setting(self.schedule, self.mark, RecomputeOptions(self.recompute), helix, self.chunk_size)


@dataclass(frozen=True, kw_only=True)
class Case(Scenario):
    """name: of the model in the tables. published: gain over the best baseline; None: none is. reached: the share of
    the network, in place of the hardware's; NVLink stays as it is."""

    name: str
    published: float | None
    reached: float | None = None

    def cluster(self, chunk_size: int) -> ModelOnCluster:
        plan = self.plan(chunk_size=chunk_size)
        if self.reached is None:
            return plan
        hardware = plan.costs.hardware
        network = hardware.network * self.reached / hardware.efficiency.network
        return replace(plan, costs=replace(plan.costs, hardware=replace(hardware, network=network)))


@dataclass(frozen=True)
class Timed(Result):
    """With the parts of a step, in seconds, means over the ranks: work: without what is recomputed; again: that; idle:
    with messages that take no time; waiting: what messages add to that. Not numbers where nothing is published."""

    work: float
    again: float
    idle: float
    waiting: float


Row = tuple[Case, Mapping[str, Timed | None]]
"""A setup, and what came of its columns."""


@collector_paused()
def row(case: Case) -> Row:
    """Simulate all settings of a setup."""
    columns: dict[str, list[Timed | None]] = {}
    for each in data.rows(FILE, "setting", SettingRow):
        columns.setdefault(each.column, []).append(run_setting(case, each.setting))
    columns[BEST] += columns[OURS]
    return case, {name: fastest(found) for name, found in columns.items()}  # type: ignore[misc]


def run_setting(case: Case, setting: Setting) -> Timed | None:
    """Simulate a step; None where the schedule itself finds that nothing fits."""
    plan = case.cluster(setting.chunk_size)
    try:
        program = setting.program(plan)
    except ScheduleError:
        return None
    step = simulated(plan, program)
    simulation, work = step.simulation, _work(program, plan.costs)
    idle = math.nan if case.published is None else _free_of_messages(simulation, plan.costs) - simulation.ideal
    again = max(simulation.ideal - work, 0.0)  # without the rounding of sums
    return Timed(
        **vars(result_of(setting, step)), work=work, again=again, idle=idle, waiting=simulation.bubble_time - idle
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


# -------------------------------------------------------------------------------------------------------------- tables


def gain(columns: Mapping[str, Timed | None], result: Timed) -> float:
    """Throughput over that of the fastest baseline that fits; not a number where there is none."""
    best = fastest(columns[name] for name in BASELINES)
    return result.tokens / best.tokens if best is not None and best.fits else math.nan


def throughput_table(rows: Sequence[Row]) -> list[str]:
    """A line a setup: tokens a second and GPU, and of helix the ratio to the best baseline."""
    heads = ("GPUs", "model", "tokens", "nodes", *BASELINES, PAPER, "helix", BEST, "published")
    lines = []
    for case, columns in rows:
        cells = [case.hardware, case.name, f"{case.tokens}k", str(case.nodes)]
        cells += [_cell(columns, name, name not in BASELINES) for name in (*BASELINES, PAPER, OURS, BEST)]
        lines.append([*cells, f"{case.published:.2f}" if case.published else ""])
    return markdown(heads, lines, "ll" + "r" * 9)


def _cell(columns: Mapping[str, Timed | None], name: str, with_gain: bool) -> str:
    if (result := columns[name]) is None:
        return "too large"
    over = gain(columns, result) if with_gain else math.nan
    ratio = "" if math.isnan(over) else f" **{over:.2f}**"
    return f"{result.tokens:.0f}{ratio} {result.setting.mark}{'' if result.fits else f', {result.gib}'}"


def summary_table(rows: Sequence[Row]) -> list[str]:
    """A line for GPUs and a model: gains in its setup with a published one, and of helix the least and the
    largest of all."""
    names = {PAPER: PAPER, OURS: "helix", BEST: BEST}
    heads = ("GPUs", "model", "published", *names.values(), "helix, all")
    lines = []
    for key in dict.fromkeys((case.hardware, case.name) for case, _ in rows):
        own = [(case, gains(columns)) for case, columns in rows if (case.hardware, case.name) == key]
        named = next(((case, found) for case, found in own if case.published), None)
        cells = [*key, "–" if named is None else f"{named[0].published:.2f}"]
        cells += ["–" if named is None or name not in named[1] else f"{named[1][name]:.2f}" for name in names]
        every = [found[OURS] for _, found in own if OURS in found]
        lines.append([*cells, f"{min(every):.2f}–{max(every):.2f}" if every else "–"])
    return markdown(heads, lines, "ll" + "r" * 5)


def gains(columns: Mapping[str, Timed | None]) -> dict[str, float]:
    """Of the columns of helix that fit, over the best baseline where one does."""
    found = {name: columns[name] for name in (PAPER, OURS, BEST)}
    over = {name: gain(columns, each) for name, each in found.items() if each is not None and each.fits}
    return {name: value for name, value in over.items() if not math.isnan(value)}


def breakdown_table(rows: Sequence[Row]) -> list[str]:
    """For each published gain, a line a schedule: where the seconds of a step go."""
    heads = ("setup", "schedule", "step", "work", "recomputed", "idle", "for messages", "gain", "memory, GiB")
    lines = []
    for case, columns in rows:
        name = f"{case.hardware}, {case.name}, published {case.published:.2f}"
        for label, result in columns.items():
            if result is not None:
                seconds = (result.step, result.work, result.again, result.idle, result.waiting)
                cells = [name, f"{label} ({result.setting.mark})", *(f"{value:.1f}" for value in seconds)]
                memory = f"{result.peak / GIB:.0f}{'' if result.fits else '!'}"
                lines.append([*cells, f"{gain(columns, result):.2f}", memory])
                name = ""
    return markdown(heads, lines, "ll" + "r" * 7)


def text(rows: Sequence[Row], reached: float | None) -> str:
    """Both tables and the assumptions, as Markdown."""
    published = [each for each in rows if each[0].published]
    title = ["Seconds of a step, means over the ranks (simulated):", ""]
    breakdown = [*title, *breakdown_table(published)] if published else []
    names = dict.fromkeys(case.hardware for case, _ in rows)
    hardware = [assumed(name, reached) for name in names]
    return page("helixpipe.md", throughput=throughput_table(rows), breakdown=breakdown, assumed=hardware)


def cases(options: Options) -> list[Case]:
    published = [asdict(each) for each in data.rows(FILE, "published", Published)]
    gains = {tuple(each.values())[:-1]: each["over_best"] for each in published}
    return [
        Case(
            model=f"helix-{key[1]}",
            hardware=key[0],
            tokens=key[2],
            nodes=key[3],
            tensor_parallel=8,
            name=key[1],
            published=gains.get(key),
            reached=options.network_efficiency,
        )
        for key in product(options.hardware, options.models, options.tokens, options.nodes)
    ]


def run(options: Options) -> Outcome:
    rows, reached = in_processes(row, cases(options), options), options.network_efficiency
    names = dict.fromkeys(case.hardware for case, _ in rows)
    tables = {
        "summary": summary_table(rows),
        "breakdown": breakdown_table([each for each in rows if each[0].published and each[0].name == MODELS[-1]][:1]),
        "assumed": [assumed(name, reached) for name in names],
    }
    return Outcome(text(rows, reached), tables)
