"""What is recomputed, when, and what the simulator says it costs and saves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.common.errors import ProgramError, ScheduleError
from helixpipe.costs.by_hand import PieceTimes, segments_stash
from helixpipe.costs.hardware import GIB, find_hardware
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Layout, find_model
from helixpipe.lowering.lower import lower
from helixpipe.lowering.validate import validate
from helixpipe.planning.memory.early import makespan, peak_memory, place_early
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import Piece, Segment, Stage, even_stages, model_pieces
from helixpipe.program.workload import uniform
from helixpipe.simulate.memory import rank_memory
from helixpipe.simulate.simulator import simulate
from schedules import Shape, build
from tests.lowering.random_programs import random_costs, random_program

FULL = RecomputeOptions("full")
WITHOUT_ATTENTION = RecomputeOptions("without-attention")
LAZY = replace(FULL, recompute_early=False)
COSTS = PieceTimes({"mlp": 1.0})


def names(options: RecomputeOptions, pieces: tuple[Piece, ...] = model_pieces(3)) -> list[str]:
    return [" ".join(map(str, run)) for run in options.runs(pieces)]


def layers(*indices: int) -> str:
    return " ".join(f"{kind}[{i}]" for i in indices for kind in ("norm", "qkv", "attn", "proj", "mlp"))


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        (RecomputeOptions(), []),
        (FULL, [layers(0), layers(1), layers(2)]),
        (RecomputeOptions("full", recompute_num_layers=2), [layers(0, 1), layers(2)]),
        (RecomputeOptions("full", recompute_method="uniform", recompute_num_layers=9), [layers(0, 1, 2)]),
        (RecomputeOptions("full", recompute_method="block", recompute_num_layers=2), [layers(0), layers(1)]),
        (RecomputeOptions("selective"), ["attn[0]", "attn[1]", "attn[2]"]),
        (RecomputeOptions(recompute_activations=True), ["attn[0]", "attn[1]", "attn[2]"]),
        (RecomputeOptions("selective", recompute_modules=("mlp",)), ["mlp[0]", "mlp[1]", "mlp[2]"]),
        (
            WITHOUT_ATTENTION,
            [
                "norm[0] qkv[0]",
                "mlp[0] norm[1] qkv[1]",
                "mlp[1] norm[2] qkv[2]",
                "mlp[2]",
            ],
        ),
        (
            replace(WITHOUT_ATTENTION, recompute_method="block", recompute_num_layers=2),
            ["norm[0] qkv[0]", "mlp[0] norm[1] qkv[1]", "mlp[1]"],
        ),
    ],
)
def test_what_is_recomputed(options: RecomputeOptions, runs: list[str]) -> None:
    assert names(options) == runs


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            replace(WITHOUT_ATTENTION, recompute_method="uniform"),
            "--recompute-method uniform needs --recompute-granularity full.",
        ),
        (RecomputeOptions(recompute_method="block"), "--recompute-method block needs --recompute-granularity full."),
        (
            RecomputeOptions("selective", recompute_num_layers=1),
            "--recompute-num-layers 1 needs --recompute-granularity full.",
        ),
        (
            RecomputeOptions("full", recompute_modules=("mlp",)),
            "--recompute-modules mlp needs --recompute-granularity selective.",
        ),
        (
            replace(WITHOUT_ATTENTION, recompute_num_layers=2),
            "--recompute-num-layers 2 needs --recompute-granularity without-attention --recompute-method block.",
        ),
        (
            replace(WITHOUT_ATTENTION, recompute_method="block", recompute_modules=("mlp", "core_attn")),
            "--recompute-modules mlp core_attn needs --recompute-granularity selective.",
        ),
        (
            RecomputeOptions("full", recompute_num_layers=0),
            "--recompute-num-layers 0 must be at least 1.",
        ),
        (
            RecomputeOptions("full", recompute_activations=True),
            "--recompute-activations means selective, but --recompute-granularity is full.",
        ),
    ],
)
def test_options_that_do_not_go_together(options: RecomputeOptions, sentence: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Shape(2, 2, 2, recompute=options)
    assert str(caught.value) == sentence


def test_segments_cover_the_stage() -> None:
    pieces = model_pieces(1)
    stage = Stage(pieces, recompute=(pieces[1:3], pieces[4:5]))
    assert stage.segments == (
        Segment(pieces[:1], False),
        Segment(pieces[1:3], True),
        Segment(pieces[3:4], False, inputs_again=True),
        Segment(pieces[4:5], True),
        Segment(pieces[5:], False),
    )
    assert Stage(pieces).segments == (Segment(pieces, False),)
    assert Stage(pieces, recompute=(pieces,)).segments == (Segment(pieces, True),)


@pytest.mark.parametrize("runs", [((),), ((2, 1),), ((3,), (1, 2)), ((1, 2), (2, 3)), ((1, 3),), ((0, 99),)])
def test_runs_that_are_not_the_stages(runs: tuple[tuple[int, ...], ...]) -> None:
    pieces = model_pieces(1)
    chosen = tuple(tuple(pieces[i] if i < len(pieces) else Piece("mlp", 7) for i in run) for run in runs)
    program = Program("bad", (Stage(pieces, recompute=chosen),), ((Op("F", 0, 0), Op("B", 0, 0)),), uniform(1))
    with pytest.raises(ProgramError, match="stage 0 cannot recompute"):
        validate(program)


def test_r_needs_something_to_recompute() -> None:
    program = Program("bad", even_stages(1, 1), ((Op("F", 0, 0), Op("R", 0, 0), Op("B", 0, 0)),), uniform(1))
    with pytest.raises(ProgramError, match="0R0 has nothing to do: stage 0 recomputes none of its pieces"):
        validate(program)


@pytest.mark.parametrize(
    ("options", "after_forward", "during_backward"),
    [
        (RecomputeOptions(), 2, 2),
        (FULL, 2 / 16, 17 / 16),  # the inputs of both layers, or the first layer's and all of the second
        (RecomputeOptions("full", recompute_num_layers=2), 1 / 16, 2),
        (RecomputeOptions("full", recompute_method="block"), 17 / 16, 17 / 16),
        (RecomputeOptions("selective"), 2, 2),  # flash attention keeps nothing that its neighbours do not
        (WITHOUT_ATTENTION, 5 / 16, 18 / 16),  # attention's output and what the recomputed runs begin with
    ],
)
def test_stash(options: RecomputeOptions, after_forward: float, during_backward: float) -> None:
    (stage,) = options.stages((Stage(model_pieces(2)[1:-1]),))
    assert segments_stash(stage.segments, "F") == after_forward
    assert segments_stash(stage.segments, "B") == during_backward
    assert segments_stash(stage.segments, "R") == 2


def with_every_r(program: Program) -> Program:
    """The program with an R right before each backward that would recompute inside."""
    found = {op.unit for ops in program.ranks for op in ops if op.kind == "R"}

    def ops_of(rank: Sequence[Op]) -> Iterator[Op]:
        for op in rank:
            if op.kind in "BI" and op.unit not in found and program.stages[op.stage].recompute:
                yield op._replace(kind="R")
            yield op

    return replace(program, ranks=tuple(tuple(ops_of(rank)) for rank in program.ranks))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zb1p", "zbv"])
@pytest.mark.parametrize("options", [FULL, WITHOUT_ATTENTION, LAZY])
def test_every_schedule_recomputes(schedule: str, options: RecomputeOptions) -> None:
    program = build(schedule, Shape(2, 4, 4, costs=COSTS, recompute=options))
    validate(program)
    assert all(stage.recompute for stage in program.stages)
    explicit = {op.unit for ops in program.ranks for op in ops if op.kind == "R"}
    assert explicit <= set(program.units()) if options.recompute_early else not explicit
    if options.recompute_early:  # no other R would make it faster
        assert makespan(program, COSTS) <= makespan(with_every_r(program), COSTS) * (1 + 1e-9)


def test_one_f_one_b_recomputes_off_the_critical_path() -> None:
    """Inside the backward the bubble is (p-1)(F+R+B); in idle time it is 1F1B's own (p-1)(F+B)."""
    p, m = 4, 8
    inside, early = (
        simulate(lower(build("1f1b", Shape(p, m, p, costs=COSTS, recompute=options)), COSTS), COSTS)
        for options in (LAZY, FULL)
    )
    assert inside.ideal == early.ideal == m * 4
    assert inside.bubble_time == (p - 1) * 4
    assert early.bubble_time == (p - 1) * 3


