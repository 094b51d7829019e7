"""Layers over two ranks with a slow link between them: what hides their communication, measured and predicted.

    sudo make bench-tp-overlap-steps ARGS="[--rates 800mbit 400mbit 200mbit] [--shared tp a2a p2p] [--rounds 7]"

Two hosts of tools/netlab.py share weights (tensor parallelism), or tokens, whose ranks swap rows for heads or pass keys
and values round a ring. They run forward and backward of the same layers with each value of `--overlap-tp-comm` in
turn, over the link and with collectives that move nothing; figures are the least of the rounds, to which what else the
machine does only adds, and in pairs the forward is that of the next step. Matrix products and attention are waited for
instead of computed, unless --gigaflops 0 is given: a core that computes has no time to move tensors, as a GPU has.
Predicted is what the cost model (docs/costs.md) makes of them: its only times of kernels are in proportion to FLOPs, at
the speed of `off` with collectives that move nothing, and its link is as fast as `off` found it. (gloo's all-to-all
moves about half as much a second as the link carries.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from benchmarks.report import Figures, Outcome, markdown, progress
from helixpipe.common.errors import UserError
from helixpipe.common.flags import option
from helixpipe.costs.hardware import HARDWARE, Efficiency
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import A2A, HALVES, OFF, P2P, PAIRS, Layout, ModelShape
from helixpipe.program.costs import Work
from helixpipe.program.workload import Extent
from netlab.hosts import Lab
from netlab.job import parse_rate, returned

LAYERS, HIDDEN, HEADS = 4, 512, 8

WAYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"tp": (OFF, HALVES, PAIRS), A2A: (OFF, HALVES, PAIRS), P2P: (OFF, PAIRS)}
)
"""What two ranks share: the weights, or the tokens and how these attend; and the ways to hide what they send."""


@dataclass(frozen=True)
class Options(Figures):
    rates: tuple[str, ...] = option(("800mbit", "400mbit", "200mbit"), "Of the link.")
    shared: tuple[str, ...] = option(
        tuple(WAYS), "What ranks share: tp (weights), a2a or p2p (tokens, and how they attend)."
    )
    tokens: int = option(1024, "Of a sequence.", at_least=2)
    gigaflops: float = option(
        40.0, "GFLOP/s at which products are waited for, so that two cores do for all; 0: computed.", at_least=0
    )
    rounds: int = option(7, "Steps of each kind that count.", at_least=1)


def run(options: Options) -> Outcome:
    if unknown := [each for each in options.shared if each not in WAYS]:
        raise UserError(f"--shared {unknown[0]} is unknown; valid values are {', '.join(WAYS)}.")
    found = []
    for shared in options.shared:
        for rate in options.rates:
            found.append((shared, rate, measure(shared, rate, options)))
            progress(f"{shared}, {rate}: {found[-1][2]}")
    lines = [line(shared, rate, options.tokens, each) for shared, rate, each in found]
    heads = (
        "ranks share",
        "link",
        "Mbit/s",
        "alone, s",
        "off, s",
        "halves, s",
        "pairs, s",
        "halves gain",
        "pairs gain",
    )
    return Outcome("\n".join(markdown(heads, lines, "llrrrrrr")), figures=found)


def measure(shared: str, rate: str, options: Options) -> dict[str, Any]:
    """Return what the ranks return. Raises UserError where they fail."""
    sizes = (LAYERS, HIDDEN, HEADS, options.tokens, options.rounds, options.gigaflops * 1e9)
    with Lab(2, parse_rate(rate)) as lab:
        return dict(returned(lab, "netlab.tp_overlap_ranks:measure", shared, *sizes))


def line(shared: str, rate: str, tokens: int, found: dict[str, Any]) -> list[str]:
    """Measured, and in brackets predicted."""
    seconds = {name: min(each) for name, each in found["seconds"].items()}
    alone = seconds[f"{OFF} alone"]
    link = link_found(shared, tokens, alone, seconds[OFF])
    predicted = predicted_seconds(shared, tokens, alone, link)

    def of_way(way: str, figures: Callable[[str], str]) -> str:
        return figures(way) if way in predicted else ""

    def gain(way: str) -> str:
        measured, ours = seconds[OFF] / seconds[way], predicted[OFF] / predicted[way]
        return f"{measured:.3f} ({ours:.3f}), {measured / ours:.2f}"

    return [
        f"`{shared}`",
        f"{rate.removesuffix('mbit')} Mbit/s, {8e-6 * link:.0f}",
        f"{alone:.3f}",
        *(of_way(way, lambda way: f"{seconds[way]:.3f}") for way in (OFF, HALVES, PAIRS)),
        *(of_way(way, gain) for way in (HALVES, PAIRS)),
    ]


def link_found(shared: str, tokens: int, computing: float, off: float) -> float:
    """Bytes a second of the link with which `off`, which computes alone in so many seconds, is predicted to take as
    long as it did."""
    slow, fast = 1e3, 1e12
    for _ in range(80):
        link = math.sqrt(slow * fast)
        if predicted_seconds(shared, tokens, computing, link)[OFF] > off:
            slow = link
        else:
            fast = link
    return fast


def predicted_seconds(shared: str, tokens: int, computing: float, link: float) -> dict[str, float]:
    """Of forward and backward by each way, with the speed at which `off` computes alone in so many seconds and a link
    of so many bytes a second."""
    shape = ModelShape("", LAYERS, HIDDEN, HEADS, HEADS, 4 * HIDDEN, False, 64, True, "LayerNorm", "rope", True, tokens)
    reached = Efficiency(matmul=1.0, attention=1.0, memory=1.0, network=1.0)
    hardware = replace(HARDWARE["h100"], memory_bandwidth=1e30, ramp_tokens=0.0, efficiency=reached, latency=0.0)
    cut = Layout(2) if shared == "tp" else Layout(1, context_parallel=2, cp_comm_type=shared)

    def seconds(way: str, flops: float, bandwidth: float) -> float:
        layout = replace(cut, element_bytes=4, fused_kernels=False, overlap_tp_comm=way)
        costs = ModelCosts(shape, replace(hardware, flops=flops, nvlink=bandwidth), layout, tokens)
        pieces = tuple(piece for piece in shape.pieces if piece.layer >= 0)
        forward, backward = (Work(kind, pieces, (Extent(tokens, 0.0),), float(tokens)) for kind in "FB")
        if way == PAIRS:
            forward, backward = forward._replace(beside=backward), backward._replace(beside=forward)
        return costs.op_time(forward) + costs.op_time(backward)

    flops = seconds(OFF, 1.0, 1e30) / computing  # FLOPs are seconds at one a second
    return {way: seconds(way, flops, link) for way in WAYS[shared]}
