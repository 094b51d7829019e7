"""Layers of experts over two ranks with a slow link between them: pairs measured and predicted.

    sudo make bench-expert-overlap-steps ARGS="[--rates 200mbit] [--rounds 7]"

Two hosts of tools/netlab.py, a pipeline of one rank each, run forward and backward of several units with
`--overlap-tp-comm off` and `pairs` in turn, over the link and with exchanges that move nothing. Times are medians of
the rounds, exposed shares medians over rounds that are paired with each other. Matrix products are waited for instead
of computed, unless --gigaflops 0 is given: a core that computes has no time to move tensors, as a GPU has. Predicted is
what the cost model (docs/costs.md) makes of them: its only times of kernels are in proportion to FLOPs, at the speed of
`off` with exchanges that move nothing, and its network is the link as exchanges on it were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from benchmarks.report import Figures, Outcome, markdown, progress
from helixpipe.common.flags import option
from helixpipe.costs.hardware import HARDWARE, Efficiency
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import OFF, PAIRS, Layout, ModelShape
from helixpipe.program.costs import Work
from helixpipe.program.workload import Extent
from netlab.hosts import Lab
from netlab.job import parse_rate, returned

LAYERS, HIDDEN, HEADS, EXPERTS, TOPK = 2, 256, 4, 4, 2


@dataclass(frozen=True)
class Options(Figures):
    rates: tuple[str, ...] = option(("200mbit", "100mbit"), "Of the link.")
    tokens: int = option(1024, "Of a sequence.", at_least=2)
    units: int = option(8, "Microbatches of a step.", at_least=2)
    gigaflops: float = option(
        10.0, "GFLOP/s at which products are waited for, so that two cores do for all; 0: computed.", at_least=0
    )
    rounds: int = option(7, "Steps of each kind that count.", at_least=1)


def run(options: Options) -> Outcome:
    shape = ModelShape(
        *("", LAYERS, HIDDEN, HEADS, HEADS, 4 * HIDDEN, False, 64, True, "LayerNorm", "rope", False, options.tokens),
        experts=EXPERTS, mixed=(1,), topk=TOPK, expert_ffn=4 * HIDDEN,
    )  # fmt: skip
    found = {}
    for rate in options.rates:
        found[rate] = measure(rate, shape, options)
        progress(f"{rate}: {found[rate]}")
    lines = [line(rate, shape, options.units, each, options.gigaflops > 0) for rate, each in found.items()]
    heads = (
        "link",
        "Mbit/s",
        "off, s",
        "pairs, s",
        "exchange in off",
        "exposed in pairs",
        "computing alone, s",
        "gradients differ",
    )
    return Outcome("\n".join(markdown(heads, lines, "lrrrrrrr")), figures=found)


def measure(rate: str, shape: ModelShape, options: Options) -> dict[str, Any]:
    """Return what the ranks return. Raises UserError where they fail."""
    arguments = asdict(shape), options.units, options.rounds, options.gigaflops * 1e9
    with Lab(2, parse_rate(rate)) as lab:
        return dict(returned(lab, "netlab.experts_ranks:measure", *arguments))


def line(rate: str, shape: ModelShape, units: int, found: dict[str, Any], waited: bool) -> list[str]:
    """Measured, and in brackets predicted."""
    seconds = found["seconds"]
    (large, took), (_, latency) = found["all_to_all"]
    link, alone = large / (took - latency), median(seconds[f"{OFF} alone"])
    predicted = predicted_seconds(shape, units, alone, link, latency, waited)
    return [
        rate,
        f"{8e-6 * large / (took - latency):.0f}",
        *(f"{median(seconds[way]):.3f} ({predicted[way]:.3f})" for way in (OFF, PAIRS)),
        *(f"{100 * exposed(seconds, way):.1f} % ({100 * (1 - alone / predicted[way]):.1f} %)" for way in (OFF, PAIRS)),
        f"{alone:.3f}, in pairs {median(seconds[f'{PAIRS} alone']):.3f}",
        f"{found['gradient_difference']:.0e}",
    ]


def exposed(seconds: dict[str, Sequence[float]], way: str) -> float:
    """The share of a step that it takes longer than with exchanges that move nothing."""
    return median(1 - alone / whole for whole, alone in zip(seconds[way], seconds[f"{way} alone"], strict=True))


def predicted_seconds(
    shape: ModelShape, units: int, computing: float, link: float, latency: float, waited: bool
) -> dict[str, float]:
    """Of a step, with the speed at which `off` computes alone in so many seconds. waited: products are waited for, so
    that nothing holds them up."""
    reached = Efficiency(matmul=1.0, attention=1.0, memory=1.0, network=1.0)
    hardware = replace(
        HARDWARE["h100"],
        interference=0.0 if waited else HARDWARE["h100"].interference,
        memory_bandwidth=1e30,
        ramp_tokens=0.0,
        efficiency=reached,
        gpus_per_node=1,
        adapters=1,
    )
    extents, pieces = (Extent(shape.seq_length, 0.0),), tuple(piece for piece in shape.pieces if piece.layer >= 0)

    def seconds(way: str, flops: float, link: float, once: float) -> float:
        layout = Layout(element_bytes=4, fused_kernels=False, overlap_tp_comm=way, expert_parallel=2)
        costs = ModelCosts(
            shape, replace(hardware, flops=flops, network=link, latency=once), layout, shape.seq_length, 2
        )
        forward, backward = (Work(kind, pieces, extents, float(shape.seq_length)) for kind in "FB")
        both = forward._replace(beside=backward), backward._replace(beside=forward)
        apart = costs.op_time(forward) + costs.op_time(backward)
        return apart + (units - 1) * (sum(map(costs.op_time, both)) if way == PAIRS else apart)

    flops = seconds(OFF, 1.0, 1e30, 0.0) / computing  # FLOPs are seconds at one a second
    return {way: seconds(way, flops, link, latency) for way in (OFF, PAIRS)}
