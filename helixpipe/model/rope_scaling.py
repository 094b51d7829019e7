"""Computes RoPE's frequency for each pair of channels, scaled where a model's context is extended.

All in float32, as megatron-core and transformers compute them, in an order of operations that gives the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """Changes of RoPE's frequencies.

    kind: `none`; `llama3`: slow frequencies are divided by `factor`, fast ones are left, and those between are blended
    (Grattafiori et al., 2024); `yarn`: the same with another ramp, and queries and keys are made longer (Peng et al.,
    2023). Position interpolation, by which every frequency is divided (Chen et al., 2023), goes with any but yarn.
    original_length: longest sequence that the model was trained on before. low, high: turns within it (llama3) at and
    below which a frequency is slow, at and above which it is fast. beta_slow, beta_fast: the same of yarn, whose ramp
    begins and ends at whole channels where `round_ramp`. mscale, mscale_all_dim: of the length of queries and keys.
    """

    kind: Literal["none", "llama3", "yarn"] = "none"
    factor: float = 1.0
    interpolation: float = 1.0
    original_length: int = 8192
    low: float = 1.0
    high: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    round_ramp: bool = True
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    @property
    def length(self) -> float:
        """Return what rotated channels are multiplied by."""
        if self.kind != "yarn" or self.factor <= 1:
            return 1.0
        growth = 0.1 * math.log(self.factor)
        return (growth * self.mscale + 1.0) / (growth * self.mscale_all_dim + 1.0)

    @property
    def description(self) -> str | None:
        """Return the extension of the context in words; None if there is none."""
        if self.kind == "none" or self.factor == 1:
            return None
        name = "YaRN" if self.kind == "yarn" else "Llama 3's RoPE scaling"
        return (
            f"{name}: {self.original_length:,} x {self.factor:g} = {int(self.original_length * self.factor):,} tokens"
        )


def frequencies(channels: int, base: float, scaling: RopeScaling) -> Tensor:
    """Angle of each pair of that many rotated channels from one token to the next: float32 [channels / 2]."""
    periods = base ** (torch.arange(0, channels, 2, dtype=torch.float32) / channels)
    plain = 1.0 / periods
    if scaling.kind == "llama3":
        plain = _llama3(plain, scaling)
    elif scaling.kind == "yarn":
        kept = _yarn_kept(channels, base, scaling)
        plain = 1.0 / (scaling.factor * periods) * (1 - kept) + plain * kept
    return plain / scaling.interpolation


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    factor, low, high = scaling.factor, scaling.low, scaling.high
    lengths = 2 * math.pi / plain  # of waves, in tokens
    slow, fast = lengths > scaling.original_length / low, lengths < scaling.original_length / high
    share = (scaling.original_length / lengths - low) / (high - low)
    between = (1 - share) * plain / factor + share * plain
    return torch.where(slow, plain / factor, torch.where(fast, plain, between))


def _yarn_kept(channels: int, base: float, scaling: RopeScaling) -> Tensor:
    """Share of each frequency that is left as it is: 1 for those that turn more than beta_fast times in the original
    length, 0 for those that turn less than beta_slow times."""

    def pair(turns: float) -> float:
        return channels * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.round_ramp:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, channels - 1)
    if first == last:
        last += 0.001
    return 1 - torch.clamp((torch.arange(channels // 2, dtype=torch.float32) - first) / (last - first), 0, 1)
