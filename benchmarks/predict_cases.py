"""What predict.py runs: models, and ways of running a step of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

STYLE = "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope"
STYLE += " --untie-embeddings-and-output-weights"
SMALL = "--hidden-size 256 --num-attention-heads 8 --num-query-groups 2 --ffn-hidden-size 688 --vocab-size 512"

LEAST_ELEMENTS = 4096
"""Of a saved tensor that is offloaded: these models are small."""


@dataclass(frozen=True)
class Way:
    """A schedule with its virtual stages and chunks of a sequence, and the share of activations that it offloads."""

    schedule: str
    virtual_stages: int | None = None
    chunks: int = 1
    offload: str = "off"


WAYS: Mapping[str, Way] = MappingProxyType(
    {
        "1f1b": Way("1f1b"),
        "interleaved-1f1b": Way("interleaved-1f1b", 2),
        "zb1p": Way("zb1p"),
        "gpipe": Way("gpipe"),
        "zbv": Way("zbv"),
        "helix": Way("helix"),
        "weipipe": Way("weipipe"),
        "offload": Way("1f1b", offload="0.5"),
        "seq1f1b, k = 2": Way("seq1f1b", chunks=2),
        "seq1f1b, k = 4": Way("seq1f1b", chunks=4),
        "seq1f1b-interleaved": Way("seq1f1b-interleaved", 2, 4),
        "sppo": Way("sppo", chunks=4, offload="0.5"),
    }
)
"""By the name of its row; `offload` is 1f1b with half of each unit's activations in the host's memory."""

WHOLE = ("1f1b", "interleaved-1f1b", "zb1p", "gpipe", "zbv", "helix", "weipipe", "offload")
CHUNKED = ("1f1b", "offload", "seq1f1b, k = 2", "seq1f1b, k = 4", "seq1f1b-interleaved", "sppo")
OF_FOUR = ("1f1b", "zb1p", "helix")


@dataclass(frozen=True)
class Case:
    """One model, who runs it, and in which ways."""

    layers: int
    sequence: int
    micro: int
    microbatches: int
    model: str = SMALL
    ranks: int = 2
    ways: tuple[str, ...] = WHOLE
    dtype: str = "float32"

    def flags(self) -> list[str]:
        """Of `helixpipe profile`."""
        sizes = f"--num-layers {self.layers} --seq-length {self.sequence} --micro-batch-size {self.micro}"
        return f"{self.model} {STYLE} {sizes} --dtype {self.dtype}".split()


def on_gpus(sequence: int, hidden: int, ffn: int) -> Case:
    """Four ranks without tensor parallelism, in bfloat16; heads of 128 channels."""
    sizes = f"--hidden-size {hidden} --num-attention-heads {hidden // 128} --ffn-hidden-size {ffn} --vocab-size 8192"
    return Case(4, sequence, 1, 8, sizes, 4, OF_FOUR, "bfloat16")


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "128": Case(4, 128, 2, 8),
        "512": Case(4, 512, 1, 8),
        "1024": Case(4, 1024, 1, 4),
        "2048": Case(4, 2048, 1, 2, ways=CHUNKED),
        "tiny": Case(4, 32, 1, 8, ranks=4, ways=OF_FOUR),
        "gpu-8k": on_gpus(8 << 10, 4096, 11008),
        "gpu-32k": on_gpus(32 << 10, 2048, 5504),
        "gpu-128k": on_gpus(128 << 10, 512, 1376),
    }
)
"""The longer a sequence of the cases for GPUs, the narrower the model, so that four ranks fit on one of 80 GB."""

DEFAULT = ("128", "512", "1024", "2048")
