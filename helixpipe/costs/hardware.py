"""Machines as data: what a GPU computes, holds and sends, each figure with its source.

FLOP/s are dense (no sparsity), bfloat16 with float32 accumulation. Bandwidths are bytes per second *in one direction*:
vendors state NVLink and PCIe as the sum of both directions, so half of that stands here; network adapters are full
duplex and stated a direction.

Sources: [A100] NVIDIA A100 datasheet (80 GB SXM); [H100] NVIDIA H100 datasheet (SXM5); [H200] NVIDIA H200 datasheet
(SXM); [DGX] DGX A100, DGX H100 and DGX H200 user guides: adapters a node; [A800] the A100 with NVLink cut from 600 to
400 GB/s (NVIDIA's statement of November 2022); [H20] vendors' tables: 148 TFLOP/s, 96 GB HBM3 at 4.0 TB/s, NVLink as
H100; [Helix] network of the published setups of HelixPipe: A800 nodes with 4 x 100 Gb/s, H20 nodes with 4 x 200 Gb/s.
[B200] DGX B200 datasheet, a GPU's eighth of it; [GB200] GB200 NVL72 datasheet, a GPU's 72nd; [H800] DeepSeek-V3's
report: H100 with NVLink cut to 400 GB/s, 8 x 400 Gb/s a node; [L40S], [RTX] NVIDIA's datasheets of L40S and RTX PRO
6000 Blackwell Server Edition, which have PCIe in place of NVLink; [MI300X] AMD's datasheet. Where a datasheet names no
node, 8 GPUs with 8 adapters of 400 Gb/s, or without NVLink 4 with 2 of 200, are assumed. Memory is in GiB: a stack
called 16 GB holds 16 GiB, and so do the host's modules: 2 TB are 32 x 64 GiB.

Sources of the host's: [Rome] 2 x EPYC 7742 with 8 channels of DDR4-3200 each (DGX A100); [SPR] 2 x Xeon 8480C with 8
channels of DDR5-4800 each (DGX H100 and H200); [SPPO] arXiv 2503.10377: A100 nodes with 2 TB, and 10.59 GB copied in
821 ms on each GPU, 12.9 GB/s; [pairs] topology of an 8 x A100 node, where each two GPUs are behind the same switch
(NVIDIA/nvbandwidth, issue 53); [each] each H100 with a PCIe 5 x16 link of its own (MLPerf Inference 4.1, description of
NVIDIA's 8 x H200 node: 504 GB/s between its GPUs and PCIe).

Efficiencies are assumptions, not data: what training usually reaches of the figures above, somewhat less than the best
kernels alone (clocks fall under load, launches leave gaps). Each may be given by a flag.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from helixpipe.common.errors import UserError
from helixpipe.common.flags import nearest_name
from helixpipe.costs.attention_kernels import KERNEL_SHARES, UNFUSED, attention_share
from helixpipe.costs.thread_blocks import fitting_blocks

TERA, GIGA, GIB = 1e12, 1e9, 2.0**30

DEFAULT_HARDWARE = "h100"

HOST_MEMORY_SHARE = 0.75
"""Share of its peak that the host's memory reaches."""


