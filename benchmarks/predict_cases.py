"""Reads what predict.py runs: the models and ways of benchmarks/data/predict.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from benchmarks.data import rows

STYLE = "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope"
STYLE += " --untie-embeddings-and-output-weights"
SMALL = "--hidden-size 256 --num-attention-heads 8 --num-query-groups 2 --ffn-hidden-size 688 --vocab-size 512"

LEAST_ELEMENTS = 4096
"""Of a saved tensor that is offloaded: these models are small."""


@dataclass(frozen=True)
class Way:
    """A schedule with its virtual stages and chunks of a sequence, the share of activations that it offloads,
    and where its head is."""

    name: str
    schedule: str
    virtual_stages: int | None = None
    chunks: int = 1
    offload: str = "off"
    vocabulary: str = "ends"


@dataclass(frozen=True)
class Case:
    """One model, who runs it, and in which ways."""

    name: str
    layers: int
    sequence: int
    micro: int
    microbatches: int
    model: str = SMALL
    ranks: int = 2
    ways: tuple[str, ...] = ("1f1b", "interleaved-1f1b", "zb1p", "gpipe", "zbv", "helix", "weipipe", "offload")
    dtype: str = "float32"
    default: bool = False

    def flags(self) -> list[str]:
        """Of `helixpipe profile`."""
        sizes = f"--num-layers {self.layers} --seq-length {self.sequence} --micro-batch-size {self.micro}"
        return f"{self.model} {STYLE} {sizes} --dtype {self.dtype}".split()


WAYS: Mapping[str, Way] = MappingProxyType({way.name: way for way in rows("predict.toml", "way", Way)})
CASES: Mapping[str, Case] = MappingProxyType({case.name: case for case in rows("predict.toml", "case", Case)})
DEFAULT = tuple(name for name, case in CASES.items() if case.default)
