"""Predicts what network.py's engines send in a step, and how long a step takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from helixpipe.costs.by_hand import OpTimes
from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Layout, ModelShape
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.lower import lower
from helixpipe.lowering.project import LoweredProgram
from helixpipe.program.costs import Load
from helixpipe.program.program import Program
from helixpipe.program.stages import model_pieces
from helixpipe.simulate.simulator import simulate
from schedules import Shape, build

RANKS = 2
ELEMENT_BYTES = 4  # float32
VOCABULARY = 128
"""Small, and a multiple of what Megatron pads to: the rule that is tested counts layers alone."""


@dataclass(frozen=True)
class Link:
    """As measured: payload bytes a second in each direction, and seconds before the first byte arrives."""

    bytes_per_second: float
    latency: float

    def __str__(self) -> str:
        return f"payload {self.bytes_per_second * 8e-6:.1f} Mbit/s, latency {self.latency * 1e3:.2f} ms"


@dataclass(frozen=True)
class Case:
    """A model and its batch. A layer has exactly 12·H² weights beside its norms: all heads have keys and values, and
    the gated MLP's inner size is 8/3 H. One layer a rank, which is what the rule of G·S and 12·H compares."""

    sequence: int
    micro: int
    layers: int = 2
    hidden: int = 48  # a multiple of 3
    heads: int = 2
    microbatches: int = 4

    @property
    def ffn(self) -> int:
        return 8 * self.hidden // 3

    @property
    def size(self) -> tuple[int, ...]:
        """As engines.Problem has it."""
        shape = (self.layers, self.hidden, self.heads, self.heads, self.ffn, self.sequence, self.micro)
        return (*shape, self.microbatches)

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.microbatches * self.micro * self.sequence

    @property
    def weight(self) -> float:
        """G·S / 12·H: elements of a microbatch's hidden states over those of a layer's weights."""
        return self.micro * self.sequence / (12 * self.hidden)

    def __str__(self) -> str:
        return (
            f"{self.layers} layers, hidden {self.hidden}, {self.sequence} tokens, micro batch {self.micro}, "
            f"{self.microbatches} microbatches"
        )


def model_costs(case: Case) -> ModelCosts:
    """Used for its bytes; the hardware is not looked at."""
    model = ModelShape(
        name="network", layers=case.layers, hidden=case.hidden, heads=case.heads, groups=case.heads, ffn=case.ffn,
        gated=True, vocab=VOCABULARY, tied=False, norm="RMSNorm", positions="rope", bias=False,
        seq_length=case.sequence,
    )  # fmt: skip
    layout = Layout(micro_batch_size=case.micro, element_bytes=ELEMENT_BYTES, fused_kernels=False)
    return ModelCosts(model, HARDWARE["h100"], layout, case.sequence)


@dataclass(frozen=True)
class LinkTimes(OpTimes):
    """Op times as measured; a message takes the link's latency and its bytes at the link's rate."""

    link: Link = Link(1.0, 0.0)
    model: ModelCosts | None = None

    def transfer_time(self, load: Load) -> float:
        assert self.model is not None
        return self.link.latency + self.model.size(load.contents) / self.link.bytes_per_second


def lowered_schedule(case: Case, schedule: str) -> LoweredProgram:
    """As the ranks lower it."""
    return lower(build(schedule, Shape(RANKS, case.microbatches, case.layers)))


def is_fsdp(engine: str) -> bool:
    return engine in ("fsdp2", "fsdp2-once")


def sent_bytes(case: Case, engine: str) -> float:
    """Payload bytes that leave the rank which sends most, in one step."""
    if is_fsdp(engine):
        weights = model_costs(case).bytes.parameters(model_pieces(case.layers)) * ELEMENT_BYTES
        # A gather and a reduce-scatter each send all but one's own slice: for the forward, for the backward, gradients.
        moved = (RANKS - 1) / RANKS * weights
        return 2 * moved if engine == "fsdp2-once" else 3 * moved * case.microbatches / RANKS
    lowered, costs = lowered_schedule(case, engine), model_costs(case)
    bound = BoundCosts(lowered.program, costs)
    sent: Counter[int] = Counter()
    for message in lowered.messages:
        sent[message.source] += int(costs.size(bound.load(message.kind, message.ranks, message.unit).contents))
    return max(sent.values()) + summed_bytes(case, lowered.program)


def summed_bytes(case: Case, program: Program) -> float:
    """Return what a rank sends of the gradients of replicated stages, which are summed once a step: out and in again,
    all but its own slice."""
    copies = model_costs(case).bytes.parameters(tuple(program.copies(0))) * ELEMENT_BYTES
    return 2 * (RANKS - 1) / RANKS * copies


def predicted_seconds(case: Case, engine: str, link: Link, measured: Mapping[str, Any]) -> float:
    """Of a step. measured: of each engine its row from network_ranks.py; FSDP2's ops are those of the first schedule,
    because it runs the same pieces."""
    if not is_fsdp(engine):
        times = _op_times(measured[engine])
        lowered = lowered_schedule(case, engine)
        costs = LinkTimes(lowered.program, times, link=link, model=model_costs(case))
        after = summed_bytes(case, lowered.program) / link.bytes_per_second
        return simulate(lowered, costs).makespan + after
    times = _op_times(next(row for row in measured.values() if row["op_times"]))
    computing = sum(times.values()) * case.microbatches / RANKS
    units = case.layers + 2
    collectives = 2 * units if engine == "fsdp2-once" else 3 * units * case.microbatches / RANKS
    return computing + collectives * link.latency + sent_bytes(case, engine) / link.bytes_per_second


def _op_times(row: Mapping[str, Any]) -> dict[tuple[str, int, int], float]:
    return {(kind, stage, chunk): seconds for kind, stage, chunk, seconds in row["op_times"]}
