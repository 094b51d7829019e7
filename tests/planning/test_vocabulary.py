"""The head over the pipeline: programs with a share of its work on every rank, and their orders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helixpipe.common.errors import ScheduleError
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.costs.hardware import find_hardware
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, Layout
from helixpipe.lowering.validate import validate
from helixpipe.planning.memory.early import busy, makespan, peak_memory
from helixpipe.planning.vocabulary.choice import (
    PREFERENCES,
    VocabularyOptions,
    WithoutHead,
    head_place,
    split_heads,
    splittable,
)
from helixpipe.planning.vocabulary.lanes import BACKWARDS, FORWARDS, HEAD_BACKWARDS, HEADS, WEIGHTS, reordered
from helixpipe.planning.vocabulary.spread import HEAD, spread_heads, spreadable
from helixpipe.program.costs import Work
from helixpipe.program.files import save_program
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import Piece
from helixpipe.program.workload import Extent
from schedules import CATALOGUE, Shape, build

TIMES = {"qkv": 1.0, "attn": 2.0, "mlp": 3.0, "head": 4.0}
MODES = ("ends", "spread", "split", "auto")
SCHEDULES = [name for name, each in CATALOGUE.items() if not each.spread and not each.one_rank]
"""Those that leave the head on the last rank; chimera has it on two."""


def with_heads(mode: str, shape: Shape, name: str = "1f1b") -> Program:
    return build(name, replace(shape, vocabulary=VocabularyOptions(cast(Any, mode))))


@st.composite
def shapes(draw: st.DrawFn) -> tuple[str, Shape]:
    """A schedule with as many microbatches as it takes, chunks where it has them, and any times."""
    name = draw(st.sampled_from([*SCHEDULES, "chimera"]))
    schedule, ranks = CATALOGUE[name], draw(st.sampled_from((2, 3, 4)))
    ranks = 2 * (ranks // 2) if name == "chimera" else ranks
    microbatches = draw(st.integers(1, 6))
    microbatches *= ranks if name == "interleaved-1f1b" else 2 if name == "chimera" else 1
    virtual = 2 if schedule.virtual_stages else None
    chunks = draw(st.integers(1, 3)) if schedule.chunks else 1
    times = {kind: draw(st.sampled_from((0.0, 0.5, 1.0, 3.0))) for kind in ("qkv", "attn", "mlp")}
    times["head"] = draw(st.sampled_from((0.0, 1.0, 8.0, 40.0)))
    costs = PieceTimes(times if any(times.values()) else TIMES, message=draw(st.sampled_from((0.0, 0.3, 5.0))))
    return name, Shape(ranks, microbatches, 4 * ranks, chunks, virtual, costs=costs)


@pytest.mark.parametrize("mode", ["spread", "split"])
def test_where_the_given_order_does_not_fit_fewer_units_are_in_flight(mode: str) -> None:
    """As many as there is memory for, and with less memory fewer."""
    costs = PieceTimes({**TIMES, "head": 16.0})
    shape = Shape(4, 16, 16, 1, 2, costs=costs)
    own = max(peak_memory(with_heads("ends", shape, "interleaved-1f1b"), costs))
    times = []
    for limit in (0.9 * own, 0.7 * own):
        program = with_heads(mode, replace(shape, memory_limit=limit), "interleaved-1f1b")
        validate(program)
        assert limit - 4 < max(peak_memory(program, costs)) <= limit
        times.append(makespan(program, costs))
    assert times[0] < times[1] and times[0] < makespan(with_heads("ends", shape, "interleaved-1f1b"), costs)


@settings(max_examples=10)
@given(shapes())
@example(("sppo", Shape(2, 1, 8, costs=PieceTimes({"mlp": 0.5}))))  # the last stage is the head, which takes no time
def test_every_schedule_has_a_valid_program_with_heads_on_all_ranks(given: tuple[str, Shape]) -> None:
    name, shape = given
    assert shape.costs is not None
    programs = {mode: with_heads(mode, shape, name) for mode in MODES}
    spread, auto, ends = programs["spread"], programs["auto"], programs["ends"]
    validate(spread)
    assert spread.stages[-1].pieces == (HEAD,) and spread.stages[-1].placement == "replicated"
    head = len(spread.stages) - 1
    assert name == "chimera" or spread.holders(head) == tuple(range(shape.ranks))  # some may have no microbatch
    counts = [sum(op.kind == "F" and op.stage == head for op in ops) for ops in spread.ranks]
    assert max(counts) - min(counts) <= (1 if shape.chunks == 1 else sum(counts))
    if name != "chimera":  # whose head is on two ranks
        divided = programs["split"]
        validate(divided)
        parts = [stage.part for stage in divided.stages[-shape.ranks :]]
        assert parts == [(rank, shape.ranks) for rank in range(shape.ranks)]
        assert sum(busy(divided, shape.costs)) <= sum(busy(ends, shape.costs)) * (1 + 1e-9)
    assert makespan(auto, shape.costs) <= min(makespan(each, shape.costs) for each in programs.values()) * (1 + 1e-9)
    assert sum(busy(spread, shape.costs)) <= sum(busy(ends, shape.costs)) * (1 + 1e-9)


@settings(max_examples=40)
@given(
    shapes(),
    st.integers(0, 4),
    st.permutations((HEAD_BACKWARDS, HEADS, FORWARDS, BACKWARDS, WEIGHTS)),
    st.sampled_from((spread_heads, split_heads)),
)
def test_lanes_keep_their_order(given: tuple[str, Shape], ahead: int, prefer: list[str], place: Any) -> None:
    """And a forward has all backwards before it that it had, but for those it may be ahead of."""
    name, shape = given
    assert shape.costs is not None
    before = (spread_heads if name == "chimera" else place)(build(name, shape), shape.costs)
    head = min(before.chain, len(before.stages) - 1)
    after = reordered(before, shape.costs, range(head, len(before.stages)), prefer, ahead)
    validate(after)
    for was, now in zip(before.ranks, after.ranks, strict=True):
        for kinds in ("F", "BIR", "W"):
            for heads in (False, True):
                kept = [[op for op in ops if (op.stage >= head) == heads and op.kind in kinds] for ops in (was, now)]
                assert kept[0] == kept[1]
        for kinds in ("BIR", "W"):
            had, has = backwards_before(was, head, kinds), backwards_before(now, head, kinds)
            assert all(has[op] >= count - ahead for op, count in had.items())


def backwards_before(ops: tuple[Op, ...], head: int, kinds: str) -> dict[Op, int]:
    """Of each forward, how many ops of these kinds come before it."""
    counts, done = {}, 0
    for op in ops:
        if op.stage >= head:
            continue
        if op.kind == "F":
            counts[op] = done
        done += op.kind in kinds
    return counts


def test_more_in_flight_hides_the_way_to_the_head() -> None:
    """With as many ahead as it takes a rank waits for the first and last microbatches alone."""
    shape = Shape(4, 16, 4, costs=PieceTimes(TIMES))
    assert shape.costs is not None
    spread = spread_heads(build("1f1b", shape), shape.costs)
    heads = range(4, 5)
    times = [
        makespan(reordered(spread, shape.costs, heads, PREFERENCES[0], ahead), shape.costs) for ahead in (0, 1, 2, 4)
    ]
    assert times == sorted(times, reverse=True) and times[-1] < 0.8 * times[0]


def test_heads_are_shared_out_by_their_work() -> None:
    """Of chunks that differ, too: a rank with a long one gets fewer."""
    lengths = (8192, 4096)
    costs = ModelCosts(MODELS["llama2-7b"], find_hardware("h100"), Layout(), sum(lengths))
    spread = with_heads("spread", Shape(2, 4, 2, 2, chunk_lengths=lengths, costs=costs), "seq1f1b")
    head = len(spread.stages) - 1
    tokens = [sum(lengths[op.chunk] for op in ops if op.kind == "F" and op.stage == head) for ops in spread.ranks]
    assert max(tokens) - min(tokens) <= min(lengths)


@pytest.mark.parametrize("kind", ["F", "B", "I", "W"])
def test_costs_without_the_head(kind: str) -> None:
    costs = ModelCosts(MODELS["llama3-8b"], find_hardware("h100"), Layout(), 8192)
    pieces, head = (Piece("mlp", 0),), (Piece("mlp", 0), HEAD)
    extents = (Extent(8192, 0),)
    assert WithoutHead(costs).op_time(Work(kind, head, extents, 8192.0)) == costs.op_time(
        Work(kind, pieces, extents, 8192.0)
    )
    assert WithoutHead(costs).op_time(Work(kind, (HEAD,), extents, 8192.0)) == 0.0
    assert WithoutHead(costs).static_memory(pieces) == costs.static_memory(head)


def llama(limit: float | None = None) -> Shape:
    """Llama 3 8B, whose head is worth nearly eight layers, on eight GPUs."""
    costs = ModelCosts(MODELS["llama3-8b"], find_hardware("h100"), Layout(), 8192)
    return Shape(8, 32, 32, costs=costs, memory_limit=limit)


def test_a_vocabulary_of_128k_no_longer_idles_a_pipeline() -> None:
    shape = llama()
    assert shape.costs is not None
    times = {mode: makespan(with_heads(mode, shape), shape.costs) for mode in MODES}
    assert times["auto"] == min(times["spread"], times["split"]) < 0.72 * times["ends"]
    assert times["split"] < 0.72 * times["ends"]
    zbv = makespan(with_heads("auto", shape, "zbv"), shape.costs)
    assert zbv < 3.75


def test_auto_keeps_to_the_memory() -> None:
    """Parts of the head are faster than one whole, and taken where there is memory for the microbatches in flight."""
    shape = replace(llama(), ranks=4, microbatches=4, layers=8)
    assert shape.costs is not None
    costs = shape.costs
    whole, divided = (with_heads(mode, shape) for mode in ("ends", "split"))
    ends, split = (max(peak_memory(program, costs)) for program in (whole, divided))
    assert ends < split
    limits = 1.01 * ends, split
    found = [with_heads("auto", replace(shape, memory_limit=limit)) for limit in limits]
    for program, limit in zip(found, limits, strict=True):
        assert max(peak_memory(program, costs)) <= limit
        assert head_place(program) == "split"
    # With less memory fewer microbatches are in flight.
    assert makespan(divided, costs) == makespan(found[1], costs) < makespan(found[0], costs) < makespan(whole, costs)


def test_what_stays_as_it_is() -> None:
    """One rank; a head on all ranks already; forwards alone; weights that travel."""
    times = PieceTimes(TIMES)
    assert not spreadable(with_heads("ends", Shape(1, 2, 2, costs=times), "none"))
    for name in ("helix", "weipipe"):
        shape = Shape(2, 4, 4, costs=times)
        for mode in MODES:
            assert with_heads(mode, shape, name) == with_heads("ends", shape, name)
    for possible in (spreadable, splittable):
        assert not possible(replace(build("1f1b", Shape(2, 2, 2)), forward_only=True))


def test_a_last_stage_that_is_the_head_alone() -> None:
    """Its rank has heads alone, as every other has beside its layers."""
    shape = Shape(3, 4, 4, costs=PieceTimes(TIMES), stage_layers=(2, 2, 0))
    spread = with_heads("spread", shape)
    validate(spread)
    assert len(spread.stages) == 3 and {op.stage for op in spread.ranks[2]} == {2}
    assert {op.stage for op in spread.ranks[0]} == {0, 2}


def test_a_file_says_itself_where_the_head_is(tmp_path: Path) -> None:
    shape = Shape(2, 2, 2, costs=PieceTimes(TIMES))
    for own in ("ends", "spread", "split"):
        path = tmp_path / f"{own}.json"
        program = with_heads(own, shape)
        save_program(program, path)
        for asked in MODES:
            if asked in ("ends", "auto", own):
                assert with_heads(asked, shape, str(path)).ranks == program.ranks
            else:
                with pytest.raises(ScheduleError, match=f"leave --pipeline-vocab-parallel {asked} out .* is {own}"):
                    with_heads(asked, shape, str(path))


def test_auto_counts_the_sum_of_the_heads_gradients() -> None:
    """With copies of the head a step ends later by it, so that parts may be better though their ops take longer."""
    costs = ModelCosts(MODELS["llama3-8b"], find_hardware("h100"), Layout(4, True), 8192)
    shape = Shape(8, 16, 32, costs=costs)
    programs = {mode: with_heads(mode, shape) for mode in MODES}
    steps = {mode: makespan(each, costs) + sum(costs.after_time(each)) for mode, each in programs.items()}
    assert steps["auto"] == min(steps.values())
    assert makespan(programs["spread"], costs) < makespan(programs[head_place(programs["auto"])], costs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "layers"),
    [("1f1b", (2, 2, 0)), ("zb1p", (2, 2, 0)), ("seq1f1b-zb", (2, 2, 0)), ("sppo", (2, 2, 0)), ("zbv", (2, 1, 1, 0))],
)
def test_the_last_stage_may_be_the_head_alone(name: str, layers: tuple[int, ...], mode: str) -> None:
    """Under a memory limit, so that what is kept is asked for, too."""
    costs = ModelCosts(replace(MODELS["llama3-8b"], layers=4), find_hardware("h100"), Layout(), 4096)
    ranks, chunks = (2 if name == "zbv" else 3), (2 if CATALOGUE[name].chunks else 1)
    lengths = (2048, 2048) if chunks > 1 else None
    shape = Shape(ranks, 4, 4, chunks, chunk_lengths=lengths, stage_layers=layers, costs=costs)
    program = with_heads(
        mode, replace(shape, memory_limit=2 * max(peak_memory(with_heads("ends", shape, name), costs))), name
    )
    validate(program)
    assert {piece for stage in program.stages for piece in stage.pieces if piece.layer < 0} >= {Piece("embed")}
    assert mode == "auto" or head_place(program) == mode


@pytest.mark.parametrize("mode", ["auto", "ends"])
def test_a_head_that_predicts_further_tokens_stays(mode: str) -> None:
    model = replace(MODELS["llama3-8b"], layers=4, further=1)
    costs = ModelCosts(model, find_hardware("h100"), Layout(), 4096)
    program = with_heads(mode, Shape(2, 4, 4, costs=costs))
    assert head_place(program) == "ends" and program.stages[-1].pieces[-1] == Piece("head.mtp")
