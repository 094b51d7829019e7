"""Programs with weights in parts: layer by layer, the same otherwise, with gathers and scatters that mostly hide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helixpipe.common.errors import ScheduleError
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.lower import lower
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.planning.memory.sharding import shared_out
from helixpipe.program.json_text import from_json, to_json
from helixpipe.program.program import Op
from helixpipe.program.stages import Piece
from helixpipe.simulate.simulator import simulate
from schedules import CATALOGUE, Shape, build

FREE = PieceTimes({"mlp": 1.0})


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name != "infinipipe"])
def test_what_runs_where_and_when_stays(name: str) -> None:
    """Where gathers take no time, steps take as long as before, but for what a finer cut lets start sooner."""
    shape = Shape(1 if name == "none" else 4, 8, 8, chunks=2 if CATALOGUE[name].chunks else 1)
    program = build(name, shape)
    shared = build(name, replace(shape, sharded=2))
    before, after = (simulate(lower(each), FREE) for each in (program, shared))
    assert sum(before.busy) == pytest.approx(sum(after.busy))
    assert after.makespan <= before.makespan * (1 + 1e-9)
    assert [shared.pieces_of_rank(rank) for rank in range(shape.ranks)] == [
        program.pieces_of_rank(rank) for rank in range(shape.ranks)
    ]


def test_none_is_fsdp() -> None:
    """A stage a layer: forwards up, backwards down; the last layer's weights stay for its backward."""
    shared = build("none", Shape(1, 1, 2, sharded=4))
    assert [stage.pieces[0] for stage in shared.stages] == [
        Piece("embed"),
        Piece("norm", 0),
        Piece("norm", 1),
        Piece("head"),
    ]
    assert shared.ranks[0] == (*(Op("F", s, 0) for s in range(4)), *(Op("B", s, 0) for s in reversed(range(4))))
    collectives = lower(shared).graph.collectives
    assert [str(each.op) for each in collectives if each.kind == "gather"] == [
        *("0F0", "1F0", "2F0", "3F0", "2B0", "1B0", "0B0")
    ]
    assert [str(each.op) for each in collectives if each.kind == "scatter"] == ["3B0", "2B0", "1B0", "0B0"]


def test_weights_may_be_gathered_once(tmp_path: Path) -> None:
    """Of every stage before its first forward; gradients leave after each op, as else. A file says so."""
    shared = build("1f1b", Shape(2, 3, 4, sharded=4, gathered_once=True))
    collectives = lower(shared).graph.collectives
    gathers = [str(each.op) for each in collectives if each.kind == "gather"]
    assert sorted(gathers) == [f"{stage}F0" for stage in range(len(shared.stages))]
    each_op = lower(build("1f1b", Shape(2, 3, 4, sharded=4))).graph.collectives
    scatters = [[each.op for each in found if each.kind == "scatter"] for found in (collectives, each_op)]
    assert scatters[0] == scatters[1] and len(scatters[0]) == 3 * len(shared.stages)
    to_json(shared, tmp_path / "once.json")
    assert from_json(tmp_path / "once.json") == shared
    with pytest.raises(ScheduleError, match="gathered once a step"):
        shared_out(shared, 4)


@pytest.mark.parametrize(("gather", "held_up"), [(1.0, 2.0), (3.0, 10.0)])
def test_what_is_longer_than_an_op_is_not_hidden(gather: float, held_up: float) -> None:
    """`none` with one layer and ops of 1 (F) and 2 (B) for each of three stages. Short ones: the first gather and the
    last scatter. Of gathers of 3 before F, of which one is under way at a time, each op waits for 2 more."""
    costs = PieceTimes(dict.fromkeys(("embed", "mlp", "head"), 1.0), message=gather)
    simulation = simulate(lower(build("none", Shape(1, 1, 1, sharded=2)), costs), costs)
    assert simulation.sharing_time == [pytest.approx((5 + 3) * gather)]
    assert simulation.makespan == pytest.approx(9.0 + simulation.held_up_by_sharing[0])
    if gather == 1.0:
        assert simulation.held_up_by_sharing == [pytest.approx(held_up)]
    else:
        assert simulation.held_up_by_sharing[0] >= held_up


def test_what_is_recomputed_is_cut_with_its_stage() -> None:
    shape = Shape(2, 2, 4, recompute=RecomputeOptions("full", recompute_early=False), sharded=2)
    for stage in build("1f1b", shape).stages:
        assert {piece for run in stage.recompute for piece in run} == {p for p in stage.pieces if p.layer >= 0}


def test_it_is_in_the_file_and_not_shared_out_again(tmp_path: Path) -> None:
    shared = build("1f1b", Shape(2, 2, 4, sharded=4))
    to_json(shared, tmp_path / "x.json")
    again = from_json(tmp_path / "x.json")
    assert again == shared == shared_out(again, 4)
    with pytest.raises(ScheduleError, match="parts over 4 data-parallel ranks, and there are 2"):
        shared_out(again, 2)
