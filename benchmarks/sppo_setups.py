"""SPPO's published setups, simulated.

    make bench-sppo ARGS="[--models 7b] [--output docs/sppo.md]"

Prints Markdown tables; into the page go the lines of the first that are about the first model. It has a line for each
setup of benchmarks/data/sppo.toml: 1f1b, seq1f1b and sppo, each with the recomputation with which it fits into the
memory and is fastest. The second says what multiplexing the sequence partition would gain: bubble and step of the
order of `sppo`, alone and with ranks that help at the start of the pipeline (`left`) or at both ends, with transfers
that take no time and with all that has to travel. All figures are simulated by the cost model (docs/costs.md);
assumptions are below the tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from benchmarks import data
from benchmarks.multiplex import MultiplexedTimes, multiplexed, teams
from benchmarks.report import Outcome, Page, markdown, page, progress
from benchmarks.simulated import RECOMPUTED, Result, Scenario, Setting, assumed, fastest, result_of, simulated
from helixpipe.cli.model import ModelOnCluster
from helixpipe.common.flags import option
from helixpipe.costs.hardware import GIB
from helixpipe.costs.sizes import GRADIENT_BYTES
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.planning.order.chunk_lengths import balanced_lengths, default_alignment
from helixpipe.program.costs import Contents, Work
from helixpipe.program.stages import Segment, Stage, even_stages
from helixpipe.program.workload import Extent, Extents


@dataclass(frozen=True, kw_only=True)
class SppoSetup(Scenario):
    """One model on its GPUs. chunks: of the sequence."""

    chunks: int
    hardware: str = "a100-80"
    microbatches: int = 1
    network_bandwidth: float = 800
    network_adapters: int = 4

    @property
    def short(self) -> str:
        """The model's name in the tables."""
        return self.model.removeprefix("sppo-")


SETUPS = data.rows("sppo.toml", "setup", SppoSetup)
MODELS = tuple(dict.fromkeys(setup.short for setup in SETUPS))
SCHEDULES = ("1f1b", "seq1f1b", "sppo")


@dataclass(frozen=True)
class Options(Page):
    models: tuple[str, ...] = option(MODELS, "Which models.", choices=MODELS)


def best(plan: ModelOnCluster, schedule: str, lengths: tuple[int, ...]) -> Result:
    """Of nothing recomputed and the ways to, always inside the backwards, the best."""
    chunks = {} if schedule == "1f1b" else {"chunks": len(lengths), "chunk_lengths": lengths}
    results = []
    for mark, granularity in RECOMPUTED.items():
        setting = Setting(schedule, mark, RecomputeOptions(granularity, recompute_early=False))
        program = setting.program(plan, limited=False, **chunks)
        results.append(result_of(setting, simulated(plan, program)))
    found = fastest(results)
    assert found is not None
    return found


@dataclass(frozen=True)
class Multiplexed:
    """`TeamCosts` of a plan. free: transfers take no time."""

    plan: ModelOnCluster
    lengths: tuple[int, ...]
    free: bool = False

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return even_stages(self.plan.layers, self.plan.ranks)

    @cached_property
    def earlier(self) -> tuple[int, ...]:
        return tuple(accumulate(self.lengths, initial=0))

    def op_time(self, kind: str, stage: int, chunk: int, team: int) -> float:
        """A member's tokens have as many earlier ones on average as the chunk's."""
        tokens = self.lengths[chunk]
        extents = (Extent(tokens / team, self.earlier[chunk] + tokens * (team - 1) / (2 * team)),)
        return self.plan.costs.op_time(Work(kind, self.stages[stage].pieces, extents, self.whole))

    @property
    def whole(self) -> float:
        return float(sum(self.lengths))

    @cached_property
    def bandwidth(self) -> float:
        """Of a GPU to one of another pipeline rank, which is on another node."""
        layout, hardware = self.plan.costs.layout, self.plan.costs.hardware
        return hardware.peer_bandwidth(min(hardware.gpus_per_node, layout.tensor_parallel), same_node=False)

    def _seconds(self, nbytes: float) -> float:
        return 0.0 if self.free else self.plan.costs.hardware.latency + nbytes / self.bandwidth

    def activation(self, chunk: int) -> float:
        extents: Extents = (Extent(self.lengths[chunk], self.earlier[chunk]),)
        after = (Segment(self.stages[1].pieces[:1], False),)
        return self._seconds(self.plan.costs.size(Contents("activation", after, extents, self.whole)))

    def keys_values(self, stage: int, chunk: int, gradients: bool) -> float:
        return self._seconds(self.kv_bytes(stage, chunk))

    def kv_bytes(self, stage: int, chunk: int) -> float:
        """Keys and values of a chunk in a stage, on a GPU; their gradients are as many."""
        extents = (Extent(self.lengths[chunk], 0.0),)
        return self.plan.costs.size(Contents("keys_values", self.stages[stage].segments, extents, self.whole))

    def weights(self, stage: int, gradients: bool) -> float:
        element = GRADIENT_BYTES if gradients else self.plan.costs.layout.element_bytes
        return self._seconds(self.plan.costs.bytes.parameters(self.stages[stage].pieces) * element)

    def lent(self, left: bool, right: bool) -> float:
        """Bytes of weights, sums of their gradients, keys and values and their gradients that the rank which helps most
        has for others."""
        ranks, chunks = self.plan.ranks, len(self.lengths)
        sizes = [0.0] * ranks
        each = self.plan.costs.layout.element_bytes + GRADIENT_BYTES
        for stage in range(ranks):
            held: dict[int, set[int]] = {}  # helper -> chunks whose keys and values it needs
            for (own, chunk), team in teams(ranks, chunks, left, right).items():
                if own == stage:
                    for rank in team:
                        held.setdefault(rank, set()).update(range(chunk + 1))
            for rank in held.keys() - {stage}:
                sizes[rank] += self.plan.costs.bytes.parameters(self.stages[stage].pieces) * each
                sizes[rank] += 2 * sum(self.kv_bytes(stage, chunk) for chunk in held[rank])
        return max(sizes)


