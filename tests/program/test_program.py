"""Programs and their text form; files of torch.distributed.pipelining load here, ours load there."""

from __future__ import annotations

import csv
import re
import tracemalloc
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from helixpipe.common.errors import ProgramError, ScheduleError, UserError
from helixpipe.lowering.lower import lower
from helixpipe.lowering.validate import validate
from helixpipe.program.program import (
    OP_KINDS,
    Op,
    Program,
    even_stages,
    format_rows,
    forward_only,
    from_csv,
    model_pieces,
    parse_cell,
    to_csv,
)
from schedules import Shape, build
from tests.lowering.random_programs import DETERMINISTIC, random_program

NUMBERS = st.integers(0, 999_999_999)


# -------------------------------------------------------------------------------------------------------------- cells


@settings(DETERMINISTIC, max_examples=300)
@given(kind=st.sampled_from(OP_KINDS), stage=NUMBERS, microbatch=NUMBERS, chunk=st.one_of(st.just(0), NUMBERS))
def test_cell_round_trip(kind: str, stage: int, microbatch: int, chunk: int) -> None:
    op = Op(kind, stage, microbatch, chunk)
    assert parse_cell(str(op)) == [op]


def test_cells_read_as_written() -> None:
    assert str(Op("F", 2, 5)) == "2F5"
    assert str(Op("F", 2, 5, 1)) == "2F5.1"
    assert parse_cell("2F5.0") == parse_cell(" 2F5 ") == parse_cell("2F5\t") == [Op("F", 2, 5)]
    assert parse_cell("") == parse_cell("   ") == []


@pytest.mark.parametrize(
    "cell", ["2UNSHARD", "2RESHARD", "2REDUCE_GRAD", "0SEND_F1", "1RECV_F1", "1SEND_B0", "0RECV_B0"]
)
def test_cells_that_are_derived_here_are_ignored(cell: str) -> None:
    assert parse_cell(cell) == []


def test_overlapped_cells_give_their_ops_in_order() -> None:
    assert parse_cell("(0F1;3B0)OVERLAP_F_B") == [Op("F", 0, 1), Op("B", 3, 0)]


MALFORMED = [
    *(
        "2F0garbage",
        "F0",
        "2X0",
        "2F",
        "2F0.",
        "2F.1",
        "2F0.x",
        "2F0.1.2",
        "2 F0",
        "2F 0",
        "2f0",
        "F",
        "2",
        "0",
        "2F0;2F1",
    ),
    *(
        "-1F0",
        "2F-1",
        "2F0.-1",
        "+2F0",
        "2F1e3",
        "2F0x",
        "2F1_0",
        "2٣F0",
        "٣F0",
        "２F0",
        "2F" + "9" * 5000,
        "9" * 5000 + "F0",
    ),
    *(
        "2F1234567890",
        "2UNSHARD.1",
        "2SEND",
        "2SEND_X1",
        "(0F1;3B0)",
        "(0F1;junk)OVERLAP_F_B",
        "(0F1;(1B0)OVERLAP_F_B)OVERLAP_F_B",
    ),
    *("None", "nan", "2F0\x00", "\x00", "2F0\n2F1", "=2F0", "2FF0", "2FB0"),
]


@pytest.mark.parametrize("cell", MALFORMED)
def test_malformed_cells_are_refused_whole(cell: str) -> None:
    with pytest.raises(ProgramError, match="is not an op: write stage, kind") as caught:
        parse_cell(cell)
    assert len(str(caught.value)) < 300


@settings(DETERMINISTIC, max_examples=500)
@given(st.text(alphabet="0123456789FBIWRX.;()_SENDRCV \t-", max_size=12))
def test_any_text_is_an_op_or_refused(cell: str) -> None:
    try:
        ops = parse_cell(cell)
    except ProgramError:
        return
    plain = re.fullmatch(r"\s*([0-9]+)([FBIWR])([0-9]+)(?:\.([0-9]+))?\s*", cell)
    assert [tuple(op) for op in ops] == (
        [(plain[2], int(plain[1]), int(plain[3]), int(plain[4] or 0))] if plain else []
    )


