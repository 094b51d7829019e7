"""Every fault and its sentence. (2,000 random programs against brute force: test_lowering.py.)"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from helixpipe.common.errors import ProgramError
from helixpipe.lowering.validate import untrainable, validate
from helixpipe.program.program import Op, Program, forward_only
from helixpipe.program.stages import OWNED, Piece, RingOptions, Stage, even_stages, model_pieces, split_head
from helixpipe.program.text import format_rows, parse_rows
from helixpipe.program.workload import uniform
from schedules import Shape, build


def program(rows: Sequence[str], stages: tuple[Stage, ...] | None = None, **fields: Any) -> Program:
    """A program from rows of cells separated by spaces; sizes follow from the cells unless given."""
    ranks = parse_rows([row.split() for row in rows])
    ops = [op for rank in ranks for op in rank]
    sizes = {
        "workload": uniform(1 + max(op.microbatch for op in ops), 1 + max(op.chunk for op in ops)),
    }
    num_stages = 1 + max(op.stage for op in ops)
    recomputed = {op.stage for op in ops if op.kind == "R"}
    own = tuple(
        replace(stage, recompute=(stage.pieces,)) if index in recomputed else stage
        for index, stage in enumerate(even_stages(num_stages, num_stages))
    )
    return Program("test", stages or own, ranks, **{**sizes, **fields})


def sentence(rows: Sequence[str], stages: tuple[Stage, ...] | None = None, **fields: Any) -> str:
    with pytest.raises(ProgramError) as caught:
        validate(program(rows, stages, **fields))
    return str(caught.value)


def placed(placement: str, num_stages: int = 2) -> tuple[Stage, ...]:
    owner = 0 if placement in OWNED else None
    return tuple(replace(stage, placement=placement, owner=owner) for stage in even_stages(num_stages, num_stages))


VALID = [
    ["0F0 0B0"],
    ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"],
    ["0F0 0I0 0W0"],
    ["0F0 0F1 0B1 0I0 0W0"],  # full and split backwards may mix
    ["0F0 0R0 0B0"],
    ["0F0 1F0 1R0 1I0 0R0 0I0 0W0 1W0"],
    ["0F0 0F0.1 0B0.1 0B0"],
    ["0F0 0F0.1 0B0.1 0B0", "1F0 1F0.1 1B0.1 1B0"],
    ["1F0 1B0", "0F0 0B0"],  # any stage on any rank
    ["0F0 0B0", "", "1F0 1B0"],  # a rank may be idle
]


@pytest.mark.parametrize("rows", VALID, ids=" | ".join)
def test_valid(rows: list[str]) -> None:
    graph = validate(program(rows))
    assert [str(op) for op in graph.ops] == " ".join(rows).split()


FAULTS = [
    # nothing twice, nothing missing
    (["0F0 0F0 0B0"], "0F0 appears twice: on rank 0 and on rank 0."),
    (["0F0 0F0.0 0B0"], "0F0 appears twice: on rank 0 and on rank 0."),
    (["0F0 0B0 0B0"], "0B0 appears twice: on rank 0 and on rank 0."),
    (["0F0 0B0", "1F0 1B0 0B0"], "0B0 appears twice: on rank 0 and on rank 1."),
    (["0F0 0R0 0R0 0B0"], "0R0 appears twice: on rank 0 and on rank 0."),
    (["0B0"], "0F0 is missing: every unit needs exactly one forward."),
    (["0F0 0F1 0B1"], "0B0 is missing: every unit needs one B, or one I and one W."),
    (["0F0 0B0 0F2 0B2"], "0F1 is missing: every unit needs exactly one forward."),
    (["0F0 0F0.1 0B0"], "0B0.1 is missing: every unit needs one B, or one I and one W."),
    (["0F0 0I0"], "0W0 is missing: every unit needs one B, or one I and one W."),
    (["0F0 0W0"], "0I0 is missing: every unit needs one B, or one I and one W."),
    (["0F0 0B0 0I0"], "0B0 and 0I0 exclude each other: a unit has one B, or one I and one W."),
    (["0F0 0B0 0W0"], "0B0 and 0W0 exclude each other: a unit has one B, or one I and one W."),
    (["0F0 0I0 0W0 0B0"], "0B0 and 0I0 exclude each other: a unit has one B, or one I and one W."),
    # each rank's own order
    (["0B0 0F0"], "rank 0: 0B0 comes before 0F0, which it needs."),
    (["0F0 0W0 0I0"], "rank 0: 0W0 comes before 0I0, which it needs."),
    (["0F0 0B0 0R0"], "rank 0: 0B0 comes before 0R0, which it needs."),
    (["0F0 0I0 0R0 0W0"], "rank 0: 0I0 comes before 0R0, which it needs."),
    (["0R0 0F0 0B0"], "rank 0: 0R0 comes before 0F0, which it needs."),
    (["0F0.1 0F0 0B0.1 0B0"], "rank 0: 0F0.1 comes before 0F0, which it needs."),
    (["0F0 0F0.1 0B0 0B0.1"], "rank 0: 0B0 comes before 0B0.1, which it needs."),
    (["0F0 0F0.1 0I0 0B0.1 0W0"], "rank 0: 0I0 comes before 0B0.1, which it needs."),
    (["1F0 0F0 1B0 0B0"], "rank 0: 1F0 comes before 0F0, which it needs."),
    (["0F0 1F0 0B0 1B0"], "rank 0: 0B0 comes before 1B0, which it needs."),
    # placement
    (["0F0 1B0", "1F0 0B0"], "1B0 is on rank 0 but its forward is on rank 1, where its activations are."),
    (["0F0 0I0", "0W0"], "0W0 is on rank 1 but its forward is on rank 0, where its activations are."),
    (["0F0 0B0", "0R0"], "0R0 is on rank 1 but its forward is on rank 0, where its activations are."),
    (
        ["0F0 0B0", "0F1 0B1"],
        "stage 0 is resident, so all its ops belong on one rank, but 0F0 is on rank 0 and 0F1 on rank 1.",
    ),
]


@pytest.mark.parametrize(
    ("rows", "expected"), FAULTS, ids=lambda value: " | ".join(value) if isinstance(value, list) else ""
)
def test_faults(rows: list[str], expected: str) -> None:
    assert sentence(rows) == expected


def test_keys_and_values_stay_on_the_rank() -> None:
    rows = ["0F0 1F0 1B0 0B0", "0F0.1 1F0.1 1B0.1 0B0.1"]
    for placement in ("shipped", "replicated", "ring"):
        assert sentence(rows, placed(placement)) == (
            "the keys and values of microbatch 0 in stage 0 stay on one rank, but 0F0 is on rank 0 and 0F0.1 on rank 1."
        )


def test_placements_that_let_units_move() -> None:
    rows = ["0F0 1F0 1B0 0B0", "0F1 1F1 1B1 0B1"]
    for placement in ("shipped", "replicated", "ring"):
        validate(program(rows, placed(placement)))
    assert sentence(rows).startswith("stage 0 is resident")
    # A stage without attention has no keys and values, so its chunks may part.
    pieces = model_pieces(1)
    stages = (Stage(pieces[:2], "replicated"), Stage(pieces[2:]))
    validate(program(["0F0 0B0", "0F0.1 0B0.1", "1F0 1F0.1 1B0.1 1B0"], stages))


def test_a_cycle_is_told_op_by_op() -> None:
    """Rank 0 wants the backward of 0 before it sends 1 forward; rank 1 wants 1 forward first."""
    assert sentence(["0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"]) == (
        "the program can never finish, its ops wait for each other in a circle: 0B0 (rank 0) waits for 1B0 (rank 1), "
        "1B0 (rank 1) waits for 1F0 (rank 1), 1F0 (rank 1) comes after 1F1 (rank 1), "
        "1F1 (rank 1) waits for 0F1 (rank 0), 0F1 (rank 0) comes after 0B0 (rank 0)."
    )


def test_a_long_cycle_is_told_by_its_corners() -> None:
    good = build("1f1b", Shape(8, 64, 8))
    row = sorted(good.ranks[3], key=lambda op: (op.kind != "F", -op.microbatch if op.kind == "F" else op.microbatch))
    with pytest.raises(ProgramError) as caught:
        validate(replace(good, ranks=(*good.ranks[:3], tuple(row), *good.ranks[4:])))
    told = re.findall(r"(\S+) \(rank (\d)\) (waits for|comes after) (\S+) \(rank (\d)\)", str(caught.value))
    assert 2 <= len(told) < 10
    place = {op: (rank, at) for rank, cells in enumerate(format_rows(good)) for at, op in enumerate(cells)}
    place.update({str(op): (3, at) for at, op in enumerate(row)})
    for (op, rank, relation, target, target_rank), following in zip(told, told[1:] + told[:1], strict=True):
        assert (int(rank), int(target_rank)) == (place[op][0], place[target][0])
        assert target == following[0]
        if relation == "comes after":
            assert rank == target_rank and place[target] < place[op]


def test_ranges() -> None:
    ops = (Op("F", 0, 0), Op("B", 0, 0))
    good = Program("test", even_stages(1, 1), (ops,), uniform(1))
    validate(good)
    for op, message in [
        (Op("F", 1, 0), "rank 0: 1F0 names stage 1, but the last stage is 0."),
        (Op("F", -1, 0), "rank 0: -1F0 names stage -1, but the last stage is 0."),
        (Op("F", 0, 1), "rank 0: 0F1 names microbatch 1, but the last microbatch is 0."),
        (Op("F", 0, 0, 1), "rank 0: 0F0.1 names chunk 1, but the last chunk is 0."),
        (Op("X", 0, 0), "rank 0: 0X0 has unknown kind 'X'; known are F, B, I, W, R."),
    ]:
        with pytest.raises(ProgramError, match=f"^{re.escape(message)}$"):
            validate(replace(good, ranks=((*ops, op),)))


CHANGES: list[tuple[Callable[[Program], Program], str]] = [
    (
        lambda p: replace(p, stages=p.stages[::-1]),
        "the stages are not the model in order: piece 0 is norm[1] where embed was expected.",
    ),
    (
        lambda p: replace(p, stages=p.stages[:1]),
        "the stages are not the model in order: piece 6 is nothing where head was expected.",
    ),
    (
        lambda p: replace(p, stages=(*p.stages, Stage((Piece("head"),)))),
        "the stages are not the model in order: piece 12 is head where nothing was expected.",
    ),
    (
        lambda p: replace(p, stages=()),
        "the stages are not the model in order: piece 0 is nothing where embed was expected.",
    ),
    (lambda p: replace(p, stages=(*p.stages, Stage(()))), "stage 2 has no pieces."),
    (
        lambda p: replace(p, stages=(replace(p.stages[0], placement="nowhere"), p.stages[1])),
        "stage 0 has unknown placement 'nowhere'; known are resident, shipped, replicated, ring.",
    ),
    (
        lambda p: replace(p, stages=(p.stages[0], replace(p.stages[1], placement="shipped"))),
        "stage 1 is shipped, so it needs an owner among ranks 0 to 1.",
    ),
    (
        lambda p: replace(p, stages=(replace(p.stages[0], placement="shipped", owner=2), p.stages[1])),
        "stage 0 is shipped, so it needs an owner among ranks 0 to 1.",
    ),
    (
        lambda p: replace(p, stages=(replace(p.stages[0], placement="ring"), p.stages[1])),
        "stage 0 is ring, so it needs an owner among ranks 0 to 1.",
    ),
    (
        lambda p: replace(p, ring=RingOptions(slots=0)),
        "a ring needs room for at least 1 copy of weights on each rank, not 0.",
    ),
    (
        lambda p: replace(p, stages=(replace(p.stages[0], owner=0), p.stages[1])),
        "stage 0 is resident, and only a shipped or ring stage has an owner.",
    ),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=[message for _, message in CHANGES])
def test_stages_and_sizes(change: Callable[[Program], Program], message: str) -> None:
    with pytest.raises(ProgramError, match=f"^{re.escape(message)}$"):
        validate(change(build("1f1b", Shape(2, 2, 2))))


def test_no_ranks() -> None:
    with pytest.raises(ProgramError, match="0F0 is missing"):
        validate(replace(build("1f1b", Shape(1, 1, 1)), ranks=()))


def test_forward_only() -> None:
    good = build("1f1b", Shape(2, 3, 2))
    validate(forward_only(good))
    for kind in "BIWR":
        row = (*forward_only(good).ranks[0], Op(kind, 0, 1))
        with pytest.raises(ProgramError, match=rf"^0{kind}1 has no place in a forward-only program\.$"):
            validate(replace(forward_only(good), ranks=(row, forward_only(good).ranks[1])))
    with pytest.raises(ProgramError, match="0B0 is missing"):
        validate(replace(forward_only(good), forward_only=False))


def test_validation_leaves_the_program_alone() -> None:
    good = build("interleaved-1f1b", Shape(2, 4, 4))
    before = repr(good)
    validate(good)
    assert repr(good) == before
    assert len(list(good.units())) == len(good.stages) * good.num_microbatches


def test_what_training_cannot_run() -> None:
    assert untrainable(program(["0F0 0B0", "1F0 1B0"])) is None
    idle = untrainable(program(["0F0 0B0", "", "1F0 1B0"]))
    assert idle == "schedule test gives pipeline rank 1 nothing to run."
    evaluation = untrainable(forward_only(build("1f1b", Shape(2, 2, 2))))
    assert evaluation == "schedule 1f1b has no backward: it is an evaluation program."
    moving = ["0F0 1F0 1B0 0B0", "0F1 1F1 1B1 0B1"]
    for placement in ("ring", "replicated"):
        assert untrainable(program(moving, placed(placement))) is None


PARTS = split_head(2)


@pytest.mark.parametrize(
    ("rows", "stages", "expected"),
    [
        (
            ["0F0 1F0 2F0 1B0 2B0 0B0", ""],
            [PARTS[:1], PARTS[1:2], PARTS[2:]],
            "each of the 2 ranks must have one part of the head, but of its 2 parts the ranks are 0, 0.",
        ),
        (
            ["0F0 1F0 1B0 0B0", "2F0 2B0", ""],
            [PARTS[:1], PARTS[1:2], PARTS[2:]],
            "each of the 3 ranks must have one part of the head, but of its 2 parts the ranks are 0, 1.",
        ),
        (
            ["0F0 1F0 1B0 0B0"],
            [PARTS[:2], PARTS[2:]],
            "stage 0 has a part of the head, which must be a resident stage of its own.",
        ),
        (
            ["0F0 1F0 1B0 0B0", "2F0 2B0"],
            [PARTS[:1], PARTS[2:], PARTS[1:2]],
            "the stages are not the model in order: piece 6 is head.norm where head was expected.",
        ),
        (
            ["0F0 1F0 1B0 0B0"],
            [PARTS[:1], (Piece("head.part", part=(0, 10**12)),)],
            "the stages are not the model in order: piece 6 is head.norm where head was expected.",
        ),
        (
            ["0F0 0B0"],
            [PARTS[:1]],
            "the stages are not the model in order: piece 6 is head.norm where head was expected.",
        ),
    ],
)
def test_faults_of_a_divided_head(rows: list[str], stages: list[tuple[Piece, ...]], expected: str) -> None:
    first, *others = stages
    made = (Stage((*model_pieces(1)[:-1], *first)), *(Stage(pieces) for pieces in others))
    assert sentence(rows, made) == expected
    parts = (*made[:1], *(replace(stage, placement="replicated") for stage in made[1:]))
    assert "of the head" in sentence(rows, parts) or "model in order" in sentence(rows, parts)
