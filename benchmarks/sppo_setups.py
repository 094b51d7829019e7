"""`make bench-sppo`: SPPO's published setups, simulated.

    python benchmarks/sppo_setups.py [--models 7b] [--output table.md]

Prints Markdown tables. The first has a line for each setup:
1f1b, seq1f1b and sppo, each with the recomputation with which it fits into the memory and is fastest. The second says
what multiplexing the sequence partition would gain: bubble and step of the order of `sppo`, alone and with ranks that
help at the start of the pipeline (`left`) or at both ends, with transfers that take no time and with all that has to
travel. All figures are simulated by the cost model (docs/costs.md); assumptions are below the tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType

from benchmarks.multiplex import MultiplexedTimes, multiplexed, teams
from helixpipe.cli.model import ModelOnCluster, ModelOptions, make_plan
from helixpipe.cli.model_report import report
from helixpipe.costs.hardware import GIB, GIGA, RESERVED_MEMORY
from helixpipe.costs.sizes import GRADIENT_BYTES
from helixpipe.lowering.lower import lower
from helixpipe.planning.memory.offload import OffloadOptions
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.planning.order.chunk_lengths import balanced_lengths, default_alignment
from helixpipe.program.costs import Contents, Work
from helixpipe.program.stages import Segment, Stage, even_stages
from helixpipe.program.workload import Extent, Extents
from helixpipe.simulate.simulator import simulate
from schedules import Shape, build

HARDWARE = "a100-80"
NETWORK, ADAPTERS = 100 * GIGA, 4
"""Of SPPO's nodes: 4 x 200 Gb/s."""


@dataclass(frozen=True)
class Setup:
    """One model on its GPUs. chunks: by the tokens of a sequence, in units of 1024."""

    model: str
    gpus: int
    tensor_parallel: int
    ranks: int
    chunks: Mapping[int, int]

    def plan(self, tokens: int) -> ModelOnCluster:
        options = ModelOptions(
            model=f"sppo-{self.model}",
            seq_length=tokens * 1024,
            hardware=HARDWARE,
            nodes=self.gpus // 8,
            tensor_parallel=self.tensor_parallel,
            global_batch_size=1,
        )
        plan = make_plan(options, self.ranks, None, None)
        assert plan is not None
        hardware = replace(plan.costs.hardware, network=NETWORK, adapters=ADAPTERS)
        return replace(plan, costs=replace(plan.costs, hardware=hardware))


SETUPS: Mapping[str, Setup] = MappingProxyType(
    {
        "7b": Setup("7b", 32, 8, 4, {512: 32, 640: 64, 768: 80, 896: 128, 1024: 160}),
        "13b": Setup("13b", 64, 8, 8, {512: 32, 640: 48, 768: 64, 1024: 80, 1280: 160}),
        "65b": Setup("65b", 128, 16, 8, {512: 32, 600: 64, 640: 80, 768: 96, 1024: 128}),
    }
)
"""Chen et al., SPPO, Table 4."""


SCHEDULES = ("1f1b", "seq1f1b", "sppo")
SETTINGS: tuple[tuple[str, RecomputeOptions], ...] = (
    ("k", RecomputeOptions(recompute_early=False)),
    ("s", RecomputeOptions("selective", recompute_early=False)),
    ("w", RecomputeOptions("without-attention", recompute_early=False)),
    ("f", RecomputeOptions("full", recompute_early=False)),
)
"""Kept, and what is recomputed, always inside the backwards."""


@dataclass(frozen=True)
class Result:
    """One schedule with one setting. step: seconds. peak: bytes of the fullest GPU."""

    mark: str
    step: float
    tokens_per_gpu: float
    peak: float
    fits: bool


def best(plan: ModelOnCluster, schedule: str, lengths: tuple[int, ...]) -> Result:
    """Of the settings that fit the fastest, else the one that needs the least memory."""
    results = []
    for mark, recompute in SETTINGS:
        shape = Shape(plan.ranks, 1, plan.layers, costs=plan.costs, recompute=recompute, offload=OffloadOptions("off"))
        if schedule != "1f1b":
            shape = replace(shape, chunks=len(lengths), chunk_lengths=lengths)
        step = report(simulate(lower(build(schedule, shape), plan.costs), plan.costs, "s"), plan)
        results.append(Result(mark, step.step_time, step.tokens_per_gpu, step.peak, step.peak <= step.limit))
    fitting = [each for each in results if each.fits]
    return min(fitting, key=lambda each: each.step) if fitting else min(results, key=lambda each: each.peak)


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

    setup: Setup
    tokens: int
    chunks: int
    schedules: Mapping[str, Result]
    alone: MultiplexedTimes
    helped: Mapping[tuple[bool, bool], MultiplexedTimes]
    lent: tuple[float, float]


