"""Kernels of core attention as data: what share of a GPU's peak each reaches, with heads of which sizes.

`Efficiency.attention` is the share of FlashAttention-2 with heads of 128 channels; the others are told over it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

UNFUSED, FA1, FA2, FA3, CUDNN = ATTENTION_KERNELS = ("unfused", "fa1", "fa2", "fa3", "cudnn")
"""Values of `--attention-kernel`. unfused: products, softmax and dropout one after another, as Megatron-LM has without
--use-flash-attn; fa1, fa2, fa3: FlashAttention of that version."""

KERNEL_SHARES: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "ampere": MappingProxyType({FA1: 0.5, FA2: 1.0, CUDNN: 1.0}),
        "hopper": MappingProxyType({FA1: 0.5, FA2: 1.0, FA3: 1.35, CUDNN: 1.25}),
        "blackwell": MappingProxyType({FA2: 1.0, CUDNN: 2.0}),
        "cdna3": MappingProxyType({FA2: 1.0}),
        "h20": MappingProxyType({FA1: 0.5, FA2: 1.0, FA3: 1.07, CUDNN: 1.07}),
    }
)
"""Over that of FlashAttention-2 on the same GPU, by the GPU's generation; what is not there does not run on it.

fa1: 94 TFLOP/s of an A100's 312, forward and backward, causal, heads of 128 channels, where version 2 has 189 (Dao,
2023, figure 4); taken to be the same elsewhere. fa3: up to 640 of an H100's 989 forward and 500 to 550 backward, where
version 2 reaches about 400; cudnn: somewhat less (Shah et al., 2024, figures 5 and 6). On an H20 version 2 is near what
arithmetic allows already; this is an assumption, and so is Blackwell's cudnn."""

SOFTMAX_CHANNELS = 18
"""Channels of a head whose products take as long as the softmax between them, for each query and key. FlashAttention-2
on an A100, causal, forward and backward: 171 TFLOP/s with heads of 64 channels, 189 with 128 (its figure 4)."""

_KERNEL_CHANNELS = (32, 64, 96, 128, 192, 256)
"""Sizes of heads that FlashAttention-2 has kernels for; others run padded to the next."""

_FA1_SHARES: Mapping[int, float] = MappingProxyType({32: 0.6, 64: 0.97, 128: 1.0})
"""FlashAttention-1 with heads of so many channels, of what it reaches with 128: 30, 29 and 18 % of an A100's peak with
128, 64 and 32, forward and backward, causal (figure 4 of version 2's paper for the first two)."""


def attention_share(channels: int, kernel: str = FA2) -> float:
    """Return what attention with heads of so many channels reaches, of what it reaches with 128; at most 1."""
    if kernel == FA1:
        return next((share for size, share in _FA1_SHARES.items() if size >= channels), 1.0)
    padded = next((size for size in _KERNEL_CHANNELS if size >= channels), channels)
    softmax = (1 + SOFTMAX_CHANNELS / 128) / (1 + SOFTMAX_CHANNELS / padded)
    return min(channels / padded * softmax, 1.0)
