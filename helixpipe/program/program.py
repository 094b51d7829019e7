"""The intermediate representation: a pipeline schedule as data, and its text form.

A `Program` says which unit of work runs on which rank in which order, and nothing else. Communication, memory, timing
and execution are derived from it elsewhere (`graph`, `lowering`, `simulator`, `runtime`). No torch here.

Text form: one CSV row a rank, one op a cell, `2F5` = stage 2, forward, microbatch 5; `2F5.1` = chunk 1 of that
microbatch. The letters and the cells are those of torch.distributed.pipelining, whose dumped files load here.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from helixpipe.common.errors import ProgramError, ScheduleError

LAYER_PIECES = ("norm", "qkv", "attn", "proj", "mlp")
"""The pieces of one transformer layer, in order."""

PIECE_KINDS = ("embed", *LAYER_PIECES, "head")

OP_KINDS = ("F", "B", "I", "W", "R")
"""F forward, B full backward, I input-gradient backward, W weight-gradient backward, R recompute."""

PLACEMENTS = ("resident", "shipped", "replicated", "ring")

OWNED = ("shipped", "ring")
"""Placements whose weights one rank owns and others run with copies of."""


class Piece(NamedTuple):
    """The smallest part of the model that can sit on a rank alone. `layer` is the global layer index, -1 for embed and
    head."""

    kind: str
    layer: int = -1

    def __str__(self) -> str:
        return self.kind if self.layer < 0 else f"{self.kind}[{self.layer}]"


class Unit(NamedTuple):
    """What an op works on: one chunk of one microbatch in one stage."""

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


class Segment(NamedTuple):
    """Consecutive pieces of a stage with one autograd graph.

    recomputed: its activations, all but its inputs, are dropped after F and made again before the backward.
    inputs_again: attention that is kept, after a recomputed run that makes its queries, keys and values: these are
    dropped after F, too, and come back when that run is made again, which is then before attention's own backward.
    """

    pieces: tuple[Piece, ...]
    recomputed: bool
    inputs_again: bool = False

    @property
    def passes_residual(self) -> bool:
        """Whether the segment starts inside a layer and needs nothing of the residual but its gradient."""
        first = self.pieces[0]
        inside = first.kind in ("qkv", "attn", "proj")
        return inside and not (self.recomputed and Piece("proj", first.layer) in self.pieces)


@dataclass(frozen=True)
class Stage:
    """A contiguous run of pieces run as one operation, and how its weights are placed.

    `placement`: `resident` (all its units on one rank), `shipped`, `replicated` or `ring` (see docs/architecture.md).
    `owner`: of a shipped or ring stage, the rank that holds its weights; every other rank that runs units of it gets
    copies of them and returns their gradients (see `transfers`).
    `recompute`: runs of its pieces, in order, each recomputed from its inputs: by the unit's R op, or where the
    program has none, run by run, in the unit's B or I as it comes to them.
    """

    pieces: tuple[Piece, ...]
    placement: str = "resident"
    recompute: tuple[tuple[Piece, ...], ...] = ()
    owner: int | None = None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The stage in order: the runs that are recomputed and what is kept between them."""
        found: list[Segment] = []
        start = 0
        for run in self.recompute:
            at = self.pieces.index(run[0])
            if at > start:
                found.append(self._kept(start, at))
            found.append(Segment(run, True))
            start = at + len(run)
        if start < len(self.pieces):
            found.append(self._kept(start, len(self.pieces)))
        return tuple(found)

    def _kept(self, start: int, end: int) -> Segment:
        """A segment that is not recomputed; before it, if anything, is one that is."""
        return Segment(self.pieces[start:end], False, start > 0 and self.pieces[start].kind == "attn")

    @property
    def has_weights(self) -> bool:
        """Core attention has none, so a stage of nothing else is placed nowhere: its microbatches may run anywhere."""
        return any(piece.kind != "attn" for piece in self.pieces)

    @property
    def has_attention(self) -> bool:
        return any(piece.kind == "attn" for piece in self.pieces)


@dataclass(frozen=True)
class RingOptions:
    """How the weights of ring stages travel; see `transfers`.

    slots: copies of weights, and sums of gradients, that a rank has room for. eager: weights are passed on when they
    arrive, not when the op that uses them ends. gradient_bytes: of an element of the gradients, 4 (float32) or 2
    (bfloat16).
    """

    slots: int = 3
    eager: bool = True
    gradient_bytes: int = 4