@dataclass(frozen=True)
class Row:
    """schedules: by name. alone; helped: by (at both ends, free). lent: bytes, helping at the start, at both ends."""

    setup: SppoSetup
    schedules: Mapping[str, Result]
    alone: MultiplexedTimes
    helped: Mapping[tuple[bool, bool], MultiplexedTimes]
    lent: tuple[float, float]

    @property
    def cells(self) -> list[str]:
        """The first ones of its lines."""
        setup = self.setup
        return [f"{setup.short}, {8 * setup.nodes}", f"{setup.tokens}k", str(setup.chunks)]


def row(setup: SppoSetup) -> Row:
    plan, tokens, chunks = setup.plan(), setup.tokens * 1024, setup.chunks
    alignment = default_alignment(tokens, chunks, setup.tensor_parallel)
    lengths = balanced_lengths(plan.costs, even_stages(plan.layers, 1), tokens, chunks, alignment)
    free, counted = Multiplexed(plan, lengths, free=True), Multiplexed(plan, lengths)
    alone = multiplexed(counted, plan.ranks, chunks, left=False, right=False)
    helped = {
        (right, costs.free): multiplexed(costs, plan.ranks, chunks, right=right)
        for costs in (free, counted)
        for right in (False, True)
    }
    schedules = {name: best(plan, name, lengths) for name in SCHEDULES}
    return Row(setup, schedules, alone, helped, (counted.lent(True, False), counted.lent(True, True)))


def schedule_table(rows: Sequence[Row]) -> list[str]:
    """A line a setup and length: seconds of a step, over 1f1b's, GiB of the fullest GPU."""
    lines = []
    for each in rows:
        cells = each.cells
        for result in each.schedules.values():
            ratio = each.schedules["1f1b"].step / result.step
            cells.append(f"{result.step:.1f} **{ratio:.2f}** {result.setting.mark}, {result.gib}")
        lines.append([*cells, f"{each.schedules['sppo'].tokens:.0f}"])
    return markdown(("model, GPUs", "tokens", "N", *SCHEDULES, "sppo, tokens/s/GPU"), lines, "lrrrrrr")


def multiplex_table(rows: Sequence[Row]) -> list[str]:
    """A line a setup and length."""
    heads = ("step, s", "bubble", "left, free", "counted", "GiB", "both, free", "counted", "GiB")
    lines = []
    for each in rows:
        cells = [*each.cells, f"{each.alone.makespan:.1f}", f"{each.alone.bubble:.2f}"]
        for right in (False, True):
            for free in (True, False):
                outcome = each.helped[right, free]
                cells.append(f"{outcome.bubble:.2f} **{each.alone.makespan / outcome.makespan:.3f}**")
            cells.append(f"{each.lent[right] / GIB:.1f}")
        lines.append(cells)
    return markdown(("model, GPUs", "tokens", "N", *heads), lines, "l" + "r" * 10)


def text(rows: Sequence[Row]) -> str:
    """Both tables and the assumptions, as Markdown."""
    setup = rows[0].setup
    hardware = assumed(setup.hardware, network=setup.plan().costs.hardware.network)
    tables = {"schedules": schedule_table(rows), "multiplexed": multiplex_table(rows)}
    return page("sppo.md", **tables, assumed=[hardware])


def run(options: Options) -> Outcome:
    rows = []
    for setup in SETUPS:
        if setup.short in options.models:
            rows.append(row(setup))
            progress(f"{setup.model}, {setup.tokens}k tokens")
    first = [each for each in rows if each.setup.short == options.models[0]]
    return Outcome(text(rows), {"schedules": schedule_table(first)})
