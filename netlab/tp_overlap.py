"""Layers over two tensor-parallel ranks with a slow link between them: halves of the tokens measured and predicted.

    sudo make bench-tp-overlap-steps ARGS="[--rates 800mbit 400mbit 200mbit] [--rounds 7]"

Two hosts of tools/netlab.py run forward and backward of the same layers with `--overlap-tp-comm off` and `halves` in
turn, over the link and with collectives that move nothing; figures are the least of the rounds, to which what else the
machine does only adds. Matrix products are waited for instead of computed, unless --gigaflops 0 is given: a core that
computes has no time to move tensors, as a GPU has. Predicted is what the cost model
(docs/costs.md) makes of them: its only times of kernels are in proportion to FLOPs, at the speed of `off` with
collectives that move nothing, and its network is the link as all-reduces on it were measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.ranks import result_in, write_call
from benchmarks.report import ROOT, Figures, Outcome, markdown, progress
from helixpipe.common.errors import UserError
from helixpipe.common.flags import option
from helixpipe.costs.hardware import HARDWARE, Efficiency
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import HALVES, OFF, Layout, ModelShape
from helixpipe.program.costs import Work
from helixpipe.program.workload import Extent
from netlab.hosts import Lab
from netlab.job import Job, parse_rate

LAYERS, HIDDEN, HEADS = 4, 512, 8


@dataclass(frozen=True)
class Options(Figures):
    rates: tuple[str, ...] = option(("800mbit", "400mbit", "200mbit"), "Of the link.")
    tokens: int = option(1024, "Of a sequence.", at_least=2)
    gigaflops: float = option(
        40.0, "GFLOP/s at which products are waited for, so that two cores do for all; 0: computed.", at_least=0
    )
    rounds: int = option(7, "Steps of each kind that count.", at_least=1)


def run(options: Options) -> Outcome:
    found = {}
    for rate in options.rates:
        found[rate] = measure(rate, options.tokens, options.rounds, options.gigaflops * 1e9)
        progress(f"{rate}: {found[rate]}")
    lines = [line(rate, options.tokens, each) for rate, each in found.items()]
    heads = ("link", "Mbit/s", "off, s", "halves, s", "gain", "computing alone, s", "gradients differ")
    return Outcome("\n".join(markdown(heads, lines, "lrrrrrr")), figures=found)


def measure(rate: str, tokens: int, rounds: int, flops: float) -> dict[str, Any]:
    """Return what the ranks return. Raises UserError where they fail."""
    with tempfile.TemporaryDirectory() as folder, Lab(2, parse_rate(rate)) as lab:
        call = write_call(folder, "netlab.tp_overlap_ranks:measure", LAYERS, HIDDEN, HEADS, tokens, rounds, flops)
        job = Job(lab, call, environment={"PYTHONPATH": str(ROOT)})
        if any(job.wait()):
            raise UserError(f"the ranks failed at {rate}:\n{job.text(0)[-3000:]}\n{job.text(1)[-3000:]}")
        return dict(result_in(folder))


def line(rate: str, tokens: int, found: dict[str, Any]) -> list[str]:
    """Measured, and in brackets predicted."""
    seconds = {name: min(each) for name, each in found["seconds"].items()}
    predicted = predicted_seconds(tokens, seconds[f"{OFF} alone"], found["all_reduce"])
    return [
        rate,
        f"{8e-6 * bandwidth(found['all_reduce'])[1]:.0f}",
        *(f"{seconds[way]:.3f} ({predicted[way]:.3f})" for way in (OFF, HALVES)),
        f"{seconds[OFF] / seconds[HALVES]:.3f} ({predicted[OFF] / predicted[HALVES]:.3f})",
        f"{seconds[f'{OFF} alone']:.3f}, in halves {seconds[f'{HALVES} alone']:.3f}",
        f"{found['gradient_difference']:.0e}",
    ]


def bandwidth(all_reduces: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(seconds of an all-reduce of nothing, bytes a second of a large one): of two ranks each sends all of it once."""
    (large, took), _, (_, latency) = all_reduces
    return latency, large / (took - latency)


def predicted_seconds(tokens: int, computing: float, all_reduces: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of forward and backward, with the speed at which `off` computes alone in so many seconds."""
    latency, bytes_per_second = bandwidth(all_reduces)
    shape = ModelShape("", LAYERS, HIDDEN, HEADS, HEADS, 4 * HIDDEN, False, 64, True, "LayerNorm", "rope", True, tokens)
    reached = Efficiency(matmul=1.0, attention=1.0, memory=1.0, network=1.0)
    hardware = replace(HARDWARE["h100"], memory_bandwidth=1e30, ramp_tokens=0.0, efficiency=reached)

    def seconds(way: str, flops: float, link: float, once: float) -> float:
        layout = Layout(2, element_bytes=4, fused_kernels=False, overlap_tp_comm=way)
        costs = ModelCosts(shape, replace(hardware, flops=flops, nvlink=link, latency=once), layout, tokens)
        pieces = tuple(piece for piece in shape.pieces if piece.layer >= 0)
        return sum(costs.op_time(Work(kind, pieces, (Extent(tokens, 0.0),), float(tokens))) for kind in "FB")

    flops = seconds(OFF, 1.0, 1e30, 0.0) / computing  # FLOPs are seconds at one a second
    return {way: seconds(way, flops, bytes_per_second, latency) for way in (OFF, HALVES)}
