"""Context parallelism: the ranks of a group share every chunk's tokens, and exchange what core attention needs.

Outside core attention each rank has 1/cp of a chunk's rows and runs alone. Two ways to attend:

- `a2a` (Ulysses; Jacobs et al., 2023): rank r has the r-th of cp equal runs of the chunk, or of each of its halves
  where these run in turns (`halves.py`). Before core attention ranks swap rows for heads (`to_heads`), after it they
  swap back (`to_rows`); in between each has heads / cp of all rows, so chunks, documents and stored keys and values are
  as without context parallelism.
- `p2p` (ring attention; Liu et al., 2023): rank r has the runs r and 2cp-1-r of 2cp equal ones, so that all ranks have
  as much of the causal triangle to do. Keys and values go round the ring (`ring_attention.py`).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property
from math import lcm

import torch
import torch.distributed as dist
from torch import Tensor

from helixpipe.costs.models import A2A, P2P
from helixpipe.model.collectives import ForwardBeside, Started, begin, end
from helixpipe.model.halving import Halving
from helixpipe.model.options import Microbatch, UnitContext


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share a chunk's rows, and how they attend. group: None for one rank alone. ranks_of_half:
    where chunks run in halves, how many tensor-parallel ranks share the rows of each; 0 where they run whole."""

    group: dist.ProcessGroup | None = None
    comm_type: str = A2A
    ranks_of_half: int = 0

    @cached_property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @cached_property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @cached_property
    def swaps(self) -> bool:
        """Whether ranks swap rows for heads around core attention."""
        return self.size > 1 and self.comm_type == A2A

    @cached_property
    def rings(self) -> bool:
        """Whether keys and values go round: every rank then stores its own rows of them."""
        return self.size > 1 and self.comm_type == P2P

    def runs(self, offset: int, length: int, rank: int | None = None) -> tuple[range, ...]:
        """The runs of tokens that a rank (None: this one) has of the chunk of `length` tokens that begins at `offset`,
        ascending; equally long, but for halves of an odd number of rows. Raises RuntimeError where the ranks cannot
        share the chunk evenly."""
        if self.size == 1:
            return (range(offset, offset + length),)
        rank = self.rank if rank is None else rank
        parts = (rank, 2 * self.size - 1 - rank) if self.rings else (rank,)
        count = self.size * len(parts)
        if length % count:
            raise RuntimeError(f"{length} tokens of a chunk cannot be shared by {self.size} context-parallel ranks")
        each = length // count
        if self.swaps and self.ranks_of_half:
            halves, start = Halving(each, self.ranks_of_half), offset
            runs = []
            for half in map(halves.half, (0, 1)):
                runs.append(range(start + rank * len(half), start + (rank + 1) * len(half)))
                start += self.size * len(half)
            return tuple(filter(None, runs))
        return tuple(range(offset + part * each, offset + (part + 1) * each) for part in parts)

    def share(self, batch: Microbatch, context: UnitContext) -> tuple[Microbatch, UnitContext]:
        """Return this rank's rows of a chunk, with their positions, as a microbatch of their own, and the unit on
        that.
        """
        if self.size == 1:
            return batch, context
        offset, length = context.offset, context.length or batch.tokens.size(1) - context.offset
        runs = self.runs(offset, length)
        positions = batch.position_ids
        if positions is not None:
            positions = select(positions, runs, 1)
        elif batch.documents is not None:
            positions = select(batch.documents.positions(), runs, 0).t()
        else:
            device = batch.tokens.device
            positions = torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])[None]
        tokens, labels, mask = (select(tensor, runs, 1) for tensor in (batch.tokens, batch.labels, batch.loss_mask))
        return Microbatch(tokens, labels, mask, positions), context._replace(offset=0, length=None)


ALONE = ContextParallel()


def select(tensor: Tensor, runs: tuple[range, ...], dim: int) -> Tensor:
    """Return those rows of a tensor that has the whole sequence's along a dimension."""
    parts = [tensor.narrow(dim, run.start, len(run)) for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def rows_of(runs: tuple[range, ...], rows: range) -> tuple[range, ...]:
    """The tokens of some of the rows that have those of all runs, one after another."""
    if len(rows) == sum(map(len, runs)):
        return runs
    taken, before = list[range](), 0
    for run in runs:
        taken.append(run[max(rows.start - before, 0) : max(rows.stop - before, 0)])
        before += len(run)
    return tuple(run for run in taken if run)


def to_heads(
    group: dist.ProcessGroup, query: Tensor, key: Tensor, value: Tensor, beside: ForwardBeside | None = None
) -> Generator[None, None, tuple[Tensor, Tensor, Tensor]]:
    """[n / cp, b, heads, d] query and [n / cp, b, groups, d] key and value of this rank's rows to those of all n rows
    for this rank's heads: [n, b, heads / cp, d] and [n, b, g / cp, d], g the least multiple of groups that ranks can
    share: where groups are too few, ranks have copies of them, whose gradients are summed. Views of one tensor.

    heads must be a multiple of cp. Collective, one all-to-all; yields while that is under way. Saves nothing.
    """
    size = group.size()
    copies = copies_of_groups(key.size(2), size)
    if copies > 1:
        key, value = (tensor.repeat_interleave(copies, dim=2) for tensor in (key, value))
    split = [tensor.unflatten(2, (size, -1)).movedim(2, 0) for tensor in (query, key, value)]
    begun = begin(torch.cat(split, dim=3), Swap(group), beside)
    yield
    counts = [part.size(3) for part in split]
    own_query, own_key, own_value = end(begun).flatten(0, 1).split(counts, dim=2)
    return own_query, own_key, own_value


def to_rows(
    group: dist.ProcessGroup, attention: Tensor, beside: ForwardBeside | None = None
) -> Generator[None, None, Tensor]:
    """[n, b, heads / cp * d] attention output of all rows to [n / cp, b, heads * d] of this rank's. Collective, as
    `to_heads`."""
    begun = begin(attention.unflatten(0, (group.size(), -1)), Swap(group), beside)
    yield
    return end(begun).movedim(0, 2).flatten(2)


def copies_of_groups(groups: int, size: int) -> int:
    """How many ranks of `size` have each group of keys and values when they share out heads."""
    return lcm(groups, size) // groups


class Swap:
    """Part i of the first dimension to rank i; what came from rank i in its place. Its mirror image is the same."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group

    def forward(self, parts: Tensor) -> Started:
        parts = parts.contiguous()
        swapped = torch.empty_like(parts)
        return Started(swapped, dist.all_to_all_single(swapped, parts, group=self._group, async_op=True), parts)

    backward = forward
