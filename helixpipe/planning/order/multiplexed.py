"""Multiplexed sequence partition: ranks that idle at the ends of a pipeline help others with their chunks.

SPPO (Chen et al., arXiv 2503.10377, Table 3). Of N chunks stage i runs the first p-1-i on ranks i … p-1 together, which
have nothing to do yet, and the last i on ranks 0 … i, which have nothing left. The backward, which the paper leaves
open, is the mirror: each part on the rank that ran it forward.

Here such a chunk is cut once more, into p parts that take equally long, each a chunk of the program. A team's members
run theirs at the same time, for attention is a stage of its own: a part waits for the keys and values of those before
it, which the stage before has computed and messages bring (`lowering.passes.spread_rows`), and not for their attention.
Helpers run with copies of the stage's weights, which its owner ships.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from helixpipe.common.errors import ScheduleError
from helixpipe.costs.counted_bytes import CountsBytes
from helixpipe.lowering.bound import stage_work
from helixpipe.planning.catalogue import Shape
from helixpipe.planning.order.chunk_lengths import default_alignment
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import Piece, Stage, even_stages, model_pieces
from helixpipe.program.workload import Extent, uniform

Team = tuple[int, ...]


def team(ranks: int, chunks: int, group: int, chunk: int, left: bool, right: bool) -> Team:
    """Return the ranks that run the chunk in a rank's layers: that rank, or several. left, right: with teams for the
    first, for the last chunks; if both apply, the first.
    """
    if left and chunk < ranks - 1 - group:
        return tuple(range(group, ranks))
    if right and chunk >= chunks - group:
        return tuple(range(group + 1))
    return (group,)


def multiplexed(name: str, shape: Shape, left: bool, right: bool) -> Program:
    """Return a step of one microbatch: all forwards, then all backwards in reverse; the head of a chunk right before
    its backward. Raises ScheduleError for more microbatches.
    """
    if shape.microbatches != 1 or shape.ragged is not None:
        raise ScheduleError(
            f"--sppo-multiplex needs steps of one microbatch and not {shape.microbatches}; leave it out, or make "
            "--global-batch-size as large as --micro-batch-size times the data-parallel ranks."
        )
    cut = _Cut(shape, left, right)
    stages, groups = _stages(shape)
    orders: list[list[tuple[tuple[int, ...], Op]]] = [[] for _ in range(shape.ranks)]
    for group, numbers in enumerate(groups):
        for chunk in range(shape.chunks):
            for key, rank, op in cut.forwards(group, chunk, numbers, len(stages) - 1):
                orders[rank].append((key, op))
    ranks = tuple(_with_backwards([op for _, op in sorted(order)], len(stages) - 1) for order in orders)
    program = Program(name, shape.recompute.stages(stages), ranks, uniform(1, len(cut.lengths), cut.lengths))
    return replace(program, kv_blocks=True)


def _stages(shape: Shape) -> tuple[tuple[Stage, ...], list[range]]:
    """Return the stages: the embedding, layers cut around attention, each rank's apart from the next one's, and the
    head. Also the stages of each rank's layers: the first rank's with the embedding, the last one's with the head.
    """
    embed, *_, head = model_pieces(shape.layer_kinds)
    stages, groups = [Stage((embed,))], []
    for rank, whole in enumerate(even_stages(shape.layer_kinds, shape.ranks)):
        first, run = len(stages), list[Piece]()
        for piece in whole.pieces:
            if piece.layer < 0:
                continue
            if piece.role == "attn":
                attention = Stage((piece,), "shipped", owner=rank) if piece.has_weights else Stage((piece,))
                stages += [Stage(tuple(run), "shipped", owner=rank), attention]
                run = []
            else:
                run.append(piece)
        stages.append(Stage(tuple(run), "shipped", owner=rank))
        groups.append(range(first - (rank == 0), len(stages) + (rank == shape.ranks - 1)))
    return (*stages, Stage((head,))), groups


def _with_backwards(forwards: Sequence[Op], head: int) -> tuple[Op, ...]:
    """Append the backwards in reverse; each chunk's head, forward and backward, takes its place among them."""
    order = [op for op in forwards if op.stage != head]
    for op in reversed(forwards):
        order += [op] * (op.stage == head)
        order.append(op._replace(kind="B"))
    return tuple(order)


