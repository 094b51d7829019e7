"""The intermediate representation: a pipeline schedule as data.

A `Program` says which unit of work runs on which rank in which order, and nothing else. Communication, memory, timing
and execution are derived from it elsewhere (`lowering`, `simulate`, `runtime`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from helixpipe.common.errors import ScheduleError
from helixpipe.program.derived import Derives
from helixpipe.program.stages import Activations, LayerKinds, Piece, RingOptions, Stage, layer_pieces
from helixpipe.program.workload import Workload

OP_KINDS = ("F", "B", "I", "W", "R")
"""F forward, B full backward, I input-gradient backward, W weight-gradient backward, R recompute."""


class Unit(NamedTuple):
    """The data that an op works on: one chunk of one microbatch in one stage."""

    stage: int
    microbatch: int
    chunk: int = 0


class Op(NamedTuple):
    """One kind of work (`OP_KINDS`) on one unit."""

    kind: str
    stage: int
    microbatch: int
    chunk: int = 0

    @property
    def unit(self) -> Unit:
        return Unit(self.stage, self.microbatch, self.chunk)

    def __str__(self) -> str:
        """`2F5`, or `2F5.1` for a chunk other than the first (`2F5` and `2F5.0` are the same op)."""
        cell = f"{self.stage}{self.kind}{self.microbatch}"
        return f"{cell}.{self.chunk}" if self.chunk else cell


@dataclass(frozen=True)
class Program(Derives):
    """For each rank an ordered list of ops, the stages with the placement of their weights, and what they work on.

    schedule: name shown in tables, pictures and messages.
    stages: in model order; their pieces, concatenated, are the whole model.
    ranks: one tuple of ops a pipeline rank, in the order the rank runs them.
    workload: the chunks of each microbatch; see `uniform` for microbatches that are all cut alike.
    forward_only: an evaluation program, every unit has F and nothing else.
    ring: how weights of ring stages travel.
    activations: of the units whose activations are not treated as their stage says.
    min_offloaded_bytes: saved tensors smaller than that stay on the device, whatever is to be offloaded.
    sharded: data-parallel ranks that have parts of each rank's weights; 1: weights are whole.
    gathered_once: parts of weights are gathered once a step and stay until their stage's last op, so that beside the
    optimizer's state gradients alone are in parts (ZeRO's second stage); else they are gathered for each op.
    pairs: forwards beside each of which the op that follows it on its rank, a backward of another unit, runs.
    turns: the last op of each rank in each turn, for ranks that have ops in it; no rank begins a turn before all ranks
    have ended the one before. Empty: ranks do not wait for one another's turns.
    kv_blocks: keys and values of microbatches that run in chunks lie in a block for each chunk.
    source: the file it was read from, for messages.

    """

    schedule: str
    stages: tuple[Stage, ...]
    ranks: tuple[tuple[Op, ...], ...]
    workload: Workload
    forward_only: bool = False
    ring: RingOptions = field(default_factory=RingOptions)
    activations: Mapping[Unit, Activations] = field(default_factory=dict)
    min_offloaded_bytes: int = 0
    sharded: int = 1
    gathered_once: bool = False
    kv_blocks: bool = False
    pairs: frozenset[Op] = frozenset()
    turns: tuple[tuple[Op, ...], ...] = ()
    source: str = field(default="", compare=False)

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def num_microbatches(self) -> int:
        return len(self.workload)

    @property
    def num_chunks(self) -> int:
        """The number of chunks of the microbatch that has the most."""
        return self.workload.most_chunks

    @property
    def chunk_lengths(self) -> tuple[int, ...] | None:
        """Tokens of each chunk, where that is known and the same in every microbatch."""
        return None if self.workload.proportional else self.workload.lengths

    @cached_property
    def chain(self) -> int:
        """The number of stages that follow one another: all but the parts of a divided head, which stand side by
        side."""
        return sum(stage.part is None for stage in self.stages)

    @cached_property
    def beside(self) -> Mapping[Op, Op]:
        """The op that runs beside each op of a pair."""
        paired = [(op, ops[at + 1]) for ops in self.ranks for at, op in enumerate(ops[:-1]) if op in self.pairs]
        return {**dict(paired), **{second: first for first, second in paired}} if self.pairs else {}

    def units(self) -> Iterator[Unit]:
        """Every unit that the program must run, one at a time."""
        for stage in range(len(self.stages)):
            for microbatch, chunk in self.workload.units():
                yield Unit(stage, microbatch, chunk)

    def activations_of(self, unit: Unit) -> Activations:
        """Return what is done with the unit's activations between its F and its backward."""
        own = self.activations.get(unit) if self.activations else None
        return own if own is not None else self.stages[unit.stage].activations

    @property
    def num_layers(self) -> int:
        return 1 + max((piece.layer for stage in self.stages for piece in stage.pieces), default=-1)

    @property
    def layer_kinds(self) -> tuple[LayerKinds, ...]:
        """The kinds of the pieces of each layer."""
        pieces = (piece for stage in self.stages for piece in stage.pieces if piece.layer >= 0)
        layers = groupby(pieces, key=lambda piece: piece.layer)
        return tuple(tuple(piece.kind for piece in own) for _, own in layers)

    def holders(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold a stage's weights: its owner, or those that run units of it. An embedding or head that
        is replicated beside layers that are not is held by every rank: which ranks have microbatches of their own must
        not decide what they hold."""
        return self._holders[stage]

    def pieces_of_rank(self, rank: int) -> tuple[Piece, ...]:
        """The pieces, in model order, whose weights this rank holds: what it runs, but for copies; and what it owns."""
        return tuple(
            piece
            for own, stage in zip(self._holders, self.stages, strict=True)
            if rank in own
            for piece in stage.pieces
        )

    def copies(self, rank: int) -> dict[Piece, int]:
        """The rank's pieces that other ranks hold as well, those of replicated stages, with the number of the rank's
        copy; 0 is that of the first rank."""
        copy_of: dict[Piece, int] = {}
        for index, stage in enumerate(self.stages):
            holders = self.holders(index)
            if stage.placement == "replicated" and len(holders) > 1 and rank in holders:
                copy_of |= dict.fromkeys(stage.pieces, holders.index(rank))
        return copy_of

    def copied_stages(self, rank: int) -> tuple[int, ...]:
        """The stages that this rank runs units of with copies of their owners' weights."""
        run = sorted(self._stages_run[rank])
        return tuple(stage for stage in run if self.stages[stage].owner not in (None, rank))

    @cached_property
    def _holders(self) -> tuple[tuple[int, ...], ...]:
        """Return for each stage the ranks that hold its weights."""
        everywhere, running = tuple(range(self.num_ranks)), [list[int]() for _ in self.stages]
        for rank, run in enumerate(self._stages_run):
            for number in run:
                running[number].append(rank)
        others = any(stage.placement != "replicated" for stage in self.stages)
        found = []
        for stage, ranks in zip(self.stages, running, strict=True):
            own = tuple(ranks) if stage.owner is None else (stage.owner,)
            ends = others and all(piece.layer < 0 for piece in stage.pieces)
            found.append(everywhere if stage.owner is None and stage.placement == "replicated" and ends else own)
        return tuple(found)

    @cached_property
    def _stages_run(self) -> tuple[frozenset[int], ...]:
        """Return for each rank the stages that it runs units of."""
        return tuple(frozenset(op.stage for op in ops) for ops in self.ranks)


def of_layers(program: Program, layers: tuple[LayerKinds, ...]) -> Program:
    """A program of plain layers on a model of these, as many, whose pieces have the same roles; a program of these
    layers, and one whose stages are not a model in order, as it is. Raises ScheduleError for a program of others."""
    pieces = layer_pieces(layers)
    plain = tuple(Piece(piece.role, piece.layer) for piece in pieces)
    own = tuple(piece for stage in program.stages for piece in stage.pieces if piece.layer >= 0)
    if own == pieces or tuple(Piece(piece.role, piece.layer) for piece in own) != plain:
        return program
    if own != plain:
        other, wanted = next(pair for pair in zip(own, pieces, strict=True) if pair[0] != pair[1])
        raise ScheduleError(f"the program is one for another model: it has {other} where this one has {wanted}.")
    return _renamed(program, dict(zip(plain, pieces, strict=True)))


def with_head(program: Program, kind: str) -> Program:
    """A program whose head is a plain one, with a head of this kind in its place."""
    return program if kind == "head" else _renamed(program, {Piece("head"): Piece(kind)})


def _renamed(program: Program, named: Mapping[Piece, Piece]) -> Program:
    """A program with other kinds of some pieces."""

    def renamed(run: tuple[Piece, ...]) -> tuple[Piece, ...]:
        return tuple(named.get(piece, piece) for piece in run)

    def runs(every: tuple[tuple[Piece, ...], ...]) -> tuple[tuple[Piece, ...], ...]:
        return tuple(map(renamed, every))

    def moved(each: Activations) -> Activations:
        offload = tuple((renamed(run), share) for run, share in each.offload)
        return replace(each, recompute=runs(each.recompute), offload=offload)

    stages = (replace(each, pieces=renamed(each.pieces), recompute=runs(each.recompute)) for each in program.stages)
    activations = {unit: moved(each) for unit, each in program.activations.items()}
    return replace(program, stages=tuple(stages), activations=activations)


def forward_only(program: Program) -> Program:
    """Return the evaluation form of a program: its forwards, in their order on every rank, without turns."""
    ranks = tuple(tuple(op for op in ops if op.kind == "F") for ops in program.ranks)
    return replace(program, ranks=ranks, forward_only=True, pairs=frozenset(), turns=())
