"""Programs that offload at random."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

from helixpipe.program.program import Program, Unit
from helixpipe.program.stages import Activations, Piece


def offloading_program(program: Program, seed: int) -> Program:
    """The program with three of four units offloading something, not all the same, and all of the rest nothing."""
    rng = random.Random(seed)
    units = sorted({op.unit for ops in program.ranks for op in ops})
    own = {unit: _random_activations(program, unit, rng) for unit in units if rng.random() < 0.75}
    return replace(program, activations={**program.activations, **own})


def everything(program: Program, ahead: int = 1, units: Iterable[Unit] | None = None) -> Program:
    """The program with all that may leave of these units, or all, leaving."""
    own = {}
    for unit in units if units is not None else {op.unit for ops in program.ranks for op in ops}:
        runs = ((program.stages[unit.stage].pieces, 1.0),)
        own[unit] = Activations(program.activations_of(unit).recompute, runs, ahead)
    return replace(program, activations={**program.activations, **own})


def _random_activations(program: Program, unit: Unit, rng: random.Random) -> Activations:
    pieces = program.stages[unit.stage].pieces
    runs: list[tuple[tuple[Piece, ...], float]] = []
    at = 0
    while at < len(pieces):
        length = rng.randint(1, 4)
        if rng.random() < 0.7:
            runs.append((pieces[at : at + length], rng.choice((1.0, 1.0, 0.5, 0.2))))
        at += length
    return Activations(program.activations_of(unit).recompute, tuple(runs), rng.randint(0, 3))