@dataclass(frozen=True)
class Efficiency:
    """Share of the peak that is reached: by matrix products, by attention kernels, of the memory's bandwidth, of
    NVLink's and the network's, and of PCIe's between device and host."""

    matmul: float = 0.65
    attention: float = 0.63
    """Of FlashAttention-2 with heads of 128 channels; see `Hardware.attention`."""
    memory: float = 0.75
    network: float = 0.75
    host: float = 0.8
    """A GPU alone copies 25 to 26 GB/s over 32 (A100; NVIDIA/nvbandwidth, issue 11), 52.8 over 64 (H100; issue 24)."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value <= 1:
                raise UserError(f"--{name}-efficiency {value:g} must be above 0 and at most 1.")


@dataclass(frozen=True)
class Hardware:
    """One kind of node. flops: a second, of one GPU. Bandwidths: bytes a second, in one direction.

    nvlink: between one GPU and the others of its node. network: of a whole node, in all `adapters` together.
    host_link: of the PCIe link between one GPU and its switch, and between a switch and the processor. gpus_per_uplink:
    GPUs behind one switch. host_memory: bytes of a node. host_memory_bandwidth: of a node, reading and writing
    together. latency: seconds before a message's or a copy's first byte arrives. device: what the driver calls the GPU.
    """

    name: str
    flops: float
    memory: float
    memory_bandwidth: float
    nvlink: float
    network: float
    adapters: int
    host_link: float
    gpus_per_uplink: int
    host_memory: float
    host_memory_bandwidth: float
    device: str = ""
    gpus_per_node: int = 8
    efficiency: Efficiency = Efficiency()
    latency: float = 10e-6
    """A few microseconds of NCCL's protocol and of the wire, rounded up."""
    short_chunk: int = 2048
    """Tokens of a microbatch below which an op's kernels no longer keep the GPU busy. Seq1F1B measures 3655, 3449 and
    3262 tokens a second and GPU (2.7B, A100) with chunks of 8k, 4k and 2k tokens on average; nothing shorter."""
    ramp_tokens: float = 128
    """Rows whose time a matrix product loses while it fills the GPU and runs empty: n rows take as long as n + this
    many would at the full share. One tile of the usual kernels; it gives most of what those chunks lose."""
    interference: float = 0.1
    """Share of its own time by which a collective slows down the kernels it runs beside, of whose multiprocessors and
    memory bandwidth it takes a part. An assumption, as the efficiencies are."""
    pod_nodes: int = 32
    """Nodes of a pod, within which the network is as fast as the nodes' adapters: a scalable unit of DGX SuperPOD (its
    reference architecture, H100). Llama 3's pods have 384 (Grattafiori et al., 2024, section 3.3.1)."""
    oversubscription: float = 1.0
    """How many times more the nodes of a pod can send than the spine takes from a pod: 1 in a SuperPOD, 7 for Llama 3
    (as above)."""
    generation: str = "ampere"
    """Which of `KERNEL_SHARES` its kernels of core attention reach."""
    processors: int = 132
    """SMs of a GPU."""
    block_bandwidth: float = 10.6 * GIGA
    """Bytes a second that one thread block of a communicator carries, so that 32, as many as NCCL takes at most, fill
    an H100's NVLink. NCCL counts with as much: two channels for each link of 20 GB/s, 20.6 on Hopper (graph/paths.cc,
    ncclTopoGetNchannels). Not measured."""
    duplex: float = 0.7
    """What of two directions' bandwidth is left to both together when both are in use: of an A100's 2 x 25.5 GB/s, 24
    out of the device and 12.5 into it (NVIDIA/nvbandwidth, issue 11). Taken to be the same on other hosts."""

    @property
    def title(self) -> str:
        """The preset's name, and the peak where it is not the preset's."""
        own = HARDWARE[self.name].flops if self.name in HARDWARE else self.flops
        return self.name if self.flops == own else f"{self.name} with a peak of {self.flops / TERA:g} TFLOP/s"

    def attention(self, channels: int, kernel: str) -> float:
        """Return the share of the peak that a fused kernel reaches with heads of so many channels. Raises UserError for
        one that these GPUs do not have.
        """
        shares = KERNEL_SHARES[self.generation]
        if kernel not in shares:
            known = ", ".join((UNFUSED, *shares))
            raise UserError(f"--attention-kernel {kernel} does not run on {self.name}; valid there are {known}.")
        return min(self.efficiency.attention * shares[kernel] * attention_share(channels, kernel), 1.0)

    def message_bandwidth(self, link: float, ends: int) -> float:
        """Bytes a second of a message over a link, in a pipeline whose busiest rank is an end of so many channels: its
        communicator has as many thread blocks as leave room for those of the others."""
        return min(link, fitting_blocks(ends, self.processors) * self.block_bandwidth)

    def peer_bandwidth(self, gpus_sending: int, same_node: bool, same_pod: bool = True) -> float:
        """Bytes a second from one GPU to one on another (or the same) node while `gpus_sending` of its node send.

        Adapters are shared evenly; a GPU that sends alone uses one adapter. From pod to pod all nodes send at once, and
        share what the spine takes.
        """
        if same_node:
            return self.nvlink * self.efficiency.network
        share = self.network / max(gpus_sending, self.adapters) * self.efficiency.network
        return share if same_pod else share / self.oversubscription

    def ring_bandwidth(self, size: int) -> float:
        """Bytes a second that each member of a group of `size` neighbouring GPUs passes on in a collective, while all
        such groups have one.

        Within a node, NVLink's. A group on several nodes leaves each of them once, on all its adapters together; where
        such groups do not fill whole nodes, two share one.
        """
        if size <= self.gpus_per_node:
            return self.nvlink * self.efficiency.network
        groups = 2 if size % self.gpus_per_node else 1
        return min(self.nvlink, self.network / groups) * self.efficiency.network

    def host_bandwidth(self, both: bool) -> float:
        """Bytes a second in one direction between one GPU and host memory while all GPUs of the node copy.

        both: they copy in both directions. The least of three shares: of a switch's link to the processor, which the
        GPUs behind it share; of the GPU's own link; of the host's memory. Adapters take nothing of these: what they
        send they read from a GPU behind the same switch.
        """
        link = self.host_link * self.efficiency.host / min(self.gpus_per_uplink, self.gpus_per_node)
        memory = self.host_memory_bandwidth * HOST_MEMORY_SHARE / self.gpus_per_node
        return min(link * self.duplex, memory / 2) if both else min(link, memory)


