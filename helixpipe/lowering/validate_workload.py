"""Whether a program's workload and activations can be: slices, documents, runs of pieces."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from helixpipe.common.errors import ProgramError
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import Activations, Piece
from helixpipe.program.workload import Slice, Workload


class _Placed(NamedTuple):
    """A slice and the chunk it is in."""

    slice: Slice
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        first, end = self.slice.start, self.slice.start + self.slice.length
        tokens = f"token {first}" if end == first + 1 else f"tokens {first} to {end - 1}"
        return f"{tokens} of document {self.slice.document} (microbatch {self.microbatch}, chunk {self.chunk})"


def check_workload(workload: Workload) -> None:
    """Raise ProgramError where chunks or slices are empty, and unless every document, from number 0 on without a gap,
    comes whole, each token once and in order."""
    for number, chunks in enumerate(workload.microbatches):
        if not chunks:
            raise ProgramError(f"microbatch {number} has no chunks.")
        for chunk, slices in enumerate(chunks):
            if not slices:
                raise ProgramError(f"chunk {chunk} of microbatch {number} has no slice of any document.")
            if workload.proportional and {part.document for part in slices} != {chunks[0][0].document}:
                raise ProgramError(f"microbatch {number} has several documents, so the lengths must be in tokens.")
    ends: dict[int, int] = {}
    whole = True
    for number, chunks in enumerate(workload.microbatches):
        for chunk, slices in enumerate(chunks):
            for part in slices:
                if part.length < 1 or part.document < 0 or part.start < 0:
                    raise ProgramError(
                        f"{part} in chunk {chunk} of microbatch {number} is no slice: it needs a document and a first "
                        "token from 0 on, and a length of 1 or more."
                    )
                whole = whole and ends.get(part.document, 0) == part.start
                ends[part.document] = part.start + part.length
    if not whole:
        _refuse_documents(workload)
    if ends and max(ends) >= len(ends):
        missing = next(number for number in range(len(ends)) if number not in ends)
        raise ProgramError(f"document {missing} is missing: the workload names document {max(ends)}.")


def _refuse_documents(workload: Workload) -> None:
    """Raise the ProgramError for documents of which a token is missing, there twice, or out of order."""
    placed = [
        _Placed(part, number, chunk)
        for number, chunks in enumerate(workload.microbatches)
        for chunk, slices in enumerate(chunks)
        for part in slices
    ]
    order = sorted(range(len(placed)), key=lambda at: placed[at].slice)  # by document and first token
    for at, before in zip(order, (None, *order), strict=False):
        document, start, _ = placed[at].slice
        known = before is not None and placed[before].slice.document == document
        end = sum(placed[before].slice[1:]) if before is not None and known else 0
        if start > end:
            gap = _Placed(Slice(document, end, start - end), 0, 0)
            raise ProgramError(f"no chunk has {str(gap).partition(' (')[0]}.")
        if before is not None and known and start < end:
            raise ProgramError(f"{placed[before]} and {placed[at]} overlap.")
    for before, at in pairwise(order):
        if placed[before].slice.document == placed[at].slice.document and at < before:
            raise ProgramError(f"{placed[at]} must come after {placed[before]}, whose keys and values are needed.")


def check_activations(program: Program) -> None:
    """Raise ProgramError for a stage or a unit that is to recompute or offload what is not there."""
    for index, stage in enumerate(program.stages):
        _check_runs(f"stage {index}", stage.pieces, stage.activations)
    if program.sharded < 1:
        raise ProgramError(f"sharded must be at least 1, not {program.sharded}.")
    if program.min_offloaded_bytes < 0:
        raise ProgramError(f"min_offloaded_bytes must not be negative, as {program.min_offloaded_bytes} is.")
    for unit, own in program.activations.items():
        op = Op("F", *unit)
        chunks = program.workload.microbatches
        if not (
            0 <= unit.stage < len(program.stages)
            and 0 <= unit.microbatch < len(chunks)
            and 0 <= unit.chunk < len(chunks[unit.microbatch])
        ):
            raise ProgramError(f"activations are given for the unit of {op}, but the program has no such unit.")
        _check_runs(f"the unit of {op}", program.stages[unit.stage].pieces, own)


def _check_runs(whose: str, pieces: tuple[Piece, ...], own: Activations) -> None:
    _check_order(whose, "recompute", pieces, own.recompute)
    for run, share in own.offload:
        if not 0 < share <= 1:
            raise ProgramError(
                f"{whose} cannot offload a share of {share:g} of {_shown(run)}: a share is above 0 and at most 1."
            )
    _check_order(whose, "offload", pieces, (run for run, _ in own.offload))
    if own.ahead < 0:
        raise ProgramError(f"{whose} cannot be back {own.ahead} ops ahead: 0 is right before the op that needs it.")


def _check_order(whose: str, verb: str, pieces: tuple[Piece, ...], runs: Iterable[tuple[Piece, ...]]) -> None:
    """Raise ProgramError for one of these that is no run of the pieces, or out of order."""
    start = 0
    for run in runs:
        at = pieces.index(run[0], start) if run and run[0] in pieces[start:] else -1
        if at < 0 or pieces[at : at + len(run)] != run:
            raise ProgramError(f"{whose} cannot {verb} {_shown(run)}: not a run of its pieces, or out of order.")
        start = at + len(run)


def _shown(run: tuple[Piece, ...]) -> str:
    return " ".join(map(str, run)) or "an empty run"
