"""What is kept, offloaded and recomputed under a limit, against every choice there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from helixpipe.common.errors import ScheduleError
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.planning.memory.early import place_early
from helixpipe.planning.memory.offload import OffloadOptions, timed, with_ahead, with_shares
from helixpipe.planning.memory.offload_choice import LEVELS, MemoryLimits, OffloadedProgram, choose
from helixpipe.planning.memory.recompute_choice import recomputing
from helixpipe.program.program import Program
from schedules import Shape, build

AUTO = OffloadOptions("auto")
TIMES = {"qkv": 1.0, "attn": 3.0, "mlp": 2.0}


def every_choice(program: Program, costs: PieceTimes, limits: MemoryLimits) -> Iterator[OffloadedProgram]:
    """Each rank with a level of recomputation, each unit with nothing or all offloaded."""
    units = list(program.units())
    whole = [LEVELS[0], *[level for level in LEVELS if level[1] == 1.0][-2:]]  # nothing, all but attention, all
    for levels in product(whole, repeat=program.num_ranks):
        of_stage = {op.stage: levels[rank] for rank, ops in enumerate(program.ranks) for op in ops}
        stages = tuple(recomputing(stage, *of_stage[number]) for number, stage in enumerate(program.stages))
        base = replace(program, stages=stages)
        if any(stage.recompute for stage in stages):
            base = place_early(base, costs, limits.device)
        graph, times = timed(base, costs)
        for marks in product((0.0, 1.0), repeat=len(units)):
            shares = {unit: mark for unit, mark in zip(units, marks, strict=True) if mark}
            made = with_ahead(with_shares(base, AUTO, shares, costs), costs, graph, times)
            yield OffloadedProgram(made, costs, limits, shares)


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "chunks", "copy", "part"),
    [
        ("gpipe", 2, 2, 1, 0.4, 0.7),
        pytest.param("gpipe", 2, 3, 1, 4.0, 0.75, marks=pytest.mark.thorough),
        ("1f1b", 2, 3, 1, 0.5, 0.8),
        pytest.param("terapipe", 2, 1, 3, 1.5, 0.6, marks=pytest.mark.thorough),
        ("terapipe", 1, 1, 5, 3.0, 0.5),
    ],
)
def test_no_choice_is_much_faster(
    name: str, ranks: int, microbatches: int, chunks: int, copy: float, part: float
) -> None:
    costs = PieceTimes(TIMES, copy=copy)
    program = build(name, Shape(ranks, microbatches, 2 * ranks, chunks, costs=costs))
    everything = max(OffloadedProgram(program, costs, MemoryLimits(0.0), {}).needs)
    limits = MemoryLimits(everything * part)
    best = min(choice.time for choice in every_choice(program, costs, limits) if choice.fits)
    found = OffloadedProgram(choose(program, AUTO, costs, limits), costs, limits, {})
    assert found.fits
    assert found.time <= best * 1.01


def test_where_all_fits_nothing_is_done() -> None:
    costs = PieceTimes(TIMES)
    program = build("gpipe", Shape(2, 4, 4, costs=costs))
    assert choose(program, AUTO, costs, MemoryLimits(8.0)) is program


def test_recomputation_of_ones_own_stays() -> None:
    costs = PieceTimes(TIMES, copy=0.1)
    given = build("gpipe", Shape(2, 4, 4, costs=costs))
    stages = tuple(recomputing(stage, (("mlp",),), 1.0) for stage in given.stages)
    found = choose(replace(given, stages=stages), AUTO, costs, MemoryLimits(4.0))
    assert found.stages == stages
    assert any(each.offload for each in found.activations.values())


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        (MemoryLimits(0.5), "a rank needs .* microbatch-layers, .* more than it may use"),
        (MemoryLimits(7.0, 0.01), "the host's memory would have to hold .* a rank, but --host-memory leaves it 0.01"),
    ],
)
def test_what_cannot_fit_is_said(limits: MemoryLimits, sentence: str) -> None:
    costs = PieceTimes(TIMES, copy=0.1)
    given = build("gpipe", Shape(2, 4, 4, costs=costs))
    stages = tuple(recomputing(stage, (("attn",),), 1.0) for stage in given.stages)
    with pytest.raises(ScheduleError, match=sentence):
        choose(replace(given, stages=stages), AUTO, costs, limits)


@pytest.mark.parametrize("value", ["1.5", "-0.1", "most", "nan", ""])
def test_shares_that_cannot_be(value: str) -> None:
    with pytest.raises(ScheduleError, match="must be a number, at least 0 and at most 1, or auto or off"):
        OffloadOptions(value).check()


def test_modules_need_offloading() -> None:
    with pytest.raises(ScheduleError, match="--offload-modules needs --offload-activations"):
        OffloadOptions(None, ("mlp",)).check()
    assert [[piece.kind for piece in run] for run in OffloadOptions("1", ("mlp", "core_attn")).runs(
        build("gpipe", Shape(1, 1, 1)).stages[0].pieces)] == [["attn"], ["mlp"]]  # fmt: skip
