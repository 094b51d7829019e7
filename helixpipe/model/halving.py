"""Where the tokens of a chunk are cut into halves, and in which order ranks' rows have them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from helixpipe.model.options import Microbatch, UnitContext


@dataclass(frozen=True)
class Halving:
    """Where the tokens of a chunk are cut. tokens: those of this context-parallel rank. ranks: tensor-parallel ones
    that share rows outside attention and MLP; 1 without sequence parallelism."""

    tokens: int
    ranks: int

    @property
    def rows(self) -> tuple[int, int]:
        """Of each half on each rank."""
        rows = self.tokens // self.ranks
        return rows - rows // 2, rows // 2

    def half(self, which: int) -> range:
        """The tokens of a half."""
        first = self.rows[0] * self.ranks
        return range(self.tokens)[first:] if which else range(first)

    @property
    def possible(self) -> bool:
        return self.rows[1] > 0

    def gathered_order(self, device: torch.device) -> Tensor | None:
        """The tokens in the order in which ranks' rows follow one another; None where it is their own."""
        if self.ranks == 1 or not self.possible:
            return None
        every = torch.arange(self.tokens, device=device)
        parts = [every[half.start : half.stop].view(self.ranks, -1) for half in map(self.half, (0, 1))]
        return torch.cat(parts, dim=1).flatten()


def in_gathered_order(batch: Microbatch, context: UnitContext, ranks: int) -> tuple[Microbatch, UnitContext]:
    """A chunk with its tokens and their positions in the order of ranks' rows, as a microbatch of its own, and the unit
    on that."""
    tokens = batch.tokens[:, context.tokens]
    order = Halving(tokens.size(1), ranks).gathered_order(tokens.device)
    if order is None:
        return batch, context
    positions = batch.position_ids
    if positions is not None:
        positions = positions[:, context.tokens]
    elif batch.documents is not None:
        positions = batch.documents.positions()[context.tokens].t()
    else:
        positions = torch.arange(context.offset, context.offset + tokens.size(1), device=tokens.device)[None]
    labels, mask = batch.labels[:, context.tokens], batch.loss_mask[:, context.tokens]
    moved = Microbatch(tokens[:, order], labels[:, order], mask[:, order], positions[:, order])
    return moved, context._replace(offset=0, length=None)