def row(setup: Setup, tokens: int, chunks: int) -> Row:
    plan = setup.plan(tokens)
    alignment = default_alignment(tokens * 1024, chunks, setup.tensor_parallel)
    lengths = balanced_lengths(plan.costs, even_stages(plan.layers, 1), tokens * 1024, chunks, alignment)
    free, counted = Multiplexed(plan, lengths, free=True), Multiplexed(plan, lengths)
    alone = multiplexed(counted, setup.ranks, chunks, left=False, right=False)
    helped = {
        (right, costs.free): multiplexed(costs, setup.ranks, chunks, right=right)
        for costs in (free, counted)
        for right in (False, True)
    }
    schedules = {name: best(plan, name, lengths) for name in SCHEDULES}
    return Row(setup, tokens, chunks, schedules, alone, helped, (counted.lent(True, False), counted.lent(True, True)))


def schedule_table(rows: Sequence[Row]) -> list[str]:
    """A line a setup and length: seconds of a step, over 1f1b's, GiB of the fullest GPU."""
    lines = [
        f"| model, GPUs | tokens | N | {' | '.join(SCHEDULES)} | sppo, tokens/s/GPU |",
        f"|---|--:|--:|{'--:|' * len(SCHEDULES)}--:|",
    ]
    for each in rows:
        cells = [f"{each.setup.model}, {each.setup.gpus}", f"{each.tokens}k", str(each.chunks)]
        for result in each.schedules.values():
            ratio = each.schedules["1f1b"].step / result.step
            size = f"{result.peak / GIB:.0f} GiB{'' if result.fits else '!'}"
            cells.append(f"{result.step:.1f} **{ratio:.2f}** {result.mark}, {size}")
        cells.append(f"{each.schedules['sppo'].tokens_per_gpu:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def text(rows: Sequence[Row]) -> str:
    """Both tables and the assumptions, as Markdown."""
    hardware = rows[0].setup.plan(512).costs.hardware
    share, usable = hardware.efficiency, (hardware.memory - RESERVED_MEMORY) / GIB
    parts = [
        ["# SPPO's published setups, simulated"],
        ["Written by `make bench-sppo`; docs/sppo.md says what follows from it. Simulated, not measured."],
        ["One sequence a step. Seconds of a step, in bold 1f1b's over it, what is recomputed, the fullest GPU:"],
        schedule_table(rows),
        [
            "k: everything is kept; s: core attention is recomputed; w: all but core attention; f: whole layers; each "
            "inside the backward. `GiB!`: does not fit."
        ],
        [
            "Multiplexing the sequence partition, everything kept. Seconds of bubble, in bold the step without over "
            "the step with it; GiB: weights, gradients, keys and values that the rank which helps most has for others:"
        ],
        multiplex_table(rows),
        ["Assumed:"],
        [
            f"- {HARDWARE}: {share.matmul:.0%} of {hardware.flops / 1e12:.0f} TFLOP/s in matrix products, "
            f"{share.attention:.0%} in attention, {share.memory:.0%} of memory bandwidth and NVLink, "
            f"{share.network:.0%} of the network's {hardware.network / 1e9:.0f} GB/s a node, of which each of 8 GPUs "
            f"has an eighth; {usable:.0f} of {hardware.memory / GIB:.0f} GiB usable",
            "- multiplexing: weights pass from helper to helper at the start of the step, sums of their gradients in "
            "float32 back after the last op; keys and values as they are made; a rank sends one message at a time and "
            "receives one; exchanges within a team overlap nothing",
        ],
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def multiplex_table(rows: Sequence[Row]) -> list[str]:
    """A line a setup and length."""
    lines = [
        "| model, GPUs | tokens | N | step, s | bubble | left, free | counted | GiB | both, free | counted | GiB |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for each in rows:
        cells = [f"{each.setup.model}, {each.setup.gpus}", f"{each.tokens}k", str(each.chunks)]
        cells += [f"{each.alone.makespan:.1f}", f"{each.alone.bubble:.2f}"]
        for right in (False, True):
            for free in (True, False):
                outcome = each.helped[right, free]
                cells.append(f"{outcome.bubble:.2f} **{each.alone.makespan / outcome.makespan:.3f}**")
            cells.append(f"{each.lent[right] / GIB:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=tuple(SETUPS), choices=SETUPS)
    parser.add_argument("--output", metavar="FILE.md", help="write the tables there, too")
    arguments = parser.parse_args()
    rows = [row(SETUPS[name], *each) for name in arguments.models for each in SETUPS[name].chunks.items()]
    written = text(rows)
    print(written, end="")
    if arguments.output:
        Path(arguments.output).write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
