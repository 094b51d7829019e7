"""Layers over the stages of a pipeline: divisions by work, the words of a layout, what a schedule does with them."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helixpipe.common.errors import UserError
from helixpipe.planning.catalogue import Shape
from helixpipe.planning.division import DivisionOptions, balanced, further_tokens_of, layout_of
from helixpipe.program.stages import layers_of
from schedules import CATALOGUE
from schedules.command import main
from tests.cli.commands import run, run_json

DIVIDED = [name for name, each in CATALOGUE.items() if not (each.own_stages or each.one_rank)]


def busiest(counts: tuple[int, ...], ends: tuple[float, float], places: tuple[int, ...]) -> float:
    work = [0.0] * (max(places) + 1)
    for stage, (rank, count) in enumerate(zip(places, counts, strict=True)):
        work[rank] += count + ends[0] * (stage == 0) + ends[1] * (stage == len(places) - 1)
    return max(work)


@given(
    st.integers(2, 3), st.integers(1, 2), st.integers(1, 9), st.floats(0, 3), st.floats(0, 3), st.booleans()
)  # fmt: skip
def test_no_division_has_less_on_its_busiest_rank(
    ranks: int, virtual: int, layers: int, embedding: float, head: float, zigzag: bool
) -> None:
    """Of all that there are, for stages in rounds and for stages that go down and up."""
    rounds = [range(ranks), range(ranks - 1, -1, -1) if zigzag else range(ranks)]
    places = tuple(rank for turn in rounds[:virtual] for rank in turn)
    found = balanced(1.0, (embedding, head), layers, places)
    stages = len(places)
    every = [
        counts for counts in product(range(layers + 1), repeat=stages) if sum(counts) == layers and all(counts[1:-1])
    ]
    assert (found is None) == (not every)
    if found is not None:
        best = min(busiest(counts, (embedding, head), places) for counts in every)
        assert busiest(found, (embedding, head), places) == pytest.approx(best)


@given(st.lists(st.integers(1, 12), min_size=2, max_size=9), st.integers(0, 5), st.integers(0, 5), st.integers(0, 3))
def test_a_layout_says_the_division(middle: list[int], first: int, last: int, further: int) -> None:
    division = (first, *middle, last)
    layout = layout_of(division, further)
    assert further_tokens_of(layout) == further
    flags = DivisionOptions(pipeline_model_parallel_layout=layout)
    assert flags.stage_layers(sum(division), len(division), None) == division


@pytest.mark.parametrize("name", DIVIDED)
def test_every_schedule_takes_a_division_and_is_where_it_says(name: str) -> None:
    """Stages of as many layers as were asked for, on the ranks of `places`."""
    schedule, p = CATALOGUE[name], 4
    stages = p * schedule.stages_of(None)
    division = (0, *range(1, stages - 1), 3)
    shape = Shape(p, 4, sum(division), stage_layers=division, chunks=2 if schedule.chunks else 1)
    program = CATALOGUE.build(name, shape)
    assert layers_of(program.stages)[:stages] == division and not any(layers_of(program.stages)[stages:])
    ran = {op.stage: rank for rank, ops in enumerate(program.ranks) for op in ops}
    in_line = tuple(stage // 2 for stage in range(stages))  # as zbv may lie
    if not schedule.spread:
        assert tuple(ran[stage] for stage in range(stages)) in (schedule.places(p, None), in_line)


def test_one_division_for_time_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """`simulate` and `memory` take Megatron-LM's flags; a shorter last stage, beside a head, is faster."""
    size = "1f1b --model llama3-8b -p 4 -m 16"
    uneven = f"{size} --layers 30 --decoder-last-pipeline-num-layers 6"
    assert "8 8 8 6 layers" in run(capsys, f"simulate {uneven}")
    layout = f"{size} --pipeline-model-parallel-layout Et*9|t*9|t*8|t*6L"
    fast, slow = (run_json(capsys, f"simulate {flags}")["makespan"] for flags in (layout, size))
    assert fast < slow
    needs = [each["weights"] for each in run_json(capsys, f"memory {uneven}")["memory"]]
    assert needs[1] == needs[2] < needs[3] < needs[0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("adapipe -p 2 -L 5 --decoder-first-pipeline-num-layers 2", "adapipe divides the layers itself"),
        ("1f1b -p 2 --decoder-first-pipeline-num-layers 2", "divide the layers over stages need --layers"),
        ("1f1b -p 3 -L 9 --decoder-first-pipeline-num-layers 2", "leave 7 of -L 9 to 2 other"),
    ],
)
def test_what_cannot_be_divided(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *flags.split()]) != 0
    assert said in capsys.readouterr().err


def test_three_ways_are_not_mixed() -> None:
    flags = DivisionOptions(decoder_first_pipeline_num_layers=1, account_for_loss_in_pipeline_split=True)
    with pytest.raises(UserError, match="three ways to divide the layers; give one"):
        flags.stage_layers(4, 2, None)
