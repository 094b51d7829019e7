"""Heads that predict further tokens in programs: of another kind, and with attention, so that chunks run in order."""

from __future__ import annotations

import pytest

from helixpipe.program.chunked import in_chunks
from helixpipe.program.program import Op, Program, with_head
from helixpipe.program.stages import HEAD_MTP, Activations, Piece, Stage, model_pieces
from helixpipe.program.workload import uniform

HEAD = Piece("head")
ONE = Program("", (Stage((HEAD,)),), ((Op("F", 0, 0), Op("B", 0, 0)),), uniform(1))


@pytest.mark.parametrize(("kind", "order"), [("head", "F2 B2 F1 B1 F0 B0"), (HEAD_MTP, "F0 F1 F2 B2 B1 B0")])
def test_a_head_that_attends_runs_backward_after_all_forwards(kind: str, order: str) -> None:
    program = in_chunks(with_head(ONE, kind), uniform(1, 3))
    assert " ".join(f"{op.kind}{op.chunk}" for op in program.ranks[0]) == order


def test_the_head_is_of_another_kind_wherever_it_is_named() -> None:
    stage = Stage(model_pieces(1), recompute=((HEAD,),))
    own = Activations(offload=(((HEAD,), 0.5),))
    unit = Op("F", 0, 0).unit
    program = with_head(Program("", (stage,), ONE.ranks, uniform(1), activations={unit: own}), HEAD_MTP)
    assert program.stages[0].pieces == (*model_pieces(1)[:-1], Piece(HEAD_MTP))
    assert program.stages[0].recompute == ((Piece(HEAD_MTP),),)
    assert program.activations[unit].offload == (((Piece(HEAD_MTP),), 0.5),)
    assert with_head(ONE, "head") is ONE