_AMPERE = Efficiency(matmul=0.69, attention=0.6, memory=0.85)
"""What unlike tables of four papers agree on: Megatron-LM's of 2021, Zero Bubble's, MPT's without recomputation and
Seq1F1B's (docs/reproduction.md). FlashAttention-2 alone reaches 189 of 312 TFLOP/s (its paper, figure 4)."""

_HOPPER = Efficiency(matmul=0.6, attention=0.4)
"""FlashAttention-2 reaches about a third to a half of Hopper's peak (its paper: 335 of 989 TFLOP/s; version 3: 740)."""

_H20 = Efficiency(matmul=0.8, attention=0.7)
"""A seventh of H100's arithmetic beside the whole of its memory: the arithmetic is easily kept busy."""

_BLACKWELL = Efficiency(matmul=0.6, attention=0.2)
"""Assumed: matrix products as on Hopper; FlashAttention-2, which was not written for it, about as fast as there."""

_CDNA = Efficiency(matmul=0.45, attention=0.3)
"""Assumed: less than on Hopper, as published comparisons of training find."""

HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        hardware.name: hardware
        for hardware in (
            Hardware(
                "a100-80",
                flops=312 * TERA,  # [A100]
                memory=80 * GIB,  # [A100] five stacks of 16 GiB
                memory_bandwidth=2039 * GIGA,  # [A100]
                nvlink=300 * GIGA,  # [A100] 600 both ways
                network=200 * GIGA,  # [DGX] 8 x 200 Gb/s
                adapters=8,
                host_link=32 * GIGA,  # [A100] PCIe 4 x16, 64 both ways
                gpus_per_uplink=2,  # [pairs]
                host_memory=2048 * GIB,  # [SPPO]
                host_memory_bandwidth=409.6 * GIGA,  # [Rome]
                device="NVIDIA A100-SXM4-80GB",
                processors=108,  # [A100]
                efficiency=_AMPERE,
            ),
            Hardware(
                "a800",
                flops=312 * TERA,  # [A800] as A100
                memory=80 * GIB,  # [A800] as A100
                memory_bandwidth=2039 * GIGA,  # [A800] as A100
                nvlink=200 * GIGA,  # [A800] 400 both ways
                network=50 * GIGA,  # [Helix] 4 x 100 Gb/s
                adapters=4,
                host_link=32 * GIGA,  # [A100] PCIe 4 x16
                gpus_per_uplink=2,  # [pairs] as A100
                host_memory=2048 * GIB,  # as [SPPO]'s A100 nodes
                host_memory_bandwidth=409.6 * GIGA,  # [Rome] as A100
                device="NVIDIA A800-SXM4-80GB",
                processors=108,  # [A800] as A100
                efficiency=_AMPERE,
            ),
            Hardware(
                "h20",
                flops=148 * TERA,  # [H20]
                memory=96 * GIB,  # [H20]
                memory_bandwidth=4000 * GIGA,  # [H20]
                nvlink=450 * GIGA,  # [H20] 900 both ways
                network=100 * GIGA,  # [Helix] 4 x 200 Gb/s
                adapters=4,
                host_link=64 * GIGA,  # [H100] PCIe 5 x16
                gpus_per_uplink=1,  # [each] as H100
                host_memory=2048 * GIB,  # as H100
                host_memory_bandwidth=614.4 * GIGA,  # [SPR] as H100
                device="NVIDIA H20",
                processors=78,  # [H20]
                efficiency=_H20,
                generation="h20",
            ),
            Hardware(
                "h100",
                flops=989 * TERA,  # [H100] 1,979 with sparsity
                memory=80 * GIB,  # [H100]
                memory_bandwidth=3350 * GIGA,  # [H100]
                nvlink=450 * GIGA,  # [H100] 900 both ways
                network=400 * GIGA,  # [DGX] 8 x 400 Gb/s
                adapters=8,
                host_link=64 * GIGA,  # [H100] PCIe 5 x16, 128 both ways
                gpus_per_uplink=1,  # [each]
                host_memory=2048 * GIB,  # [DGX]
                host_memory_bandwidth=614.4 * GIGA,  # [SPR]
                device="NVIDIA H100 80GB HBM3",
                efficiency=_HOPPER,
                generation="hopper",
            ),
            Hardware(
                "h200",
                flops=989 * TERA,  # [H200] as H100
                memory=140 * GIB,  # [H200] 141 GB; drivers show 140.4 GiB
                memory_bandwidth=4800 * GIGA,  # [H200]
                nvlink=450 * GIGA,  # [H200] 900 both ways
                network=400 * GIGA,  # [DGX] 8 x 400 Gb/s
                adapters=8,
                host_link=64 * GIGA,  # [H200] PCIe 5 x16
                gpus_per_uplink=1,  # [each]
                host_memory=2048 * GIB,  # [DGX]
                host_memory_bandwidth=614.4 * GIGA,  # [SPR]
                device="NVIDIA H200",
                efficiency=_HOPPER,
                generation="hopper",
            ),
            Hardware(
                "h800",
                flops=989 * TERA,  # [H800] as H100
                memory=80 * GIB,
                memory_bandwidth=3350 * GIGA,
                nvlink=200 * GIGA,  # [H800] 400 both ways
                network=400 * GIGA,  # [H800] 8 x 400 Gb/s
                adapters=8,
                host_link=64 * GIGA,  # PCIe 5 x16
                gpus_per_uplink=1,
                host_memory=2048 * GIB,  # as H100
                host_memory_bandwidth=614.4 * GIGA,
                device="NVIDIA H800",
                efficiency=_HOPPER,
                generation="hopper",
            ),
            Hardware(
                "b200",
                flops=2250 * TERA,  # [B200] 36 PFLOP/s of 8, with sparsity
                memory=179 * GIB,  # [B200] 180 GB; drivers show 179 GiB
                memory_bandwidth=8000 * GIGA,  # [B200] 64 TB/s of 8
                nvlink=900 * GIGA,  # [B200] 1,800 both ways
                network=400 * GIGA,  # [B200] 8 x 400 Gb/s
                adapters=8,
                host_link=64 * GIGA,  # PCIe 5 x16
                gpus_per_uplink=1,
                host_memory=2048 * GIB,  # [B200] 2 TB, up to 4
                host_memory_bandwidth=716.8 * GIGA,  # [B200] 2 x Xeon 8570: 8 channels of DDR5-5600 each
                device="NVIDIA B200",
                processors=148,
                efficiency=_BLACKWELL,
                generation="blackwell",
            ),
            Hardware(
                "gb200",
                flops=2500 * TERA,  # [GB200] 360 PFLOP/s of 72, with sparsity
                memory=185 * GIB,  # [GB200] 13.4 TB of 72; drivers show 185 GiB
                memory_bandwidth=8000 * GIGA,  # [GB200] 576 TB/s of 72
                nvlink=900 * GIGA,  # [GB200] 1,800 both ways
                network=3600 * GIGA,  # a tray of 4 GPUs sends to the rack's others over NVLink
                adapters=4,
                oversubscription=18,  # a rack's GPUs send 50 GB/s each to others: an adapter of 400 Gb/s for 900 GB/s
                pod_nodes=18,  # trays of a rack
                host_link=450 * GIGA,  # [GB200] NVLink-C2C, 900 both ways
                gpus_per_uplink=2,
                host_memory=960 * GIB,  # [GB200] 480 GB for each of 2 Grace
                host_memory_bandwidth=1024 * GIGA,  # [GB200] 512 each
                device="NVIDIA GB200",
                gpus_per_node=4,
                processors=148,
                efficiency=_BLACKWELL,
                generation="blackwell",
            ),
            Hardware(
                "l40s",
                flops=362 * TERA,  # [L40S] 733 with sparsity
                memory=45 * GIB,  # [L40S] 48 GB; drivers show 45 GiB
                memory_bandwidth=864 * GIGA,  # [L40S]
                nvlink=32 * GIGA,  # [L40S] PCIe 4 x16
                network=50 * GIGA,
                adapters=2,
                host_link=32 * GIGA,
                gpus_per_uplink=1,
                host_memory=1024 * GIB,
                host_memory_bandwidth=614.4 * GIGA,
                device="NVIDIA L40S",
                gpus_per_node=4,
                processors=142,
                efficiency=_AMPERE,
            ),
            Hardware(
                "rtx-pro-6000",
                flops=500 * TERA,  # [RTX] an eighth of 4 PFLOP/s in 4 bits with sparsity
                memory=95.5 * GIB,  # [RTX] 96 GB; drivers show 95.6 GiB
                memory_bandwidth=1597 * GIGA,  # [RTX]
                nvlink=64 * GIGA,  # [RTX] PCIe 5 x16
                network=50 * GIGA,
                adapters=2,
                host_link=64 * GIGA,
                gpus_per_uplink=1,
                host_memory=1024 * GIB,
                host_memory_bandwidth=614.4 * GIGA,
                device="NVIDIA RTX PRO 6000 Blackwell Server Edition",
                gpus_per_node=4,
                processors=188,
                efficiency=_AMPERE,
            ),
            Hardware(
                "mi300x",
                flops=1307 * TERA,  # [MI300X] 2,615 with sparsity
                memory=192 * GIB,  # [MI300X]
                memory_bandwidth=5300 * GIGA,  # [MI300X]
                nvlink=448 * GIGA,  # [MI300X] 7 links of Infinity Fabric, 128 both ways each
                network=400 * GIGA,
                adapters=8,
                host_link=64 * GIGA,  # [MI300X] PCIe 5 x16
                gpus_per_uplink=1,
                host_memory=2048 * GIB,
                host_memory_bandwidth=614.4 * GIGA,
                device="AMD Instinct MI300X",
                processors=304,
                efficiency=_CDNA,
                generation="cdna3",
            ),
        )
    }
)
"""Every preset by its flag value."""


def find_device(name: str) -> Hardware | None:
    """The preset of the GPU that the driver calls so, if there is one."""
    return next((hardware for hardware in HARDWARE.values() if hardware.device == name), None)


def find_hardware(name: str, **efficiencies: float | None) -> Hardware:
    """The preset of that name, with the efficiencies that are given in place of its own. Raises UserError."""
    if name.lower() not in HARDWARE:
        near = nearest_name(name, HARDWARE)
        hint = f"did you mean {near}? " if near else ""
        raise UserError(f"--hardware {name} is unknown: {hint}known are {', '.join(HARDWARE)}.")
    hardware = HARDWARE[name.lower()]
    given = {key: value for key, value in efficiencies.items() if value is not None}
    for key, value in given.items():
        if not math.isfinite(value):
            raise UserError(f"--{key}-efficiency {value:g} must be above 0 and at most 1.")
    return replace(hardware, efficiency=replace(hardware.efficiency, **given))
