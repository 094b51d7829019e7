"""What a plan means to one rank."""

from __future__ import annotations

from dataclasses import replace

from helixpipe.lowering.lower import lower
from helixpipe.program.program import Program, Unit
from helixpipe.program.stages import Activations, Piece, Segment
from helixpipe.runtime.step import PlanOnRank
from schedules import Shape, build
from schedules.helix import HelixOptions


def test_a_units_own_activations_cut_it_into_segments() -> None:
    """Of a stage that recomputes nothing one unit recomputes its MLP; the units before and after it stay whole."""
    program = build("1f1b", Shape(2, 3, 2))
    program = replace(program, activations={Unit(1, 1): Activations(((Piece("mlp", 1),),))})
    pieces = program.stages[1].pieces
    plan = PlanOnRank(lower(program), 1)
    whole = (Segment(pieces, False),)
    cut = (Segment(pieces[:-2], False), Segment(pieces[-2:-1], True), Segment(pieces[-1:], False))
    assert [plan.segments(Unit(1, microbatch)) for microbatch in range(3)] == [whole, cut, whole]


def test_ops_in_graphs() -> None:
    """Of whole weights of the rank's own, where nothing leaves the device and no backward is split."""

    def ops(program: Program, rank: int = 0) -> set[tuple[int, bool]]:
        return {
            (op.stage, PlanOnRank(lower(program), rank)._planned(op, task, 8).in_graphs)
            for task, op in enumerate(lower(program).graph.ops)
            if op in program.ranks[rank]
        }

    plain = build("1f1b", Shape(2, 3, 2))
    assert ops(plain) == {(0, True)}
    away = replace(plain, activations={Unit(0, 1): Activations(offload=(((Piece("mlp", 0),), 1.0),))})
    assert ops(away) == {(0, True), (0, False)}
    assert ops(replace(plain, sharded=2)) == {(0, False)}
    assert {captured for _, captured in ops(build("zb1p", Shape(2, 3, 2)))} == {False}
    shipped = build("helix", Shape(2, 4, 2), HelixOptions(1, "qkv", False))
    assert {captured for _, captured in ops(shipped)} == {True, False}
