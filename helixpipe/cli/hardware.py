"""Flags for what a cluster has other than the named hardware."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from helixpipe.common.flags import option
from helixpipe.common.ranges import MOST_GIB, MOST_RANKS, MOST_TOKENS
from helixpipe.costs.hardware import GIB, GIGA, TERA, Hardware

MOST_BANDWIDTH = 1e6


def _bandwidth(unit: str, of: str) -> Any:
    """Return the flag for a bandwidth or a rate of arithmetic."""
    text = f"{unit}, {of} (default: the hardware's)."
    return option(None, text, metavar="X", more_than=0, at_most=MOST_BANDWIDTH, unit=f" {unit}")


def _gib(text: str, **ranges: Any) -> Any:
    """Return the flag for an amount of memory."""
    return option(None, f"{text} (default: the hardware's).", metavar="GIB", at_most=MOST_GIB, unit=" GiB", **ranges)


@dataclass(frozen=True)
class HardwareFlags:
    """Hardware figures that replace the preset's. None: not given."""

    gpus_per_node: int | None = option(
        None, "GPUs of a node (default: the hardware's, 8).", at_least=1, at_most=MOST_RANKS
    )
    peak_tflops: float | None = _bandwidth("TFLOP/s", "in bfloat16 without sparsity, of a GPU")
    memory_bandwidth: float | None = _bandwidth("GB/s", "of a GPU's memory")
    gpu_memory: float | None = _gib("GiB of a GPU", more_than=0)
    nvlink_bandwidth: float | None = _bandwidth("GB/s", "one way, between a GPU and the others of its node")
    network_bandwidth: float | None = _bandwidth("Gb/s", "one way, of a node to other nodes, over all its adapters")
    network_adapters: int | None = option(
        None,
        "Adapters that share that evenly; a GPU that sends alone uses one (default: the hardware's).",
        at_least=1,
        at_most=MOST_RANKS,
    )
    oversubscription: float | None = option(
        None,
        "How many times more the nodes of a pod can send than the spine takes from it (default: 1, a full network).",
        metavar="X",
        at_least=1,
        at_most=1000,
    )
    pod_nodes: int | None = option(
        None,
        "Nodes of a pod, below the spine; --oversubscription is about what leaves it (default: 32).",
        at_least=1,
        at_most=MOST_RANKS,
    )
    pcie_bandwidth: float | None = _bandwidth("GB/s", "one way, between a GPU and its host")
    network_latency: float | None = option(
        None,
        "Seconds before the first byte of a message or a copy is there (default: 1e-05).",
        metavar="SECONDS",
        at_least=0,
        at_most=60,
    )
    ramp_tokens: float | None = option(
        None,
        "Rows whose time a matrix product loses while it fills the GPU and runs empty: what short chunks cost "
        "(default: 128; 0: nothing).",
        metavar="TOKENS",
        at_least=0,
        at_most=MOST_TOKENS,
    )
    host_memory: float | None = _gib("GiB of host memory of a node, which its GPUs share evenly", at_least=0)


def as_flags_say(hardware: Hardware, flags: HardwareFlags) -> Hardware:
    """Return the hardware with the given figures in place of its own."""
    given: dict[str, tuple[float | None, float]] = {
        "gpus_per_node": (flags.gpus_per_node, 1),
        "flops": (flags.peak_tflops, TERA),
        "memory_bandwidth": (flags.memory_bandwidth, GIGA),
        "memory": (flags.gpu_memory, GIB),
        "nvlink": (flags.nvlink_bandwidth, GIGA),
        "network": (flags.network_bandwidth, GIGA / 8),
        "adapters": (flags.network_adapters, 1),
        "oversubscription": (flags.oversubscription, 1),
        "pod_nodes": (flags.pod_nodes, 1),
        "host_link": (flags.pcie_bandwidth, GIGA),
        "latency": (flags.network_latency, 1),
        "ramp_tokens": (flags.ramp_tokens, 1),
        "host_memory": (flags.host_memory, GIB),
    }
    changes: dict[str, Any] = {name: value * unit for name, (value, unit) in given.items() if value is not None}
    return replace(hardware, **changes)
