"""Other cuts of a run's model: programs with the same ops on the same ranks, whose stages have other layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from helixpipe.common.errors import ScheduleError
from helixpipe.program.program import Program
from helixpipe.program.stages import Piece, layers_of

Division = tuple[int, ...]
"""The layers of each stage."""


def ranks_of_stages(program: Program) -> tuple[int, ...]:
    """Return the rank of each stage, of a program that runs each on one."""
    ranks = {op.stage: rank for rank, ops in enumerate(program.ranks) for op in ops}
    return tuple(ranks[stage] for stage in range(len(program.stages)))


def can_be_cut(program: Program) -> bool:
    """Whether stages are of whole layers, and no units have activations of their own."""
    whole = _cut(program, layers_of(program.stages)) == [stage.pieces for stage in program.stages]
    return whole and not program.activations


def recut(program: Program, division: Sequence[int]) -> Program:
    """Return the program with so many layers in each stage. Recomputed runs stay with their layers, and end where a cut
    goes through them. Raises ScheduleError where stages are not of whole layers, or units have activations of their
    own."""
    if tuple(division) == layers_of(program.stages):
        return program
    if not can_be_cut(program):
        raise ScheduleError("stages of parts of layers, and units with activations of their own, are not cut anew.")
    if len(division) != len(program.stages) or sum(division) != program.num_layers:
        raise ScheduleError(f"{len(program.stages)} stages of {program.num_layers} layers do not have {division}.")
    runs = [run for stage in program.stages for run in stage.recompute]
    stages = []
    for stage, pieces in zip(program.stages, _cut(program, division), strict=True):
        own = frozenset(pieces)
        kept = (tuple(piece for piece in run if piece in own) for run in runs)
        stages.append(replace(stage, pieces=pieces, recompute=tuple(run for run in kept if run)))
    return replace(program, stages=tuple(stages))


def better_divisions(
    program: Program, busy: Callable[[Program], Sequence[float]], fits: Callable[[Program], bool]
) -> Iterator[Division]:
    """Yield divisions in which busy ranks have less to do, each a layer further from the program's own: it goes from
    the busiest rank to where the ranks are then least busy, the busiest of them first, among divisions that fit.

    busy: how long each rank's ops take. Every stage keeps a layer.
    """
    ranks = ranks_of_stages(program)
    division = layers_of(program.stages)
    now = list(busy(program))
    while True:
        busiest = now.index(max(now))
        options = []
        for source, target in ((a, b) for a in range(len(ranks)) for b in range(len(ranks))):
            if ranks[source] == busiest != ranks[target] and division[source] > 1:
                option = _moved(division, source, target)
                then = list(busy(recut(program, option)))
                options.append((sorted(then, reverse=True), abs(source - target), option, then))
        best = next((each for each in sorted(options) if fits(recut(program, each[2]))), None)
        if best is None or best[0] >= sorted(now, reverse=True):
            return
        _, _, division, now = best
        yield division


def _moved(division: Division, source: int, target: int) -> Division:
    return tuple(count - (stage == source) + (stage == target) for stage, count in enumerate(division))


def _cut(program: Program, division: Sequence[int]) -> list[tuple[Piece, ...]]:
    """Return the model's pieces in stages of so many layers."""
    pieces = [piece for stage in program.stages for piece in stage.pieces]
    starts = {piece.layer: place for place, piece in reversed(list(enumerate(pieces))) if piece.layer >= 0}
    end = max((place for place, piece in enumerate(pieces) if piece.layer >= 0), default=-1) + 1
    cuts, first = [0], 0
    for count in division[:-1]:
        first += count
        cuts.append(starts.get(first, end))
    return [tuple(pieces[a:b]) for a, b in zip(cuts, [*cuts[1:], len(pieces)], strict=True)]
