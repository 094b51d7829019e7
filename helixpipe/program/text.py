"""The text form of a program that torch.distributed.pipelining reads and writes.

One CSV row a rank, one op a cell, `2F5` = stage 2, forward, microbatch 5; `2F5.1` = chunk 1 of that microbatch. The
letters and the cells are those of torch, whose dumped files load here. A cell says nothing of stages, placements,
chunk lengths or recomputation: the JSON form has all of these.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from helixpipe.common.errors import ProgramError, ScheduleError
from helixpipe.program.file_limits import Parts, read_program_file
from helixpipe.program.program import OP_KINDS, Op, Program
from helixpipe.program.stages import Layers, even_stages, ring_stages
from helixpipe.program.workload import uniform

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
    """The ops of each rank from rows of cells. Raises ProgramError with row and column of a malformed cell, and for
    more ops than a file may have."""
    ranks: list[tuple[Op, ...]] = []
    parts = Parts(source)
    for rank, row in enumerate(rows):
        ops: list[Op] = []
        for column, cell in enumerate(row):
            try:
                ops.extend(parse_cell(cell))
            except ProgramError as error:
                raise ProgramError(f"{source}, row {rank} (rank {rank}), column {column + 1}: {error}") from None
        parts.add(len(ops))
        ranks.append(tuple(ops))
    return tuple(ranks)


def format_rows(program: Program) -> list[list[str]]:
    """The program as rows of cells, one row a rank: what `to_csv` writes and `simulate --order` prints."""
    return [[str(op) for op in ops] for ops in program.ranks]


def to_csv(program: Program, path: str | Path) -> None:
    """Write the ops. Raises ProgramError, naming it, for what the file could not say: see `from_csv`."""
    if (lost := _lost(program)) is not None:
        raise ProgramError(f"a CSV file cannot hold {lost}; give the file a name that ends in .json.")
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(format_rows(program))


def _lost(program: Program) -> str | None:
    """Return what the CSV would lose: what of a program differs from what `from_csv` makes of its ops."""
    try:
        read = from_rows("it", program.ranks, program.layer_kinds)
    except (ProgramError, ScheduleError):
        return "a program whose stages are not equally many whole layers"
    if not program.ranks[-1]:
        return f"rank {program.num_ranks - 1}, which has no ops"
    if program.pairs:
        return "what runs beside what"
    if program.turns:
        return "its turns"
    if program.activations:
        return "units whose activations are not treated as their stage says"
    for index, (stage, other) in enumerate(zip_longest(program.stages, read.stages)):
        if stage is None or other is None or stage.pieces != other.pieces:
            return f"stage {index}: the stages are not equally many whole layers"
        if (stage.placement, stage.owner) != (other.placement, other.owner):
            return f"stage {index}, which is {stage.placement}"
        if stage.recompute != other.recompute:
            return f"what stage {index} recomputes, which is not the whole stage by R ops"
    if program.ring != read.ring:
        return "how the weights of its ring travel"
    workload = program.workload
    if workload.lengths is None:
        return "chunks that differ between microbatches"
    if not workload.proportional and workload != read.workload:
        return "the lengths of its chunks"
    # Proportions were found from costs; whoever reads the file finds those of costs at hand.
    numbered = uniform(len(workload), program.num_chunks, workload.lengths, workload.proportional)
    return None if workload == numbered else "how its documents are numbered"


def from_csv(path: str | Path, num_layers: int | None = None) -> Program:
    """Read a program from a CSV file; the stages get equally many whole layers (one each when `num_layers` is None).

    Where every rank runs microbatches of its own from end to end, in two stages more than there are ranks, the stages
    are those of a ring (see `ring_stages`). A stage with R ops is recomputed whole. Only the text is checked here:
    `validate.validate` says whether the program is complete and can run. Raises ProgramError for an unreadable file, a
    malformed cell or a file without ops, ScheduleError for indivisible layers.
    """
    path = Path(path)
    try:
        text = read_program_file(path).decode("utf-8-sig")  # spreadsheets write a byte order mark
        ranks = parse_rows(csv.reader(io.StringIO(text, newline="")), source=path.name)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ProgramError(f"cannot read the schedule file {path}: {error}.") from None
    while ranks and not ranks[-1]:  # trailing blank lines
        ranks = ranks[:-1]
    return from_rows(path.name, ranks, num_layers)


def from_rows(name: str, ranks: tuple[tuple[Op, ...], ...], layers: Layers | None = None) -> Program:
    """The program of these ops, with all that they leave open as it is most often: see `from_csv`. Raises
    ProgramError, ScheduleError."""
    ops = [op for rank in ranks for op in rank]
    if not ops:
        raise ProgramError(f"{name} contains no ops.")
    num_stages = _count(name, "stage", {op.stage for op in ops})
    num_microbatches = _count(name, "microbatch", {op.microbatch for op in ops})
    num_chunks = _count(name, "chunk", {op.chunk for op in ops})
    recomputed = {op.stage for op in ops if op.kind == "R"}
    if _is_ring(ranks, num_stages):
        own_stages = ring_stages(layers if layers is not None else len(ranks), len(ranks))
    else:
        own_stages = even_stages(layers if layers is not None else num_stages, num_stages)
    return Program(
        schedule=name,
        stages=tuple(replace(s, recompute=(s.pieces,)) if i in recomputed else s for i, s in enumerate(own_stages)),
        ranks=ranks,
        workload=uniform(num_microbatches, num_chunks),
        forward_only=all(op.kind == "F" for op in ops),
    )


def _is_ring(ranks: Sequence[Sequence[Op]], num_stages: int) -> bool:
    homes = {(op.microbatch, rank) for rank, ops in enumerate(ranks) for op in ops}
    return 1 < len(ranks) == num_stages - 2 and len({microbatch for microbatch, _ in homes}) == len(homes)


def _count(source: str, name: str, numbers: set[int]) -> int:
    """Return how many microbatches, stages or chunks there are, numbered from 0. Raises ProgramError when a number is
    missing: a file may name microbatch 999999999."""
    count = 1 + max(numbers)
    if len(numbers) < count:
        missing = next(number for number in range(count) if number not in numbers)
        raise ProgramError(f"{source} names {name} {count - 1} but has no op of {name} {missing}.")
    return count
