"""Pipelines and FSDP2 between two hosts with a slow link, measured and predicted (Linux, root).

    sudo make bench-network ARGS="[--engines 1f1b fsdp2] [--rates unlimited 50mbit] [--rounds 5] [--png network.png]"

Two hosts of tools/netlab.py train the same model under each engine, a schedule's name, `fsdp2` or `fsdp2-once` (see
fsdp.py): first a long sequence over links from unlimited down to where activations choke, then on the slowest link
sequences from short to long. Every round runs one step of forward and backward under each engine in turn; figures are
medians over rounds. All gradients are compared too.

What a step sends is counted from the model. A step is predicted from that, from what ops took just before and from
the link as it was measured: a pipeline's by simulating its program, FSDP2's as its computing and its transfers one
after the other. Activations weigh G·S·H, a layer's weights 12·H² (G: micro batch, S: sequence, H: hidden size), so
lengths are given as G·S over 12·H.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.report import Figures, Outcome, markdown, progress
from benchmarks.rounds import median_ratio
from helixpipe.common.errors import UserError
from helixpipe.common.flags import option
from netlab.hosts import Lab
from netlab.job import parse_delay, parse_rate, returned
from netlab.network_costs import Case, Link, is_fsdp, predicted_seconds, sent_bytes

ENGINES = ("1f1b", "weipipe", "fsdp2", "fsdp2-once")
RATES = ("unlimited", "200mbit", "100mbit", "50mbit", "20mbit", "10mbit")
LONG = Case(sequence=2304, micro=2)
LENGTHS = tuple(Case(sequence=sequence, micro=1) for sequence in (144, 288, 576, 1152, 2304))


@dataclass(frozen=True)
class Row:
    """One case over one link. engines: what each rank program measured, by engine."""

    case: Case
    rate: str
    link: Link
    engines: dict[str, Any]

    def seconds(self, engine: str) -> float:
        return statistics.median(self.engines[engine]["seconds"])

    def predicted(self, engine: str) -> float:
        return predicted_seconds(self.case, engine, self.link, self.engines)

    def ratio(self, engine: str, over: str) -> float:
        """Speed of one engine over another's: median over rounds."""
        return median_ratio(self.engines[over]["seconds"], self.engines[engine]["seconds"])

    def predicted_ratio(self, engine: str, over: str) -> float:
        return self.predicted(over) / self.predicted(engine)


@dataclass(frozen=True)
class Options(Figures):
    engines: tuple[str, ...] = option(ENGINES, "The first is what others are compared with.")
    rates: tuple[str, ...] = option(RATES, "Of the link, from fast to slow.")
    delay: str = option("0", "From host to host: 1ms.")
    rounds: int = option(5, "Steps of each engine that count.", at_least=1)
    png: str = option("runs/network.png", "The plot.", metavar="FILE.png")


def run(options: Options) -> Outcome:
    check(options.engines)
    by_rate = []
    by_length: list[Row] = []
    for rate in options.rates:
        lengths = LENGTHS if rate == options.rates[-1] else ()
        rows = measure([LONG, *lengths], rate, parse_delay(options.delay), options.engines, options.rounds)
        by_rate.append(rows[0])
        by_length = sorted(rows, key=lambda row: row.case.weight)
        progress(f"{rate}: {rows[0].link}")
    Path(options.png).parent.mkdir(parents=True, exist_ok=True)
    draw(by_rate, by_length, options.engines, options.png)
    figures = [{**vars(row), "case": vars(row.case), "link": vars(row.link)} for row in by_rate + by_length]
    return Outcome(
        "\n".join([*report(by_rate, by_length, options.engines), "", f"plot: {options.png}"]), figures=figures
    )


def check(engines: Sequence[str]) -> None:
    """Raises UserError for an engine that there is not."""
    if is_fsdp(engines[0]):
        raise UserError(f"--engines must begin with a schedule, such as 1f1b, not {engines[0]}.")
    for name in engines:
        sent_bytes(LONG, name)


def measure(cases: Sequence[Case], rate: str, delay: float, engines: Sequence[str], rounds: int) -> list[Row]:
    """Two hosts, a link, and one torchrun node on each that runs all cases. Raises UserError when that fails."""
    with Lab(2, parse_rate(rate), delay) as lab:
        speed = lab.measure()
        results = returned(lab, "netlab.network_ranks:measure", [case.size for case in cases], engines, rounds)
    link = Link(speed.bits_per_second / 8, speed.round_trip / 2)
    return [Row(case, rate, link, result) for case, result in zip(cases, results, strict=True)]


# -------------------------------------------------------------------------------------------------------------- report


def compared(engines: Sequence[str]) -> list[tuple[str, str]]:
    """Every engine over the first; other schedules also over FSDP2."""
    first, *others = engines
    over_fsdp = [(name, "fsdp2") for name in others if "fsdp2" in others and not is_fsdp(name)]
    return [(name, first) for name in others] + over_fsdp


