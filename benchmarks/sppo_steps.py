"""SPPO's published setups, simulated: what offloading makes possible, and what it costs.

    make bench-sppo-steps ARGS="[--models 7b] [--tokens 512] [--longest] [--output docs/sppo.md]"

Prints Markdown: for each setup step time, memory of the fullest GPU and of the host, and what of the copies is hidden,
under Megatron-LM's 1F1B and under seq1f1b with every layer recomputed, and under sppo that offloads nothing, all that
may leave of every unit, and what `--offload-activations auto` chooses. With --longest also sequences near the longest
that fit. `--output` writes those of docs/sppo.md into their places, of setups simulated now. All is simulated by the
cost model (docs/costs.md); setups and ways are in benchmarks/data/sppo.toml.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks import data
from benchmarks.report import Outcome, Page, markdown, progress
from benchmarks.simulated import Granularity, Setting
from benchmarks.sppo_setups import MODELS, SETUPS, SppoSetup
from helixpipe.cli.model import ModelOnCluster
from helixpipe.common.errors import ScheduleError
from helixpipe.common.flags import option
from helixpipe.costs.hardware import GIB
from helixpipe.costs.models import OFF
from helixpipe.planning.memory.offload_choice import MemoryLimits, OffloadedProgram
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.planning.order.chunk_options import ChunkOptions

SLICE = 2048
"""Tokens of a slice of the MLP, and of the loss, of the longest sequences."""


@dataclass(frozen=True)
class Way:
    """How a step is run. offload: which share of the activations waits in the host's memory."""

    name: str
    schedule: str
    offload: str
    recompute: Granularity | None = None

    def program(self, plan: ModelOnCluster, chunks: int) -> OffloadedProgram | None:
        """None where nothing fits."""
        costs, count = plan.costs, 1 if self.schedule == "1f1b" else chunks
        lengths = ChunkOptions().resolve(count, costs, plan.layers, costs.seq_length, costs.layout.tensor_parallel)
        setting = Setting(
            self.schedule,
            recompute=RecomputeOptions(self.recompute),
            chunks=count,
            chunk_lengths=lengths,
            offload=self.offload,
        )
        try:
            return OffloadedProgram(setting.program(plan), costs, MemoryLimits(plan.limit, costs.host_memory), {})
        except ScheduleError:
            return None


@dataclass(frozen=True, kw_only=True)
class LongSetup(SppoSetup):
    """On the hardware as it is."""

    hardware: str
    network_bandwidth: float | None = None  # type: ignore[assignment]
    network_adapters: int | None = None  # type: ignore[assignment]


WAYS = data.rows("sppo.toml", "way", Way)
BASELINE, CHOSEN = WAYS[1], WAYS[-1]
ON_PAGE = (("7b", 512), ("7b", 768), ("13b", 640))
"""Models and thousands of tokens of the setups that the page has; standard output has all."""
HEADS = ("step s", "tokens/s/GPU", "GiB of a GPU", "GiB of host", "copies hidden")


@dataclass(frozen=True)
class Options(Page):
    models: tuple[str, ...] = option(MODELS, "Which models.", nargs="*", choices=MODELS)
    tokens: tuple[int, ...] = option((), "In units of 1024 (default: all that were published).", at_least=1)
    longest: bool = option(False, "Also sequences near the longest that fit.", flags=("--longest",))


def cells(plan: ModelOnCluster, found: OffloadedProgram | None) -> list[str]:
    """Step time, tokens, memory and what of the copies is hidden."""
    if found is None:
        return ["–", "–", "nothing fits", "", ""]
    need, host, simulation = max(found.needs) / GIB, max(found.host_needs) / GIB, found.simulation
    return [
        f"{found.time:.1f}",
        f"{plan.costs.seq_length / found.time / plan.gpus:.0f}",
        f"{need:.1f}{'' if found.fits else ' (too much)'}",
        f"{host:.0f}" if host else "",
        f"{simulation.hidden:.1%}" if simulation.copies else "",
    ]


@dataclass(frozen=True)
class Row:
    """What came of the ways to run a setup."""

    setup: SppoSetup
    plan: ModelOnCluster
    found: Mapping[Way, OffloadedProgram | None]

    def over(self, each: OffloadedProgram | None) -> str:
        """The time of the baseline over that of one that fits."""
        baseline = self.found[BASELINE]
        return f"{baseline.time / each.time:.2f}" if baseline and each and each.fits else ""

    @property
    def table(self) -> Iterator[str]:
        """A line a way."""
        setup = self.setup
        sizes = f"tensor parallel {setup.tensor_parallel}, p = {self.plan.ranks}, {setup.chunks} chunks"
        yield f"\n{setup.short.upper()}, {setup.tokens} K tokens, {self.plan.gpus} GPUs: {sizes}\n"
        rows = [[way.name, *cells(self.plan, each), self.over(each)] for way, each in self.found.items()]
        yield from markdown(("way", *HEADS, f"over {BASELINE.schedule}"), rows, "l" * 7)

    @property
    def line(self) -> list[str]:
        """The cells of the setup in the page's table: a step's seconds, GiB of the fullest GPU."""
        line = [f"{self.setup.short} {self.setup.tokens}k"]
        for way, each in self.found.items():
            if each is None:
                line.append("nothing fits")
                continue
            need, host = max(each.needs) / GIB, max(each.host_needs) / GIB
            cell = f"{each.time:.1f}, {need:.0f} GiB{'' if each.fits else '!'}"
            cell += f" and {host:.0f} of the host" if host and way is CHOSEN else ""
            line.append(cell + f", over {self.over(each)}" * bool(way.offload != OFF and self.over(each)))
        return line


def row(setup: SppoSetup) -> Row:
    plan = setup.plan()
    return Row(setup, plan, {way: way.program(plan, setup.chunks) for way in WAYS})


def longest() -> list[str]:
    """sppo with loss and MLP in slices."""
    rows = []
    for setup in data.rows("sppo.toml", "longest", LongSetup):
        plan = setup.plan(chunk_size=SLICE, loss_chunk_size=SLICE)
        label = f"{setup.model}, {plan.gpus} x {setup.hardware}, tensor parallel {setup.tensor_parallel}"
        found = cells(plan, CHOSEN.program(plan, setup.chunks))
        rows.append([f"{label}, p = {plan.ranks}", f"{setup.tokens} K", *found])
        progress(label)
    return markdown(("setup", "tokens", *HEADS), rows, "l" * 7)


def run(options: Options) -> Outcome:
    rows = []
    for setup in SETUPS:
        if setup.short in options.models and setup.tokens in (options.tokens or (setup.tokens,)):
            rows.append(row(setup))
            progress(f"{setup.model}, {setup.tokens} K tokens")
    lines = [line for each in rows for line in each.table]
    shown = [each.line for each in rows if (each.setup.short, each.setup.tokens) in ON_PAGE]
    tables = {"steps": markdown(("", *(way.name for way in WAYS)), shown, "l" + "r" * len(WAYS))}
    if options.longest:
        tables["longest"] = longest()
        lines += ["", *tables["longest"]]
    return Outcome("\n".join(lines), tables)