@dataclass(frozen=True)
class _ChunkPart:
    """One rank's part of a chunk. number: of the chunk among the program's."""

    number: int
    place: int
    of: int


class _Cut:
    """The chunks of a shape, those that teams run in parts. lengths: of all chunks and parts, in tokens; where nobody
    says how long a sequence is, in parts of a chunk."""

    def __init__(self, shape: Shape, left: bool, right: bool):
        self.shape, self.left, self.right = shape, left, right
        workload, p = shape.workload, shape.ranks
        costs: object = shape.costs
        tokens, self.alignment = p * shape.chunks, 1
        if isinstance(costs, CountsBytes):
            tokens, self.alignment = costs.tokens, costs.bytes.layout.unit
        lengths = workload.in_tokens(tokens).tokens(0) if workload.proportional else workload.tokens(0)
        self.whole = sum(lengths)
        self.lengths: tuple[int, ...] = ()
        self.parts: list[list[_ChunkPart]] = []
        start = 0
        for chunk, length in enumerate(map(int, lengths)):
            cut = p > 1 and any(len(self.team(group, chunk)) > 1 for group in range(p))
            own = self._equal_times(start, length) if cut else (length,)
            self.parts.append([_ChunkPart(len(self.lengths) + place, place, len(own)) for place in range(len(own))])
            self.lengths += own
            start += length

    def team(self, group: int, chunk: int) -> Team:
        return team(self.shape.ranks, self.shape.chunks, group, chunk, self.left, self.right)

    def forwards(self, group: int, chunk: int, stages: range, head: int) -> Iterator[tuple[tuple[int, ...], int, Op]]:
        """Yield a chunk's forwards in a rank's layers: (place in the order, rank, op). A single rank runs part by part,
        so that the next rank can begin; a team stage by stage, which is when its members wait for each other.
        """
        members = self.team(group, chunk)
        for part in self.parts[chunk]:
            rank = members[part.place * len(members) // part.of]
            for stage in stages:
                inner = (stage, part.place) if len(members) > 1 else (part.place, stage)
                home = 0 if stage == 0 else self.shape.ranks - 1 if stage == head else rank
                yield (chunk + group, group, *inner), home, Op("F", stage, 0, part.number)

    def _equal_times(self, start: int, length: int) -> tuple[int, ...]:
        """Return the lengths of as many parts as ranks, with equal times in a layer as far as the alignment allows."""
        p = self.shape.ranks
        unit = default_alignment(length, p, self.alignment)
        steps = length // unit
        if steps < p:
            raise ScheduleError(
                f"--sppo-multiplex cuts a chunk of {length} tokens into {p} parts of at least {unit}; use fewer chunks."
            )
        whole, cuts = self._time(start, length), [0]
        for place in range(1, p):
            at = bisect_left(range(steps), place / p * whole, key=lambda step: self._time(start, step * unit))
            cuts.append(min(max(at, cuts[-1] + 1), steps - (p - place)))
        ends = [*(cut * unit for cut in cuts[1:]), length]
        return tuple(end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True))

    def _time(self, start: int, tokens: int) -> float:
        """Return the time of `tokens` tokens after `start` in all layers, forward and backward."""
        costs = self.shape.costs
        if costs is None or not tokens:
            return float(tokens)
        stage = even_stages(self.shape.layer_kinds, 1)[0]
        layers = (Stage(stage.pieces[1:-1]),)
        extents = (Extent(tokens, start, True),)
        return sum(costs.op_time(stage_work(kind, layers, 0, extents, self.whole)) for kind in "FB")
