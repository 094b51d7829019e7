"""Keys and values of a row whose chunks run on several ranks: messages that bring blocks and take gradients back.

A chunk's block (`Program.kv_blocks`) is made on the rank that runs the chunk. Every other rank that runs a later chunk
of the row in this stage gets it in a message, keeps it for all its chunks, and sums up its share of the gradients; when
its last backward has run, the first of its later chunks', the sum goes back in a message and into the chunk's own.

Where attention is a stage of its own, the block is made by the stage before, which computes it, and its gradient needed
by that one's backward. So ranks that run chunks of a row at the same time wait for each other's keys and values, and
not for each other's attention. That is how multiplexed chunks (Chen et al., SPPO, arXiv 2503.10377, section 6) run
here. In an evaluation blocks are there until its end.

Theorem. Messages make no order of ops impossible that was possible without: as an op of the row waits for all chunks
before it anyway (for those of its own rank; a message waits for nothing but the op that makes what it carries), put
each message right behind that op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from helixpipe.lowering.graph import Draft
from helixpipe.program.program import Unit
from helixpipe.program.tasks import Buffer


@dataclass(frozen=True)
class _RowTasks:
    """Tasks of a row's chunks in a stage with attention, in the row's order.

    makers: that make the block, the chunk's forward in the stage or in the one before. forwards, backwards: attention's
    own. takers: that need the sum of what other ranks have of the block's gradients. ranks: of each chunk.
    """

    makers: list[int]
    forwards: list[int]
    backwards: list[int]
    takers: list[int]
    ranks: list[int]

    def later(self, chunk: int, rank: int) -> list[int]:
        """The chunks after one that a rank runs."""
        return [other for other in range(chunk + 1, len(self.ranks)) if self.ranks[other] == rank]


def spread(draft: Draft, stage: int, places: Sequence[tuple[int, int]]) -> None:
    """Add the blocks, messages and sums of one row in one stage. places: the (microbatch, chunk) of the row."""
    row = _row(draft, stage, places)
    for rank in sorted(set(row.ranks)):
        own = [chunk for chunk, home in enumerate(row.ranks) if home == rank]
        for before, after in pairwise(own):
            draft.wait(row.forwards[after], row.makers[before])
            if row.backwards:
                draft.wait(row.backwards[before], row.backwards[after])
    for chunk in range(len(row.ranks)):
        _block(draft, stage, row, chunk)


def _row(draft: Draft, stage: int, places: Sequence[tuple[int, int]]) -> _RowTasks:
    units = [draft.unit(stage, *place) for place in places]
    forwards = [draft.forward[unit] for unit in units]
    ranks = [draft.ranks[task] for task in forwards]
    training = not draft.program.forward_only
    backwards = [draft.backward[unit] for unit in units] if training else []
    stages, before = draft.program.stages, [unit - draft.per_stage for unit in units]
    if stages[stage].pieces[0].role == "attn" and stages[stage - 1].pieces[-1].role == "qkv":
        makers = [draft.forward[unit] for unit in before]
        if [draft.ranks[task] for task in makers] == ranks:
            return _RowTasks(makers, forwards, backwards, [draft.backward[unit] for unit in before * training], ranks)
    return _RowTasks(forwards, forwards, backwards, backwards, ranks)


def _block(draft: Draft, stage: int, row: _RowTasks, chunk: int) -> None:
    home, training = row.ranks[chunk], bool(row.backwards)
    op = draft.ops[row.forwards[chunk]]
    block = Buffer("keys_values", home, stage, op.microbatch, op.chunk)
    made = draft.buffer(block, row.makers[chunk], (), row.backwards[chunk] if training else -1)
    for rank in sorted(set(row.ranks[chunk + 1 :])):
        later = row.later(chunk, rank)
        first, last = later[0], later[-1]
        if rank != home:
            reader = row.forwards[first]
            message = _message(draft, "keys_values", block, row.makers[chunk], reader)
            draft.read(message, made)
            freed_by = row.backwards[first] if training else -1
            draft.buffer(block._replace(rank=rank), message, (reader,), freed_by)
        if not training:
            continue
        sums = block._replace(kind="kv_gradients", rank=rank)
        if rank == home:
            draft.buffer(sums, row.backwards[last], (), row.backwards[chunk])
            continue
        taker = row.takers[chunk]
        number = draft.buffer(sums, row.backwards[last])
        message = _message(draft, "kv_gradients", sums, row.backwards[first], taker)
        draft.wait(message, row.backwards[first])
        draft.also_reads(message, number)
        draft.also_frees(message, number)
        draft.buffer(sums._replace(rank=home), message, (taker,), taker)


def _message(draft: Draft, kind: str, moved: Buffer, producer: int, consumer: int) -> int:
    """Add a message from one op to another that carries a buffer; returns its task."""
    ranks, unit = (draft.ranks[producer], draft.ranks[consumer]), Unit(moved.stage, moved.microbatch, moved.chunk)
    return draft.transfer(kind, ranks, unit, producer, consumer)
