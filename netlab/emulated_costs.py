"""Computes what emulate.py's ops and messages take: a narrow model, times by hand, a link as measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Layout, ModelShape
from helixpipe.lowering.lower import lower
from helixpipe.lowering.project import LoweredProgram
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.program.costs import Load, Work
from helixpipe.program.workload import Chunk, Slice, Workload
from schedules import Shape, build

ELEMENT_BYTES = 4  # float32

PIECE_TIMES: Mapping[str, float] = MappingProxyType(
    {"embed": 1e-3, "norm": 0.5e-3, "qkv": 4e-3, "attn": 10e-3, "proj": 1.5e-3, "mlp": 8e-3, "head": 4e-3}
)
"""Seconds of each piece's forward for a whole microbatch: a layer takes 24 ms, attention two fifths of it."""


@dataclass(frozen=True)
class Link:
    """As measured with the executor's transport: seconds before the first byte arrives, and for each byte."""

    latency: float
    seconds_per_byte: float


@dataclass(frozen=True)
class Size:
    """Of a narrow model and of the step that is emulated. time_scale: of all op times."""

    ranks: int
    microbatches: int
    layers: int
    tokens: int = 512
    hidden: int = 64
    micro_batch_size: int = 1
    time_scale: float = 1.0

    @property
    def model(self) -> ModelCosts:
        """Return the costs with the model's bytes; the hardware is not looked at."""
        shape = ModelShape(
            name="emulated", layers=self.layers, hidden=self.hidden, heads=4, groups=1, ffn=4 * self.hidden,
            gated=False, vocab=128, tied=False, norm="RMSNorm", positions="rope", bias=False, seq_length=self.tokens,
        )  # fmt: skip
        layout = Layout(micro_batch_size=self.micro_batch_size, element_bytes=ELEMENT_BYTES, fused_kernels=False)
        return ModelCosts(shape, HARDWARE["h100"], layout, self.tokens)

    def costs(self, near: Link, far: Link, ranks_per_host: int = 1) -> EmulatedCosts:
        times = {name: seconds * self.time_scale for name, seconds in PIECE_TIMES.items()}
        return EmulatedCosts(times, near=near, far=far, ranks_per_host=ranks_per_host, model=self.model)


@dataclass(frozen=True)
class EmulatedCosts(PieceTimes):
    """Op times by hand; a message takes the latency of its link and its bytes at the link's speed.

    near: between ranks of one host; far: of two.
    """

    near: Link = Link(0.0, 0.0)
    far: Link = Link(0.0, 0.0)
    ranks_per_host: int = 1
    model: ModelCosts | None = None

    def op_time(self, work: Work) -> float:
        """Times by hand are those of `Size.tokens` tokens, however long the microbatches of documents are."""
        assert self.model is not None
        return super().op_time(work if work.whole is None else work._replace(whole=float(self.model.seq_length)))

    def transfer_time(self, load: Load) -> float:
        """Of a message; these programs have no other transfers that take time."""
        assert self.model is not None
        source, target = load.ranks
        link = self.near if source // self.ranks_per_host == target // self.ranks_per_host else self.far
        return link.latency + self.model.size(load.contents) * link.seconds_per_byte


@dataclass(frozen=True)
class Case:
    """A schedule and how it is asked for. shape: fields of `schedules.Shape`. documents:
    microbatches are by turns one document in four chunks and two documents of a chunk each."""

    schedule: str
    shape: Mapping[str, Any] = field(default_factory=dict)
    documents: bool = False

    def lowered(self, size: Size, costs: EmulatedCosts) -> LoweredProgram:
        ragged = alternating(size) if self.documents else None
        shape = Shape(size.ranks, size.microbatches, size.layers, costs=costs, ragged=ragged, **self.shape)
        return lower(build(self.schedule, shape), costs)


def alternating(size: Size) -> Workload:
    """See `Case.documents`."""
    quarter, half = size.tokens // 4, size.tokens // 2
    microbatches: list[tuple[Chunk, ...]] = []
    for number in range(size.microbatches):
        first = number + number // 2  # document
        if number % 2:
            microbatches.append(((Slice(first, 0, half),), (Slice(first + 1, 0, half),)))
        else:
            microbatches.append(tuple((Slice(first, start * quarter, quarter),) for start in range(4)))
    return Workload(tuple(microbatches))


_FOUR = {"chunks": 4}

CASES: Mapping[str, Case] = MappingProxyType(
    {
        "gpipe": Case("gpipe"),
        "1f1b": Case("1f1b"),
        "1f1b, recomputed": Case("1f1b", {"recompute": RecomputeOptions("full")}),
        "interleaved-1f1b, v = 2": Case("interleaved-1f1b", {"virtual_stages": 2}),
        "hanayo, v = 2": Case("hanayo", {"virtual_stages": 2}),
        "chimera": Case("chimera"),
        "zb1p": Case("zb1p"),
        "zb2p": Case("zb2p"),
        "zbv": Case("zbv"),
        "terapipe, k = 4": Case("terapipe", _FOUR),
        "seq1f1b, k = 4": Case("seq1f1b", _FOUR),
        "seq1f1b-interleaved, v = 2, k = 2": Case("seq1f1b-interleaved", {"virtual_stages": 2, "chunks": 2}),
        "sppo, k = 4": Case("sppo", _FOUR),
        "infinipipe, documents": Case("infinipipe", documents=True),
        "helix": Case("helix"),
        "weipipe": Case("weipipe"),
        "wzb2": Case("wzb2"),
    }
)
"""By name, as tables have it."""
