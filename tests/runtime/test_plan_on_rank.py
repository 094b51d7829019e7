"""What a plan means to one rank."""

from __future__ import annotations

from dataclasses import replace

from helixpipe.lowering.lower import lower
from helixpipe.program.program import Unit
from helixpipe.program.stages import Activations, Piece, Segment
from helixpipe.runtime.step import PlanOnRank
from schedules import Shape, build


def test_a_units_own_activations_cut_it_into_segments() -> None:
    """Of a stage that recomputes nothing one unit recomputes its MLP; the units before and after it stay whole."""
    program = build("1f1b", Shape(2, 3, 2))
    program = replace(program, activations={Unit(1, 1): Activations(((Piece("mlp", 1),),))})
    pieces = program.stages[1].pieces
    plan = PlanOnRank(lower(program), 1)
    whole = (Segment(pieces, False),)
    cut = (Segment(pieces[:-2], False), Segment(pieces[-2:-1], True), Segment(pieces[-1:], False))
    assert [plan.segments(Unit(1, microbatch)) for microbatch in range(3)] == [whole, cut, whole]
