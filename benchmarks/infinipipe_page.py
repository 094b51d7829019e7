"""The tables of `benchmarks/infinipipe.py` as a page of their own, and in docs/infinipipe.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from helixpipe.costs.hardware import GIB, RESERVED_MEMORY, find_hardware
from helixpipe.planning.documents.lengths import DOCUMENTS

HARDWARE, NODES, TENSOR_PARALLEL = "a800", 4, 8
SEEDS = range(5)


def text(found: Mapping[str, Sequence[str]]) -> str:
    """The tables and the assumptions, as Markdown."""
    hardware = find_hardware(HARDWARE)
    share, usable = hardware.efficiency, (hardware.memory - RESERVED_MEMORY) / GIB
    parts: list[Sequence[str]] = [
        ["# Documents of all lengths, simulated"],
        ["Written by `make bench-infinipipe`; docs/infinipipe.md says what follows from it. Simulated, not measured."],
        ["Planning a batch of GitHub's lengths, 192K, in processor seconds of this machine:"],
        found["planning"],
        [
            f"Batches of {DOCUMENTS} documents, seeds {SEEDS.start} to {SEEDS.stop - 1}: spread (standard deviation "
            "over mean) of all chunks' times and tokens, the largest of the batches; of tokens also over chunks that "
            "hold whole documents; with as many slices by Algorithm 1 as mended; the slowest chunk over the mean, by "
            "Algorithm 1 and here:"
        ],
        found["balance"],
    ]
    if "steps" in found:
        parts += [
            [
                f"Steps of {DOCUMENTS} documents on {8 * NODES} GPUs, pipeline {NODES} x tensor parallel "
                f"{TENSOR_PARALLEL}: seconds, in bold over the first, recomputation, bubble:"
            ],
            found["steps"],
            [
                "Nothing is recomputed, or chunk by chunk what does not fit; s: core attention is; w: all but core "
                "attention; f: whole layers. `GiB!`: does not fit. (a), (c), (d) under 1f1b, rows as long as the "
                "longest document (a) or the context; (b) with its number of chunks tuned as well."
            ],
        ]
    parts += [
        ["Assumed:"],
        [
            f"- {HARDWARE}: {share.matmul:.0%} of {hardware.flops / 1e12:.0f} TFLOP/s in matrix products, "
            f"{share.attention:.0%} in attention, {share.memory:.0%} of memory bandwidth and NVLink, "
            f"{share.network:.0%} of the network's {hardware.network / 1e9:.0f} GB/s a node; {usable:.0f} of "
            f"{hardware.memory / GIB:.0f} GiB usable",
            "- tensor parallelism with sequence parallelism inside a node, where InfiniPipe has Ulysses and ZeRO-3",
            "- lengths as docs/infinipipe.md has them: interpolated between the figures that are published",
        ],
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"
