"""Published setups and the settings that are compared on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from helixpipe.cli.model import ModelOnCluster, ModelOptions, make_plan
from helixpipe.planning.memory.recompute import RecomputeOptions
from schedules.helix import HelixOptions

GPUS = ("h20", "a800")
SLICE = 16384
"""Tokens of a slice of the MLP where it is sliced; any size of a few thousand gives the same figures."""

PUBLISHED: Mapping[tuple[str, str, int, int], float] = MappingProxyType(
    {
        ("h20", "1.3b", 128, 8): 1.28,
        ("h20", "3b", 128, 8): 1.20,
        ("h20", "7b", 128, 8): 1.26,
        ("a800", "1.3b", 128, 8): 1.16,
        ("a800", "3b", 128, 8): 1.13,
        ("a800", "7b", 128, 8): 1.13,
    }
)
"""Measured throughput over the best of 1F1B, ZB1P and AdaPipe (Zhang et al., HelixPipe, 2025)."""


@dataclass(frozen=True)
class Setup:
    """tokens: of a sequence, in units of 1024. network_efficiency: in place of the hardware's."""

    hardware: str
    model: str
    tokens: int
    nodes: int
    network_efficiency: float | None = None

    def plan(self, chunk_size: int) -> ModelOnCluster:
        options = ModelOptions(
            model=f"helix-{self.model}",
            seq_length=self.tokens * 1024,
            hardware=self.hardware,
            nodes=self.nodes,
            tensor_parallel=8,
            global_batch_size=2 * self.nodes,
            chunk_size=chunk_size,
        )
        plan = make_plan(options, self.nodes, None, None)
        assert plan is not None
        if self.network_efficiency is None:
            return plan
        hardware = plan.costs.hardware
        network = hardware.network * self.network_efficiency / hardware.efficiency.network  # NVLink stays as it is
        return replace(plan, costs=replace(plan.costs, hardware=replace(hardware, network=network)))

    @property
    def published(self) -> float | None:
        return PUBLISHED.get((self.hardware, self.model, self.tokens, self.nodes))


@dataclass(frozen=True)
class Setting:
    """A schedule with its flags. mark: how the tables name what it recomputes."""

    schedule: str
    mark: str = ""
    recompute: RecomputeOptions = field(default_factory=RecomputeOptions)
    options: HelixOptions | None = None
    chunk_size: int = 0

    @property
    def marks(self) -> str:
        return self.mark if self.options is None else f"{self.mark} f{self.options.helix_folds}"


EVEN_RECOMPUTATION = (
    ("k", RecomputeOptions()),
    ("s", RecomputeOptions("selective")),
    ("w", RecomputeOptions("without-attention")),
    ("f", RecomputeOptions("full")),
)
BASELINES: Mapping[str, tuple[Setting, ...]] = MappingProxyType(
    {
        "1f1b": tuple(Setting("1f1b", mark, recompute) for mark, recompute in EVEN_RECOMPUTATION),
        "zb1p": tuple(Setting("zb1p", mark, recompute) for mark, recompute in EVEN_RECOMPUTATION),
        "adapipe": (Setting("adapipe", "a"),),
    }
)
_WITHOUT_ATTENTION = RecomputeOptions("without-attention")
_OURS = HelixOptions(helix_folds=2, helix_ship="attention", helix_spread_head=True)
PAPER = Setting("helix", "w", _WITHOUT_ATTENTION, replace(_OURS, helix_ship="qkv", helix_spread_head=False))
SHIPPED = Setting("helix", "w", _WITHOUT_ATTENTION, replace(_OURS, helix_spread_head=False))
SPREAD = Setting("helix", "w", _WITHOUT_ATTENTION, _OURS)
OURS = tuple(Setting("helix", "l", options=replace(_OURS, helix_folds=folds)) for folds in (2, 1))
SLICED = Setting("helix", "c", options=_OURS, chunk_size=SLICE)
"""Without one fold: with 2p microbatches it is slower than two in all of these setups."""

MARKS = (
    "k: everything is kept; w: all but core attention is recomputed; s: core attention is; f: whole layers are; "
    "a: adapipe's own choice; l: helix's, as little as fits; c: the same, and the MLP runs over slices and keeps its "
    "input (`--chunk-size`). f1, f2: `--helix-folds`."
)
