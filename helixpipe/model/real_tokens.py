"""Tells real tokens from padding in a microbatch, for routers of experts: no loss and no load counts padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class RealRows(NamedTuple):
    """The real tokens among the rows that a router is given.

    places: int64, their places among the rows of [s, b] in turn; None: all rows are real. lengths: the real tokens of
    each sample of the microbatch, on all ranks.
    """

    places: Tensor | None
    lengths: tuple[int, ...]


class RealTokens:
    """Real tokens of a microbatch, known on the host.

    Args:
        mask: [b, s] bool, on the host: whether each token is real.
        device: Where places are wanted.
    """

    def __init__(self, mask: Tensor, device: torch.device | None = None):
        self.mask, self._device = mask, device
        self.lengths: tuple[int, ...] = tuple(mask.sum(dim=1).tolist())
        self._known: dict[tuple[range, ...], RealRows] = {}

    @property
    def count(self) -> int:
        """Real tokens of all samples."""
        return sum(self.lengths)

    def places(self) -> list[Tensor]:
        """Return the places that have been asked for so far."""
        return [each.places for each in self._known.values() if each.places is not None]

    def rows(self, runs: Sequence[range]) -> RealRows:
        """Return the real tokens among the rows of some runs of every sample's tokens; copied once for all layers."""
        key = tuple(runs)
        if key not in self._known:
            real = torch.cat([self.mask[:, run.start : run.stop] for run in runs], dim=1).t().flatten()
            places = None if bool(real.all()) else real.nonzero().flatten()
            if places is not None and self._device is not None and self._device.type == "cuda":
                places = places.pin_memory().to(self._device, non_blocking=True)
            self._known[key] = RealRows(places, self.lengths)
        return self._known[key]
