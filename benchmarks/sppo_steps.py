"""`make bench-sppo-steps`: SPPO's published setups, simulated: what offloading makes possible, and what it costs.

    python benchmarks/sppo_steps.py [--models 7b] [--tokens 512] [--longest] [--output table.md]

Prints Markdown: for each setup step time, memory of the fullest GPU and of the host, and what of the copies is hidden,
under Megatron-LM's 1F1B and under seq1f1b with every layer recomputed, and under sppo that offloads nothing, all that
may leave of every unit, and what `--offload-activations auto` chooses. With --longest also sequences near the longest
that fit. All is simulated by the cost model (docs/costs.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.sppo_setups import SETUPS, Setup
from helixpipe.cli.model import ModelOnCluster, ModelOptions, make_plan
from helixpipe.common.errors import ScheduleError
from helixpipe.costs.hardware import GIB
from helixpipe.costs.models import Layout
from helixpipe.planning.memory.offload import OffloadOptions
from helixpipe.planning.memory.offload_choice import MemoryLimits, OffloadedProgram
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.planning.order.chunk_options import ChunkOptions
from schedules import Shape, build

FULL = RecomputeOptions("full")
WAYS = {
    "1f1b, recomputed": ("1f1b", FULL, "off"),
    "seq1f1b, recomputed": ("seq1f1b", FULL, "off"),
    "sppo, nothing offloaded": ("sppo", RecomputeOptions(), "off"),
    "sppo, all offloaded": ("sppo", RecomputeOptions(), "1"),
    "sppo, chosen": ("sppo", RecomputeOptions(), "auto"),
}
SLICE = 2048
"""Tokens of a slice of the MLP, and of the loss, of the longest sequences."""

LONG = (
    *(("llama3-8b", "h100", 1, 8, 1, tokens) for tokens in (1024, 1536, 1792)),
    *(("sppo-7b", "a100-80", 16, 8, 16, tokens) for tokens in (4096, 6144)),
)


@dataclass(frozen=True)
class Row:
    way: str
    choice: OffloadedProgram | None
    plan: ModelOnCluster

    @property
    def fits(self) -> bool:
        return self.choice is not None and self.choice.fits

    def cells(self, baseline: float | None) -> list[str]:
        if self.choice is None:
            return [self.way, "–", "–", "nothing fits", "", "", ""]
        time, need, host = self.choice.time, max(self.choice.needs) / GIB, max(self.choice.host_needs) / GIB
        over = f"{baseline / time:.2f}" if baseline is not None and self.fits else "–"
        simulation = self.choice.simulation
        hidden = f"{simulation.hidden:.1%}" if simulation.copies else ""
        rate = self.plan.costs.seq_length / time / self.plan.gpus
        return [self.way, f"{time:.1f}", f"{rate:.0f}", f"{need:.1f}{'' if self.fits else ' (too much)'}",
                f"{host:.0f}" if host else "", hidden, over]  # fmt: skip


def row(way: str, plan: ModelOnCluster, chunks: int) -> Row:
    schedule, recompute, offload = WAYS[way]
    chunks = 1 if schedule == "1f1b" else chunks
    costs = plan.costs
    lengths = ChunkOptions().resolve(chunks, costs, plan.layers, costs.seq_length, costs.layout.tensor_parallel)
    limits = MemoryLimits(plan.limit, costs.host_memory)
    shape = Shape(
        plan.ranks, 1, plan.layers, chunks, None, lengths, costs, recompute, plan.limit,
        OffloadOptions(offload), costs.host_memory,
    )  # fmt: skip
    try:
        return Row(way, OffloadedProgram(build(schedule, shape), costs, limits, {}), plan)
    except ScheduleError:
        return Row(way, None, plan)


def table(setup: Setup, tokens: int) -> Iterator[str]:
    plan = setup.plan(tokens)
    chunks = setup.chunks[tokens]
    yield f"\n{setup.model.upper()}, {tokens} K tokens, {setup.gpus} GPUs: tensor parallel {setup.tensor_parallel}, "
    yield f"p = {setup.ranks}, {chunks} chunks\n"
    yield "| way | step s | tokens/s/GPU | GiB of a GPU | GiB of host | copies hidden | over seq1f1b |"
    yield "|---|---|---|---|---|---|---|"
    rows = [row(way, plan, chunks) for way in WAYS]
    baseline = rows[1].choice
    for each in rows:
        yield f"| {' | '.join(each.cells(baseline.time if baseline is not None else None))} |"


def long(model: str, hardware: str, nodes: int, tp: int, ranks: int, tokens: int) -> str:
    """sppo with loss and MLP in slices, in 64 chunks. tokens: in units of 1024."""
    options = ModelOptions(
        model=model, seq_length=tokens * 1024, hardware=hardware, nodes=nodes, tensor_parallel=tp, global_batch_size=1
    )
    plan = make_plan(options, ranks, None, None)
    assert plan is not None
    layout: Layout = replace(plan.costs.layout, mlp_chunk=SLICE, loss_chunk=SLICE)
    _, *cells, _ = row("sppo, chosen", replace(plan, costs=replace(plan.costs, layout=layout)), 64).cells(None)
    setup = f"{model}, {plan.gpus} x {hardware}, tensor parallel {tp}, p = {ranks}"
    return f"| {setup} | {tokens} K | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--models", nargs="*", default=list(SETUPS), choices=SETUPS)
    parser.add_argument("--tokens", nargs="+", type=int, help="in units of 1024 (default: all that were published)")
    parser.add_argument("--longest", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    for name in arguments.models:
        for tokens in SETUPS[name].chunks:
            if arguments.tokens is None or tokens in arguments.tokens:
                for line in table(SETUPS[name], tokens):
                    say(line)
    if arguments.longest:
        say("\n| setup | tokens | step s | tokens/s/GPU | GiB of a GPU | GiB of host | copies hidden |")
        say("|---|---|---|---|---|---|---|")
        for setup in LONG:
            say(long(*setup))
    if arguments.output is not None:
        arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