# -------------------------------------------------------------------------------------------------------------- files


@settings(DETERMINISTIC, max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_file_round_trip(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    program = random_program(Random(seed))
    path = tmp_path_factory.mktemp("csv") / "program.csv"
    to_csv(program, path)
    loaded = from_csv(path)
    used = max(rank for rank, ops in enumerate(program.ranks) if ops) + 1  # idle last ranks are blank lines at the end
    assert loaded.ranks == program.ranks[:used]
    assert (loaded.num_microbatches, loaded.num_chunks) == (program.num_microbatches, program.num_chunks)
    assert loaded.forward_only == program.forward_only
    assert len(loaded.stages) == len(program.stages)
    assert loaded.schedule == "program.csv"


def load(tmp_path: Path, content: bytes | str, num_layers: int | None = None) -> Program:
    path = tmp_path / "mine.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return from_csv(path, num_layers)


def test_a_file_may_have_spaces_blank_cells_a_byte_order_mark_and_any_line_ends(tmp_path: Path) -> None:
    program = load(tmp_path, "\ufeff0F0, 0F1,,0B0 ,0B1\r\n,1F0,1B0,1F1,1B1,,\n\n\n")
    assert format_rows(program) == [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    validate(program)


def test_a_rank_without_ops_keeps_its_row(tmp_path: Path) -> None:
    assert [len(ops) for ops in load(tmp_path, "0F0,0B0\n\n1F0,1B0\n").ranks] == [2, 0, 2]


def test_layers_are_divided_over_the_stages(tmp_path: Path) -> None:
    program = load(tmp_path, "0F0,0B0\n1F0,1B0\n", num_layers=6)
    assert program.num_layers == 6
    assert [piece.layer for piece in program.stages[1].pieces if piece.kind == "attn"] == [3, 4, 5]
    with pytest.raises(
        ScheduleError, match=r"--num-layers 5 cannot be divided evenly over 2 .* nearest valid values are 4 and 6\.$"
    ):
        load(tmp_path, "0F0,0B0\n1F0,1B0\n", num_layers=5)


def test_a_malformed_cell_is_named_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"^mine\.csv, row 1 \(rank 1\), column 2: cell '1F0garbage' is not an op"):
        load(tmp_path, "0F0,0B0\n1B0,1F0garbage\n")


@pytest.mark.parametrize("content", ["", "\n\n", ",,,\n,\n", "   ,\t\n", "0UNSHARD,0RESHARD\n"])
def test_a_file_without_ops(tmp_path: Path, content: str) -> None:
    with pytest.raises(ProgramError, match=r"mine\.csv contains no ops\."):
        load(tmp_path, content)


@pytest.mark.parametrize(
    "content", [bytes(range(256)), b"\x80\x81", b"PK\x03\x04\x00\x00" * 50, b"\xff\xfe0\x00F\x000\x00"]
)
def test_a_binary_file(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ProgramError, match=r"^(cannot read the schedule file|mine\.csv, row).*\.$"):
        load(tmp_path, content)


def test_a_cell_longer_than_csv_allows(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="field larger than field limit"):
        load(tmp_path, "0F0," + "x" * 200_000)
    with pytest.raises(ProgramError, match="is not an op") as caught:
        load(tmp_path, "0F0," + "x" * 100_000)
    assert len(str(caught.value)) < 300


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"cannot read the schedule file .*none\.csv: No such file or directory\."):
        from_csv(tmp_path / "none.csv")
    with pytest.raises(ProgramError, match=r"Is a directory\."):
        from_csv(tmp_path)


@pytest.mark.parametrize(
    ("cell", "sentence"),
    [
        ("999999999F0", "mine.csv names stage 999999999 but has no op of stage 1."),
        ("0F999999999", "0F1 is missing: every unit needs exactly one forward."),
        ("0F0.999999999", "0F0.1 is missing: every unit needs exactly one forward."),
        ("0F999999999.999999999", "0F0.1 is missing: every unit needs exactly one forward."),
    ],
)
def test_huge_numbers_cost_neither_memory_nor_time(tmp_path: Path, cell: str, sentence: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(UserError) as caught:
            validate(load(tmp_path, f"0F0,0B0,{cell}\n"))
        assert str(caught.value) == sentence
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------------------------------------------------- stages


def test_even_stages_are_the_model() -> None:
    for num_layers, num_stages in ((1, 1), (4, 2), (6, 3), (5, 5)):
        stages = even_stages(num_layers, num_stages)
        assert tuple(piece for stage in stages for piece in stage.pieces) == model_pieces(num_layers)
        assert len({sum(piece.kind == "mlp" for piece in stage.pieces) for stage in stages}) == 1


@pytest.mark.parametrize(
    ("layers", "stages", "valid"), [(5, 4, "s are 4 and 8"), (3, 4, " is 4"), (7, 2, "s are 6 and 8")]
)
def test_uneven_layers_name_the_nearest(layers: int, stages: int, valid: str) -> None:
    with pytest.raises(
        ScheduleError, match=rf"^--num-layers {layers} cannot .* over {stages} .* nearest valid value{valid}\.$"
    ):
        even_stages(layers, stages)


def test_a_ranks_pieces_are_in_model_order() -> None:
    program = build("interleaved-1f1b", Shape(2, 2, 4))
    pieces = program.pieces_of_rank(1)
    assert [str(piece) for piece in pieces if piece.kind in ("embed", "attn", "head")] == ["attn[1]", "attn[3]", "head"]


def test_the_evaluation_form_has_the_forwards_in_order() -> None:
    program = build("1f1b", Shape(2, 3, 2))
    assert format_rows(forward_only(program)) == [["0F0", "0F1", "0F2"], ["1F0", "1F1", "1F2"]]


# -------------------------------------------------------------------------------------------------------------- torch


def torch_stages(num_stages: int, num_ranks: int, local: int) -> list[Any]:
    """As much of a PipelineStage as a schedule's order depends on."""
    common = {"num_stages": num_stages, "group_size": num_ranks, "group_rank": 0, "submod": None, "has_backward": True}
    return [SimpleNamespace(stage_index=i, is_first=i == 0, is_last=False, **common) for i in range(local)]


def loss(*_: Any) -> None: ...


MULTI = [
    (torch_schedules.ScheduleInterleaved1F1B, 2, "FB"),
    (torch_schedules.ScheduleLoopedBFS, 2, "FB"),
    (torch_schedules.ScheduleInterleavedZeroBubble, 2, "FIW"),
    (torch_schedules.ScheduleZBVZeroBubble, 2, "FIW"),
    (torch_schedules.ScheduleDualPipeV, 2, "FBIW"),
]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize(
    ("schedule", "local", "kinds"), MULTI, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_files_dumped_by_torch_load(
    schedule: Any, local: int, kinds: str, form: str, ranks: int, tmp_path: Path
) -> None:
    path = tmp_path / "torch.csv"
    microbatches = 2 * ranks
    dumped = schedule(torch_stages(local * ranks, ranks, local), microbatches, loss)
    dumped._dump_csv(str(path), form)
    program = from_csv(path)
    validate(program)
    assert {op.kind for ops in program.ranks for op in ops} <= set(kinds)
    assert (program.num_ranks, len(program.stages), program.num_microbatches) == (ranks, local * ranks, microbatches)
    assert program.num_chunks == 1
    # The ops are torch's, in torch's order.
    theirs = [flat(action) for action in dumped.pipeline_order[ranks - 1]]
    assert [str(op) for op in program.ranks[ranks - 1]] == [cell for cells in theirs for cell in cells]
    assert len(lower(program).streams) == ranks


def flat(action: Any) -> list[str]:
    if action is None:
        return []
    return [str(part) for part in action.sub_actions or (action,)]


@pytest.mark.parametrize("microbatches", [4, 6, 12])
def test_torch_1f1b_is_ours(microbatches: int, tmp_path: Path) -> None:
    (stage,) = torch_stages(4, 4, 1)
    order = torch_schedules.Schedule1F1B(stage, microbatches, loss)._get_pipeline_order()
    # torch 2.13 writes the last row from microbatch 1 on (3F1 … 3Fm) although it runs from 0 on: what is copied here.
    last = [f"3{kind}{i}" for i in range(microbatches) for kind in "FB"]
    with open(tmp_path / "torch.csv", "w", newline="") as file:
        csv.writer(file).writerows([*(order[rank] for rank in range(3)), last])
    program = from_csv(tmp_path / "torch.csv")
    validate(program)
    assert program.ranks == build("1f1b", Shape(4, microbatches, 4)).ranks


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([["0F0", "0F0", "0B0"]], "0F0 appears twice: on rank 0 and on rank 0."),
        ([["0F0", "0B0", "0B0"]], "0B0 appears twice: on rank 0 and on rank 0."),
        ([["0F1", "0B1"]], "0F0 is missing: every unit needs exactly one forward."),
        ([["0F0garbage", "0B0"]], "is not an op"),
        ([["0F0", "1B0", "0B0"], ["1F0"]], None),
        ([["1F0", "1B0"], ["0B0", "0F0"]], None),
        ([["0F0", "0B0"], ["1B0", "1F0"]], None),
    ],
)
def test_what_torch_accepts_and_what_not(rows: list[list[str]], sentence: str | None, tmp_path: Path) -> None:
    """Both refuse the last three; the first four torch takes for good."""
    with open(tmp_path / "bad.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    with pytest.raises(ProgramError, match=sentence):
        validate(from_csv(tmp_path / "bad.csv"))
    actions = {rank: [torch_schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    if sentence is not None:
        torch_schedules._validate_schedule(actions, len(rows), len(rows), 1)
    else:
        with pytest.raises(AssertionError):
            torch_schedules._validate_schedule(actions, len(rows), len(rows), 1)


@pytest.mark.parametrize("microbatches", [4, 8])
def test_torch_interleaved_is_ours(microbatches: int) -> None:
    theirs = torch_schedules.ScheduleInterleaved1F1B(torch_stages(12, 4, 3), microbatches, loss).pipeline_order
    ours = format_rows(build("interleaved-1f1b", Shape(4, microbatches, 12, virtual_stages=3)))
    assert ours == [[str(action) for action in theirs[rank] if action is not None] for rank in range(4)]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("1f1b", Shape(4, 8, 4)),
        ("1f1b", Shape(4, 2, 4)),
        ("gpipe", Shape(3, 5, 3)),
        ("interleaved-1f1b", Shape(4, 8, 8)),
        ("interleaved-1f1b", Shape(2, 4, 6, virtual_stages=3)),
    ],
)
def test_our_files_load_in_torch(name: str, shape: Shape, tmp_path: Path) -> None:
    program = build(name, shape)
    path = tmp_path / "ours.csv"
    to_csv(program, path)
    num_stages = len(program.stages)
    runtime = torch_schedules._PipelineScheduleRuntime(
        torch_stages(num_stages, shape.ranks, num_stages // shape.ranks), shape.microbatches, loss
    )
    runtime._load_csv(str(path))  # reads every cell, validates, inserts communication
    assert format_rows(program) == [
        [str(action) for action in runtime.pipeline_order[rank]] for rank in range(shape.ranks)
    ]
    assert runtime.stage_index_to_group_rank == {stage: stage % shape.ranks for stage in range(num_stages)}
    bare = {  # what torch's simulator can read of torch's own lowering
        rank: [action for action in actions if "SHARD" not in str(action) and "REDUCE" not in str(action)]
        for rank, actions in runtime.pipeline_order_with_comms.items()
    }
    torch_schedules._simulate_comms_compute(bare, runtime.stage_index_to_group_rank.__getitem__, num_stages)


def test_split_programs_load_in_torch(tmp_path: Path) -> None:
    path = tmp_path / "zb.csv"
    torch_schedules.ScheduleZBVZeroBubble(torch_stages(8, 4, 2), 8, loss)._dump_csv(str(path), "compute_only")
    to_csv(from_csv(path), path)
    runtime = torch_schedules._PipelineScheduleRuntime(torch_stages(8, 4, 2), 8, loss)
    runtime._load_csv(str(path))
