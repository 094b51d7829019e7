"""Programs and their text form; files of torch.distributed.pipelining load here, ours load there."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.common.errors import ProgramError, ScheduleError, UserError
from helixpipe.lowering.validate import validate
from helixpipe.program.program import OP_KINDS, Op, Program, forward_only
from helixpipe.program.stages import even_stages, model_pieces
from helixpipe.program.text import format_rows, from_csv, parse_cell
from helixpipe.program.workload import Extent, Slice, Workload, uniform
from schedules import Shape, build
from tests.lowering.random_programs import random_program

NUMBERS = st.integers(0, 999_999_999)


# -------------------------------------------------------------------------------------------------------------- cells


@settings(max_examples=300)
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


@settings(max_examples=500)
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


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_file_round_trip(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    program = random_program(Random(seed))
    path = tmp_path_factory.mktemp("csv") / "program.csv"
    path.write_text("".join(",".join(row) + "\n" for row in format_rows(program)))
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
        ("0F999999999", "mine.csv names microbatch 999999999 but has no op of microbatch 1."),
        ("0F0.999999999", "mine.csv names chunk 999999999 but has no op of chunk 1."),
        ("0F999999999.999999999", "mine.csv names microbatch 999999999 but has no op of microbatch 1."),
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


def test_chunks_without_lengths_are_as_equal_as_they_can_be() -> None:
    workload = uniform(2, 3)
    assert [workload.in_tokens(tokens).lengths for tokens in (12, 13, 14)] == [(4, 4, 4), (5, 4, 4), (5, 5, 4)]
    with pytest.raises(ProgramError, match=r"^2 tokens cannot be cut into 3 chunks\.$"):
        workload.in_tokens(2)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 5), st.integers(0, 500))
def test_proportions_become_tokens(shares: list[int], scale: int, more: int) -> None:
    """Whole numbers next to the exact ones, which add up; the same whatever the proportions are counted in."""
    workload = uniform(2, len(shares), [scale * share for share in shares]).in_proportions()
    assert workload.proportional and workload == uniform(2, len(shares), shares).in_proportions()
    tokens = sum(shares) + more  # so that every chunk has one
    lengths = workload.in_tokens(tokens).lengths
    assert lengths is not None and sum(lengths) == tokens
    for length, share in zip(lengths, shares, strict=True):
        assert abs(length - tokens * share / sum(shares)) < 1
    with pytest.raises(ProgramError, match=rf"^0 tokens cannot be cut into {len(shares)} chunks\.$"):
        workload.in_tokens(0)


def test_chunks_with_lengths_make_the_sequence() -> None:
    workload = uniform(2, 3, (5, 1, 6))
    assert workload.of_sequences(12).lengths == (5, 1, 6)
    with pytest.raises(ProgramError, match=r"\(5, 1, 6\) do not add up to the sequence's 13 tokens"):
        workload.of_sequences(13)
    assert uniform(2, 3).of_sequences(14) == uniform(2, 3).in_tokens(14)
    unlike = Workload((*workload.microbatches, ((Slice(2, 0, 12),),), ((Slice(3, 0, 5), Slice(4, 0, 6)),)))
    with pytest.raises(ProgramError, match=r"\(11,\) do not add up to the sequence's 12 tokens"):
        unlike.of_sequences(12)


def test_a_step_of_documents_has_its_own_lengths() -> None:
    """Though they be all alike, and whatever the longest document of a run may have."""
    for workload in (uniform(1, 1, (9,)), uniform(3, 2, (4, 1)), uniform(2, 1, (1,))):
        assert workload.in_tokens(32) == workload


def test_rows_and_their_documents() -> None:
    packed = ((Slice(0, 0, 5),), (Slice(0, 5, 2), Slice(1, 0, 3), Slice(2, 0, 1)))
    workload = Workload((packed, ((Slice(3, 0, 4), Slice(4, 0, 4)),), ((Slice(5, 0, 1),), (Slice(6, 0, 2),))))
    assert workload.rows == (((0, 0), (0, 1)), ((2, 0), (2, 1)))
    assert [workload.documents(number) for number in range(3)] == [
        ((0, 7), (1, 3), (2, 1)),
        ((3, 4), (4, 4)),
        ((5, 1), (6, 2)),
    ]
    assert workload.earlier_chunks(2, 1) == ((2, 0),)  # another document's, in the same buffer
    interleaved = Workload((((Slice(0, 0, 1), Slice(1, 0, 1)), (Slice(0, 1, 1), Slice(1, 1, 1))),))
    assert interleaved.documents(0) is None


def test_documents_of_several_microbatches_make_one_row() -> None:
    one = ((Slice(0, 0, 2),), (Slice(1, 0, 2),), (Slice(0, 2, 2), Slice(1, 2, 2)), (Slice(2, 0, 1),))
    workload = Workload(tuple((chunk,) for chunk in one))
    assert workload.rows == (((0, 0), (1, 0), (2, 0)),)
    assert workload.row_extents == {0: ((Extent(8, 0.0, True),), (Extent(4, 0.0, True),))}


def test_the_evaluation_form_has_the_forwards_in_order() -> None:
    program = build("1f1b", Shape(2, 3, 2))
    assert format_rows(forward_only(program)) == [["0F0", "0F1", "0F2"], ["1F0", "1F1", "1F2"]]
