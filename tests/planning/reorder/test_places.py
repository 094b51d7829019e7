"""Ops on other ranks: whole groups go, what comes out is a program, and what stood on a wrong rank is put right."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from helixpipe.common.errors import UserError
from helixpipe.lowering.validate import validate
from helixpipe.planning.reorder import improve as module
from helixpipe.planning.reorder.improve import Budget, improve
from helixpipe.planning.reorder.places import moved
from helixpipe.program.program import Op, Program
from tests.planning.reorder.instances import COSTS, simulated, small

PROGRAMS = (
    small("1f1b"),
    small("interleaved-1f1b", ranks=2, virtual_stages=2),
    small("seq1f1b", chunks=2),
    small("helix", ranks=2),
    small("weipipe", ranks=2),
)


def _home(program: Program) -> dict[Op, int]:
    return {op: rank for rank, ops in enumerate(program.ranks) for op in ops}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.schedule)
def test_groups_go_whole_and_nothing_is_lost(program: Program) -> None:
    simulation, before, sizes, valid = simulated(program), _home(program), set(), 0
    for seed in range(40):
        found = moved(simulation, Random(seed))
        assert found is not None
        after = _home(found)
        assert after.keys() == before.keys() and sum(map(len, found.ranks)) == len(before)
        gone = {op for op, rank in after.items() if rank != before[op]}
        groups = {(op.stage, None if _together(program, op) else op.microbatch) for op in gone}
        for stage, microbatch in groups:
            own = [op for op in before if op.stage == stage and microbatch in (None, op.microbatch)]
            assert {after[op] for op in own} != {before[op] for op in own} and len({after[op] for op in own}) == 1
        sizes.add(len(groups))
        try:
            validate(found)
        except UserError:
            continue
        valid += 1
    assert sizes <= {1, 2} and 2 in sizes and valid > 0


def _together(program: Program, op: Op) -> bool:
    stage = program.stages[op.stage]
    return stage.placement == "resident" and stage.has_weights


def _with(program: Program, homes: dict[Op, int]) -> Program:
    """In the order of starts, ops on these ranks."""
    starts = {event.op: (event.start, event.end) for event in simulated(program).timeline.ops}
    ranks = [sorted((op for op in homes if homes[op] == rank), key=starts.__getitem__) for rank in range(2)]
    return replace(program, ranks=tuple(map(tuple, ranks)))


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "helix"])
def test_what_stands_on_a_wrong_rank_is_put_right(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage too many on rank 0, or all attention: other orders do not help, and no other start is given."""
    monkeypatch.setattr(module, "relatives", lambda *given: iter(()))
    monkeypatch.setattr(module, "spreadable", lambda program: False)
    program = small(schedule, ranks=2, virtual_stages=2 if schedule == "interleaved-1f1b" else None)
    crowded = {
        op: 0 if op.stage == 1 or not program.stages[op.stage].has_weights else rank
        for op, rank in _home(program).items()
    }
    wrong = _with(program, crowded)
    room = 4 * max(simulated(wrong).device_needs)
    order = improve(wrong, COSTS, Budget(3000, orders_only=True), room)
    assert _home(order.after.program) == crowded
    found = improve(wrong, COSTS, Budget(20_000), room)
    assert found.after.time < order.after.time * 0.95
    validate(found.after.program)