def test_early_recomputation_moves_into_gaps() -> None:
    """A gap before another op is used too, and only by an R that would delay its backward."""
    stages = even_stages(2, 2)
    first, second = FULL.stages(stages)
    rows = tuple(tuple(Op(kind, rank, i) for kind in "FB" for i in range(2)) for rank in range(2))

    def placed(limit: float | None, *stages: Stage) -> list[str]:
        return [
            " ".join(map(str, ops))
            for ops in place_early(Program("test", stages, rows, uniform(2)), COSTS, limit).ranks
        ]

    assert placed(2.0, first, stages[1]) == ["0F0 0F1 0R0 0R1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    assert placed(2.0, first, second)[0] == "0F0 0F1 0R0 0B0 0R1 0B1"  # rank 1 is slower: no need
    assert placed(1.9, first, stages[1])[0] == "0F0 0F1 0R0 0B0 0B1"  # both at once would be 2
    assert placed(None, first, stages[1])[0] == "0F0 0F1 0R0 0B0 0B1"


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_early_is_never_later(seed: int) -> None:
    """For any program and costs: valid, complete, at least as fast without message times, and within the limit."""
    rng = Random(seed)
    program = random_program(rng)
    costs = replace(random_costs(rng), message=0.0)
    before = simulate(lower(program, costs), costs)
    placed = place_early(program, costs)
    after = simulate(lower(placed, costs), costs)
    assert after.makespan <= before.makespan * (1 + 1e-9)
    assert sum(after.busy) == pytest.approx(sum(before.busy))
    recomputed = {op.unit for ops in program.ranks for op in ops if program.stages[op.stage].recompute}
    found = {op.unit for ops in placed.ranks for op in ops if op.kind == "R"}
    assert found <= recomputed and after.makespan <= simulate(lower(with_every_r(placed), costs), costs).makespan + 1e-9
    limit = rng.choice(before.peak_activation)
    bounded = place_early(program, costs, limit)
    validate(bounded)
    for rank in range(program.num_ranks):
        own = peak_memory(program, costs)[rank]
        assert own == pytest.approx(before.peak_activation[rank])
        assert peak_memory(bounded, costs)[rank] <= max(limit, own) * (1 + 1e-9)


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_early_costs_memory_only_where_it_saves_time(seed: int) -> None:
    """A step that recomputing early makes no shorter needs no more memory for it, on any rank."""
    rng = Random(seed)
    program, costs = random_program(rng), random_costs(rng)
    limit = rng.choice([None, *peak_memory(program, costs)])
    placed = place_early(program, costs, limit)
    if makespan(placed, costs) >= makespan(program, costs) * (1 - 1e-9):
        for early, inside in zip(peak_memory(placed, costs), peak_memory(program, costs), strict=True):
            assert early <= inside * (1 + 1e-9)


def test_one_rank_never_recomputes_early() -> None:
    """It waits for nothing: an R of its own would keep all layers' activations at once, in place of one layer's."""
    model, hardware = find_model("llama2-7b"), find_hardware("h100")
    costs = ModelCosts(model, hardware, Layout(), 1024)
    for recompute in (FULL, LAZY):
        program = build("1f1b", Shape(1, 2, 32, costs=costs, recompute=recompute))
        assert not any(op.kind == "R" for op in program.ranks[0])
        memory = rank_memory(lower(program, costs), costs, 0)
        assert (memory.activations + memory.workspace) / GIB == pytest.approx(0.579, abs=0.001)
