"""Every schedule of the registry over a grid of shapes, and what is said of shapes and names it cannot have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from helixpipe.common.errors import ProgramError, ScheduleError, UserError
from helixpipe.draw.text import stage_count
from helixpipe.lowering.lower import lower
from helixpipe.lowering.validate import validate
from helixpipe.planning.catalogue import Catalogue
from helixpipe.program.program import Program, forward_only
from helixpipe.program.text import to_csv
from schedules import CATALOGUE, Shape, build, find, foreign_options
from schedules.infinipipe import InfinipipeOptions
from tests.selection import graded


def grid(ranks: Sequence[int]) -> Iterator[Shape]:
    for p in ranks:
        for m in sorted({1, 2, p, p + 1, 2 * p, 3 * p}):
            for v in (None, 1, 3):  # where there are several, the default is 2
                for k in (1, 2):
                    yield Shape(p, m, 6 * p, chunks=k, virtual_stages=v)


def try_build(name: str, shape: Shape) -> Program | None:
    """None where the schedule refuses the shape, which it must do in one sentence."""
    try:
        return build(name, shape)
    except ScheduleError as error:
        assert re.fullmatch(r"[^\n]{20,250}\.", str(error)), error
        return None


FEW, MANY = (1, 2, 3), (4, 5, 8)


@pytest.mark.parametrize("ranks", graded((FEW, MANY), (FEW,)), ids=("few ranks", "many ranks"))
@pytest.mark.parametrize("name", CATALOGUE)
def test_every_schedule_over_the_grid(name: str, ranks: Sequence[int]) -> None:
    built = 0
    for shape in grid(ranks):
        program = try_build(name, shape)
        if program is None:
            continue
        built += 1
        assert (program.num_ranks, program.num_microbatches, program.num_layers) == (
            shape.ranks,
            shape.microbatches,
            shape.layers,
        )
        assert program.num_chunks == shape.chunks
        assert program.schedule == name
        validate(program)
        validate(forward_only(program))
        idle = [rank for rank, ops in enumerate(program.ranks) if not ops]
        assert all(program.pieces_of_rank(rank) for rank in idle), "every rank has work, or weights that others need"
    assert built >= (0 if ranks == MANY and CATALOGUE[name].one_rank else 3)


@pytest.mark.parametrize("name", CATALOGUE)
def test_schedules_are_pure(name: str) -> None:
    for shape in (Shape(1, 3, 6), Shape(4, 8, 24), Shape(3, 3, 18, virtual_stages=2)):
        before = repr(shape)
        first, second = try_build(name, shape), try_build(name, shape)
        assert first == second
        assert repr(shape) == before


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_any_number_of_microbatches(name: str) -> None:
    for p in range(1, 9):
        for m in range(1, 2 * p + 2):
            validate(build(name, Shape(p, m, p)))


def test_interleaved_takes_multiples_of_the_pipeline_size() -> None:
    for p in range(1, 9):
        for v in (1, 2, 3):
            for m in range(1, 2 * p + 2):
                shape = Shape(p, m, p * v, virtual_stages=v)
                if m % p == 0:
                    validate(build("interleaved-1f1b", shape))
                    continue
                with pytest.raises(ScheduleError, match="interleaved-1f1b needs a number of microbatches") as caught:
                    build("interleaved-1f1b", shape)
                nearest = f"{p} and {2 * p}" if m < 2 * p else f"{2 * p} and {3 * p}"
                assert str(caught.value).endswith(f"the nearest valid values are {nearest}.")


def test_interleaving_defaults_to_two_stages_a_rank() -> None:
    assert build("interleaved-1f1b", Shape(2, 4, 8)) == build("interleaved-1f1b", Shape(2, 4, 8, virtual_stages=2))
    assert len(build("interleaved-1f1b", Shape(2, 4, 8)).stages) == 4


WRONG = [
    (
        "1f1b",
        Shape(4, 8, 6),
        "--num-layers 6 cannot be divided evenly over 4 pipeline stages; the nearest valid values are 4 and 8, "
        "or divide them by --pipeline-model-parallel-layout 'Et*2|t*2|t|tL'.",
    ),
    (
        "gpipe",
        Shape(4, 8, 3),
        "--num-layers 3 cannot be divided evenly over 4 pipeline stages; the nearest valid value is 4.",
    ),
    (
        "interleaved-1f1b",
        Shape(4, 8, 12),
        "--num-layers 12 cannot be divided evenly over 8 pipeline stages; the nearest valid values are 8 and 16, "
        "or divide them by --pipeline-model-parallel-layout 'Et*2|t*2|t*2|t*2|(t|)*3tL'.",
    ),
    ("1f1b", Shape(2, 2, 4, virtual_stages=2), "schedule 1f1b has one stage a rank; virtual stages (2) need another."),
    (
        "none",
        Shape(2, 2, 4),
        "schedule none runs on one pipeline rank, not 2; set --pipeline-model-parallel-size 1 or choose another "
        "schedule.",
    ),
]


@pytest.mark.parametrize(("name", "shape", "sentence"), WRONG, ids=lambda value: str(value)[:40])
def test_shapes_a_schedule_cannot_have(name: str, shape: Shape, sentence: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{re.escape(sentence)}$"):
        build(name, shape)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("ranks", "pipeline ranks"),
        ("microbatches", "microbatches"),
        ("layers", "layers"),
        ("chunks", "chunks"),
        ("virtual_stages", "virtual stages"),
    ],
)
def test_sizes_are_at_least_one(field: str, words: str) -> None:
    for value in (0, -3):
        with pytest.raises(ScheduleError, match=rf"^the number of {words} must be at least 1, not {value}\.$"):
            replace(Shape(1, 1, 1), **{field: value})


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("1F1B", "1f1b"),
        ("1fb1", "1f1b"),
        ("g-pipe", "gpipe"),
        ("GPipe", "gpipe"),
        ("interleaved", "interleaved-1f1b"),
        ("interleaved_1f1b", "interleaved-1f1b"),
        ("None", "none"),
        ("weip", "weipipe"),
    ],
)
def test_unknown_names_name_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ScheduleError, match=rf"^unknown pipeline schedule '{name}': did you mean {near}\?"):
        find(name)


def test_a_name_like_nothing_lists_what_is_known() -> None:
    for name in ("", "zzzzzz", "???"):
        with pytest.raises(ScheduleError, match=r"known are none, gpipe, 1f1b, .* a \.json or \.csv file\.$") as caught:
            build(name, Shape(1, 1, 1))
        assert "did you mean" not in str(caught.value)


def test_the_catalogue_says_what_each_is() -> None:
    for name, schedule in CATALOGUE.items():
        assert schedule.name == name and schedule.paper and schedule.bubble and schedule.memory
        assert schedule.build.__doc__


@pytest.mark.parametrize(
    ("one_rank", "virtual_stages", "chunks", "name"),
    [
        (True, False, False, "none"),
        (False, False, False, "1f1b"),
        (False, True, False, "interleaved-1f1b"),
        (False, False, True, "seq1f1b"),
        (False, True, True, "seq1f1b-interleaved"),
    ],
)
def test_one_schedule_is_run_where_none_is_named(one_rank: bool, virtual_stages: bool, chunks: bool, name: str) -> None:
    assert CATALOGUE.default(one_rank, virtual_stages, chunks) == name
    taken = [(each.one_rank, each.virtual_stages, each.chunks) for each in CATALOGUE.values() if each.default]
    assert taken.count((one_rank, virtual_stages, chunks)) == 1
    with pytest.raises(ScheduleError, match=r"^give the name of a pipeline schedule; known are gpipe\.$"):
        Catalogue([CATALOGUE["gpipe"]]).default(one_rank, virtual_stages, chunks)


def test_what_recomputes_by_itself_and_what_is_searched_for_follow_from_options() -> None:
    assert [name for name, each in CATALOGUE.items() if each.adapts(each.options())] == ["infinipipe"]
    infinipipe = CATALOGUE["infinipipe"]
    assert not infinipipe.adapts(InfinipipeOptions(infinipipe_recompute=False))
    quick = InfinipipeOptions(infinipipe_grouping=False, infinipipe_ahead=1, infinipipe_zb=False)
    assert infinipipe.quick(InfinipipeOptions()) == quick
    given = InfinipipeOptions(infinipipe_ahead=2, infinipipe_sort=False)
    assert infinipipe.quick(given) == replace(given, infinipipe_grouping=False, infinipipe_zb=False)
    for name, schedule in CATALOGUE.items():
        if name != "infinipipe":
            assert schedule.quick(schedule.options()) == schedule.options()


# -------------------------------------------------------------------------------------------------- a file of one's own


def test_a_file_is_a_schedule(tmp_path: Path) -> None:
    path = str(tmp_path / "mine.csv")
    ours = build("interleaved-1f1b", Shape(2, 4, 8))
    to_csv(ours, path)
    loaded = build(path, Shape(2, 4, 8))
    assert (loaded.ranks, loaded.stages) == (ours.ranks, ours.stages)
    lower(loaded)


def test_a_file_for_other_sizes_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "mine.csv")
    to_csv(build("1f1b", Shape(2, 4, 2)), path)
    for shape, said in [
        (Shape(4, 4, 4), "is a program for 2 ranks and 4 microbatches, but the run has 4 and 4."),
        (Shape(2, 8, 4), "is a program for 2 ranks and 4 microbatches, but the run has 2 and 8."),
        (
            Shape(2, 4, 3),
            "--num-layers 3 cannot be divided evenly over 2 pipeline stages; the nearest valid values are 2 and 4.",
        ),
        (Shape(2, 4, 4, chunks=2), "has 1 chunks a microbatch, but the run has 2."),
    ]:
        with pytest.raises(ScheduleError, match=f"{re.escape(said)}$"):
            build(path, shape)
    with pytest.raises(ProgramError, match="No such file"):
        build(str(tmp_path / "none.csv"), Shape(1, 1, 1))


def test_a_file_with_a_huge_number_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    path = tmp_path / "huge.csv"
    path.write_text("0F0,0B0,0F999999999\n")
    with pytest.raises(UserError, match="names microbatch 999999999 but has no op of microbatch 1"):
        build(str(path), Shape(1, 1, 1))


def test_flags_of_other_schedules_are_named() -> None:
    given = {"helix_folds": "--num-fold", "zb_max_inflight": "--zb-max-inflight", "ranks": "-p"}
    zero_bubble = "zb1p, zb2p, zbv, v-half, v-min, zb-interleaved, seq1f1b-zb"
    assert foreign_options(given, [CATALOGUE["1f1b"]]) == [
        "--num-fold is an option of helix, not of 1f1b.",
        f"--zb-max-inflight is an option of {zero_bubble}, not of 1f1b.",
    ]
    assert foreign_options(given, [CATALOGUE["helix"], CATALOGUE["zb1p"]]) == []
    assert foreign_options({"helix_folds": "--helix-folds"}, []) == [
        "--helix-folds is an option of helix, not of a file."
    ]


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("none", Shape(1, 2, 4), "1 stage of 4 layers"),
        ("1f1b", Shape(4, 8, 8), "4 stages of 2 layers"),
        ("interleaved-1f1b", Shape(4, 8, 8), "8 stages of 1 layer"),
        ("adapipe", Shape(4, 8, 9), "4 stages of 2 to 3 layers"),
        ("weipipe", Shape(4, 8, 8), "6 stages of 2 layers, 2 of them with none"),
        ("helix", Shape(4, 8, 8), "8 layers cut into 18 stages"),
    ],
)
def test_stages_are_counted_with_what_they_hold(name: str, shape: Shape, said: str) -> None:
    assert stage_count(build(name, shape).stages) == said