@dataclass(frozen=True)
class Program:
    """For each rank an ordered list of ops, plus the stages with the placement of their weights and the chunk lengths.

    schedule: name shown in tables, pictures and messages.
    stages: in model order; their pieces, concatenated, are the whole model.
    ranks: one tuple of ops a pipeline rank, in the order the rank runs them.
    chunk_lengths: tokens of each chunk of a microbatch's sequence; None = one chunk, or chunks of equal length.
    forward_only: an evaluation program, every unit has F and nothing else.
    ring: how weights of ring stages travel.
    """

    schedule: str
    stages: tuple[Stage, ...]
    ranks: tuple[tuple[Op, ...], ...]
    num_microbatches: int
    num_chunks: int = 1
    chunk_lengths: tuple[int, ...] | None = None
    forward_only: bool = False
    ring: RingOptions = RingOptions()

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def num_layers(self) -> int:
        return 1 + max((piece.layer for stage in self.stages for piece in stage.pieces), default=-1)

    def holders(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold a stage's weights: its owner, or those that run units of it. A replicated stage beside
        ring stages is held by every rank: which ranks have microbatches of their own must not decide what they hold."""
        own = self.stages[stage]
        if own.owner is not None:
            return (own.owner,)
        if own.placement == "replicated" and any(each.placement == "ring" for each in self.stages):
            return tuple(range(self.num_ranks))
        return tuple(rank for rank, run in enumerate(self._stages_run) if stage in run)

    def pieces_of_rank(self, rank: int) -> tuple[Piece, ...]:
        """The pieces, in model order, whose weights this rank holds: what it runs, but for copies; and what it owns."""
        return tuple(
            piece for index, stage in enumerate(self.stages) if rank in self.holders(index) for piece in stage.pieces
        )

    def copies(self, rank: int) -> dict[Piece, int]:
        """The rank's pieces that other ranks hold as well, those of replicated stages, with the number of the rank's
        copy; 0 is that of the first rank."""
        found: dict[Piece, int] = {}
        for index, stage in enumerate(self.stages):
            holders = self.holders(index)
            if stage.placement == "replicated" and len(holders) > 1 and rank in holders:
                found |= dict.fromkeys(stage.pieces, holders.index(rank))
        return found

    def copied_stages(self, rank: int) -> tuple[int, ...]:
        """The stages that this rank runs units of with copies of their owners' weights."""
        run = sorted(self._stages_run[rank])
        return tuple(stage for stage in run if self.stages[stage].owner not in (None, rank))

    @cached_property
    def _stages_run(self) -> tuple[frozenset[int], ...]:
        """Of each rank, the stages it runs units of."""
        return tuple(frozenset(op.stage for op in ops) for ops in self.ranks)


def model_pieces(num_layers: int) -> tuple[Piece, ...]:
    """The whole model as a chain: embed, then norm, qkv, attn, proj, mlp of each layer, then head."""
    layers = (Piece(kind, layer) for layer in range(num_layers) for kind in LAYER_PIECES)
    return (Piece("embed"), *layers, Piece("head"))


def even_stages(num_layers: int, num_stages: int) -> tuple[Stage, ...]:
    """`num_stages` stages of equally many whole layers; embed in the first, head in the last.

    Raises ScheduleError when the layers cannot be divided evenly.
    """
    if num_layers < num_stages or num_layers % num_stages:
        below = num_layers - num_layers % num_stages
        valid = f"values are {below} and {below + num_stages}" if below else f"value is {num_stages}"
        raise ScheduleError(
            f"--num-layers {num_layers} cannot be divided evenly over {num_stages} pipeline stages; "
            f"the nearest valid {valid}."
        )
    per_stage = num_layers // num_stages
    stages = []
    for index in range(num_stages):
        layers = range(index * per_stage, (index + 1) * per_stage)
        pieces = [Piece(kind, layer) for layer in layers for kind in LAYER_PIECES]
        if index == 0:
            pieces.insert(0, Piece("embed"))
        if index == num_stages - 1:
            pieces.append(Piece("head"))
        stages.append(Stage(tuple(pieces)))
    return tuple(stages)


def ring_stages(num_layers: int, num_ranks: int, direction: int = -1) -> tuple[Stage, ...]:
    """embed, `num_ranks` ring stages of whole layers that differ by one at most, and head; embed and head replicated.

    Stage c of the ring belongs to rank -c mod p, so that weights which travel from rank to rank + 1 come in the order
    of their use (WeiPipe, Lin et al., PPoPP 2025); with direction 1 to rank c. Raises ScheduleError for fewer layers
    than ranks.
    """
    if num_layers < num_ranks:
        raise ScheduleError(
            f"--num-layers {num_layers} cannot be divided over {num_ranks} pipeline ranks; "
            f"the nearest valid value is {num_ranks}."
        )
    embed, *layers, head = model_pieces(num_layers)
    cuts = [len(LAYER_PIECES) * (num_layers * c // num_ranks) for c in range(num_ranks + 1)]
    ring = (
        Stage(tuple(layers[cuts[c] : cuts[c + 1]]), "ring", owner=direction * c % num_ranks) for c in range(num_ranks)
    )
    return (Stage((embed,), "replicated"), *ring, Stage((head,), "replicated"))


def chunk_lengths(program: Program, seq_length: int) -> tuple[int, ...]:
    """Tokens of each chunk of sequences of that length; equal lengths, the first ones a token longer, if the program
    has none. Raises ProgramError where its lengths do not add up to the sequence."""
    if program.chunk_lengths is None:
        least, more = divmod(seq_length, program.num_chunks)
        if not least:
            raise ProgramError(f"{seq_length} tokens cannot be cut into {program.num_chunks} chunks.")
        return tuple(least + (chunk < more) for chunk in range(program.num_chunks))
    if sum(program.chunk_lengths) != seq_length:
        raise ProgramError(
            f"chunk lengths {program.chunk_lengths} do not add up to the sequence's {seq_length} tokens."
        )
    return program.chunk_lengths


def forward_only(program: Program) -> Program:
    """The evaluation form of a program: its forwards, in their order on every rank."""
    ranks = tuple(tuple(op for op in ops if op.kind == "F") for ops in program.ranks)
    return replace(program, ranks=ranks, forward_only=True)


# ---------------------------------------------------------------------------------------------------------- text form

_CELL = re.compile(r"([0-9]{1,9})([A-Z_]+)([0-9]{0,9})(?:\.([0-9]{1,9}))?")
_DERIVED_CELLS = frozenset({"REDUCE_GRAD", "UNSHARD", "RESHARD", "SEND_F", "RECV_F", "SEND_B", "RECV_B"})
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def parse_cell(cell: str) -> list[Op]:
    """The ops of one CSV cell: usually one; none for an empty cell or one that is derived here (communication, FSDP).

    torch's `(0F1;1B0)OVERLAP_F_B` gives its ops in the order written. Raises ProgramError for anything else.
    """
    cell = cell.strip()
    if not cell:
        return []
    if overlap := _OVERLAP.fullmatch(cell):
        return [op for part in overlap[1].split(";") for op in parse_cell(part)]
    match = _CELL.fullmatch(cell)
    if match:
        stage, kind, microbatch, chunk = match.groups()
        if kind in _DERIVED_CELLS and chunk is None:
            return []
        if kind in OP_KINDS and microbatch:
            return [Op(kind, int(stage), int(microbatch), int(chunk or 0))]
    shown = cell if len(cell) <= 40 else cell[:40] + "…"
    raise ProgramError(
        f"cell {shown!r} is not an op: write stage, kind ({', '.join(OP_KINDS)}) and microbatch, "
        "such as 2F5, or 2F5.1 for its chunk 1."
    )


def parse_rows(rows: Iterable[Sequence[str]], source: str = "program") -> tuple[tuple[Op, ...], ...]:
    """The ops of each rank from rows of cells. Raises ProgramError with row and column of a malformed cell."""
    ranks: list[tuple[Op, ...]] = []
    for rank, row in enumerate(rows):
        ops: list[Op] = []
        for column, cell in enumerate(row):
            try:
                ops.extend(parse_cell(cell))
            except ProgramError as error:
                raise ProgramError(f"{source}, row {rank} (rank {rank}), column {column + 1}: {error}") from None
        ranks.append(tuple(ops))
    return tuple(ranks)


def format_rows(program: Program) -> list[list[str]]:
    """The program as rows of cells, one row a rank: what `to_csv` writes and `simulate --order` prints."""
    return [[str(op) for op in ops] for ops in program.ranks]


def to_csv(program: Program, path: str | Path) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(format_rows(program))


def from_csv(path: str | Path, num_layers: int | None = None) -> Program:
    """Read a program from a CSV file; the stages get equally many whole layers (one each when `num_layers` is None).

    Where every rank runs microbatches of its own from end to end, in two stages more than there are ranks, the stages
    are those of a ring (see `ring_stages`). A stage with R ops is recomputed whole. Only the text is checked here:
    `validate.validate` says whether the program is complete and can run. Raises ProgramError for an unreadable file, a
    malformed cell or a file without ops, ScheduleError for indivisible layers.
    """
    path = Path(path)
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets write a byte order mark
            ranks = parse_rows(list(csv.reader(file)), source=path.name)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ProgramError(f"cannot read the schedule file {path}: {reason}.") from None
    while ranks and not ranks[-1]:  # trailing blank lines
        ranks = ranks[:-1]
    ops = [op for rank in ranks for op in rank]
    if not ops:
        raise ProgramError(f"{path.name} contains no ops.")
    stages = {op.stage for op in ops}
    num_stages = 1 + max(stages)
    if len(stages) < num_stages:
        missing = next(stage for stage in range(num_stages) if stage not in stages)
        raise ProgramError(f"{path.name} names stage {num_stages - 1} but has no op of stage {missing}.")
    recomputed = {op.stage for op in ops if op.kind == "R"}
    if _is_ring(ranks, num_stages):
        own_stages = ring_stages(num_layers if num_layers is not None else len(ranks), len(ranks))
    else:
        own_stages = even_stages(num_layers if num_layers is not None else num_stages, num_stages)
    return Program(
        schedule=path.name,
        stages=tuple(replace(s, recompute=(s.pieces,)) if i in recomputed else s for i, s in enumerate(own_stages)),
        ranks=ranks,
        num_microbatches=1 + max(op.microbatch for op in ops),
        num_chunks=1 + max(op.chunk for op in ops),
        forward_only=all(op.kind == "F" for op in ops),
    )


def _is_ring(ranks: Sequence[Sequence[Op]], num_stages: int) -> bool:
    homes = {(op.microbatch, rank) for rank, ops in enumerate(ranks) for op in ops}
    return 1 < len(ranks) == num_stages - 2 and len({microbatch for microbatch, _ in homes}) == len(homes)