def report(by_rate: Sequence[Row], by_length: Sequence[Row], engines: Sequence[str]) -> list[str]:
    """Markdown: speeds by rate, bytes, speeds by length, and where two engines are equally fast."""
    pairs, tokens = compared(engines), LONG.tokens
    over = [f"{a} over {b}" for a, b in pairs]
    heads = ["link", "payload Mbit/s", *(f"{name}, tokens/s" for name in engines), *over]
    rows = [
        [
            row.rate,
            f"{row.link.bytes_per_second * 8e-6:.1f}",
            *(f"{tokens / row.seconds(name):.0f} ({tokens / row.predicted(name):.0f})" for name in engines),
            *ratio_cells(row, pairs),
        ]
        for row in by_rate
    ]
    lines = [f"{LONG}, p = 2: measured (predicted)", "", *markdown(heads, rows, "l" + "r" * (len(heads) - 1)), ""]
    lines += ["MB that the rank which sends most sends in a step, as counted (payload) and as measured (frames)", ""]
    heads = ["engine", "counted", "measured", "measured/counted", f"as many as {engines[0]} at G·S/12H"]
    rows = [bytes_row(by_rate[-1], name, engines[0]) for name in engines]
    lines += markdown([*heads, "gradients differ"], rows, "lrrrrr")
    if len(by_length) > 1:
        rows = [
            [str(row.case.sequence), str(row.case.micro), f"{row.case.weight:.2f}", *ratio_cells(row, pairs)]
            for row in by_length
        ]
        lines += ["", f"Lengths over {by_length[0].rate}: measured (predicted)", ""]
        lines += [*markdown(["sequence", "micro batch", "G·S/12H", *over], rows, "r" * (3 + len(over))), ""]
        weights = [row.case.weight for row in by_length]
        for a, b in pairs:
            measured = crossing(weights, [row.ratio(a, b) for row in by_length])
            predicted = crossing(weights, [row.predicted_ratio(a, b) for row in by_length])
            lines.append(f"{a} is as fast as {b} at G·S/12H = {measured} (predicted {predicted})")
    return lines


def ratio_cells(row: Row, pairs: Sequence[tuple[str, str]]) -> list[str]:
    return [f"{row.ratio(a, b):.2f} ({row.predicted_ratio(a, b):.2f})" for a, b in pairs]


def bytes_row(row: Row, name: str, first: str) -> list[str]:
    counted, measured = sent_bytes(row.case, name), statistics.median(row.engines[name]["sent"])
    equal = row.case.weight * counted / sent_bytes(row.case, first)  # those of 1f1b grow with G·S
    difference = f"{row.engines[name]['gradient_difference']:.0e}" if name != first else ""
    ratio = f"{measured / counted:.3f}"
    return [name, f"{counted / 1e6:.2f}", f"{measured / 1e6:.2f}", ratio, f"{equal:.2f}", difference]


def crossing(weights: Sequence[float], ratios: Sequence[float]) -> str:
    """Where a ratio passes 1, between the two points beside it (on logarithmic axes); `-` when it does not."""
    points = list(zip(map(math.log, weights), map(math.log, ratios), strict=True))
    for (x, y), (next_x, next_y) in pairwise(points):
        if y * next_y <= 0 and y != next_y:
            return f"{math.exp(x - y * (next_x - x) / (next_y - y)):.2f}"
    return "-"


def draw(by_rate: Sequence[Row], by_length: Sequence[Row], engines: Sequence[str], path: str) -> None:
    """Left: speed against the link's rate; right: speed over the first engine's against the length. Lines are
    predicted, points measured."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    rates, weights = range(len(by_rate)), [row.case.weight for row in by_length]
    for number, name in enumerate(engines):
        colour = f"C{number}"
        left.plot(rates, [LONG.tokens / row.predicted(name) for row in by_rate], color=colour, label=name)
        left.plot(rates, [LONG.tokens / row.seconds(name) for row in by_rate], "o", color=colour)
        if number:
            right.plot(weights, [row.predicted_ratio(name, engines[0]) for row in by_length], color=colour, label=name)
            right.plot(weights, [row.ratio(name, engines[0]) for row in by_length], "o", color=colour)
    left.set(yscale="log", xlabel="link", ylabel="tokens/s", title=str(LONG))
    left.set_xticks(rates, [row.rate for row in by_rate])
    right.set(xscale="log", yscale="log", xlabel="G·S / 12·H", ylabel=f"speed over {engines[0]}")
    right.set_title(f"lengths over {by_length[0].rate}")
    right.axhline(1, color="grey", linewidth=0.8)
    right.axvline(1, color="grey", linewidth=0.8, linestyle=":")
    for axes, logarithmic in ((left, [left.yaxis]), (right, [right.xaxis, right.yaxis])):
        axes.legend(title="line: predicted, point: measured", fontsize=8, title_fontsize=8)
        axes.title.set_fontsize(10)
        for axis in logarithmic:
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.set_minor_formatter(NullFormatter())
    figure.savefig(path, dpi=150)
