"""AdaPipe: the best split and recomputation by trying all, limits, never worse than 1F1B, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, product
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.cli.model import ModelOptions, make_plan
from helixpipe.common.errors import ScheduleError
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.costs.hardware import find_hardware
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Layout, find_model
from helixpipe.lowering.lower import lower
from helixpipe.lowering.validate import validate
from helixpipe.planning.memory.early import peak_memory
from helixpipe.planning.memory.recompute import RecomputeOptions
from helixpipe.planning.memory.recompute_choice import CHOICES, ChoiceTables, LayerChoices, make_stage
from helixpipe.planning.order.adapipe import LayoutSearch, Stages
from helixpipe.planning.order.splits import splits_by_time
from helixpipe.program.costs import Costs
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import LAYER_PIECES, PIECE_KINDS, Piece, Stage, layers_of
from helixpipe.program.workload import uniform
from helixpipe.simulate.simulator import simulate
from schedules import Shape, build
from schedules import command as cli
from schedules.one_f_one_b import one_f_one_b_order
from tests.costs.asking import op_time

TIMES = PieceTimes({"qkv": 1, "attn": 3, "mlp": 2})
LAZY = RecomputeOptions(recompute_early=False)
OPTIONS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (),
    (("mlp",),),
    (("attn",),),
    (("norm", "qkv"), ("proj", "mlp")),
    (("norm", "qkv", "attn", "proj", "mlp"),),
)


def random_times(rng: Random) -> PieceTimes:
    return PieceTimes(
        {kind: rng.choice((0, 0, 1, 2, rng.uniform(0, 3))) for kind in PIECE_KINDS} | {"mlp": rng.uniform(0.5, 2)},
        message=rng.choice((0, 0, 0.3)),
    )


def random_shape(rng: Random, costs: Costs, most: int = 9) -> Shape:
    ranks, microbatches = rng.randint(1, 4), rng.randint(1, 7)
    layers = rng.choice((ranks, 2 * ranks, rng.randint(ranks, most)))
    limit = rng.uniform(0.2, 1.1) * layers / ranks * min(ranks, microbatches) + 0.3
    return Shape(ranks, microbatches, layers, costs=costs, memory_limit=rng.choice((None, limit, limit, limit)))


def model_costs(**options: object) -> Costs:
    given = ModelOptions(model="llama2-7b", seq_length=65536, nodes=1, tensor_parallel=2, **options)
    plan = make_plan(given, None, None, None)
    assert plan is not None
    return plan.costs


def search_of(shape: Shape, costs: Costs) -> LayoutSearch:
    return LayoutSearch("adapipe", shape, costs, one_f_one_b_order(shape.ranks, shape.microbatches))


def sizes(program: Program) -> list[int]:
    return [len({piece.layer for piece in stage.pieces if piece.layer >= 0}) for stage in program.stages]


def makespan(program: Program, costs: Costs) -> float:
    return simulate(lower(program, costs), costs).makespan


def most_memory(program: Program, costs: Costs) -> float:
    return max(peak_memory(program, costs))


def objective(program: Program, costs: Costs) -> float:
    """Warm-up and cool-down, once through all stages, and m-1 times the slowest stage."""
    times = [
        sum(op_time(costs, program, Op(kind, index, 0)) for kind in ("FBR" if stage.recompute else "FB"))
        for index, stage in enumerate(program.stages)
    ]
    return sum(times) + (program.num_microbatches - 1) * max(times)


def best_objective(shape: Shape) -> float:
    """Of what the dynamic programs find; infinite where nothing fits."""
    assert shape.costs is not None
    search = search_of(shape, shape.costs)
    programs = [search.program(layout) for layout in search.uneven(search.stages())]
    return min((objective(program, shape.costs) for program in programs), default=inf)


# ----------------------------------------------------------------------------------------------------------- trying all


def every_split(layers: int, ranks: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, layers), ranks - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, layers)))


def best_of_all(shape: Shape) -> float:
    """The least objective over all splits and what each single layer recomputes, in any order."""
    costs, limit, p = shape.costs, shape.memory_limit, shape.ranks
    assert costs is not None and limit is not None
    rows = build("1f1b", Shape(p, shape.microbatches, p)).ranks

    @cache
    def stage_time(rank: int, count: int) -> float:
        """The shortest forward, backward and recomputation of such a stage that fits."""
        best = inf
        for chosen in product(OPTIONS, repeat=count):
            layers = [Piece(kind, layer) for layer in range(count) for kind in LAYER_PIECES]
            pieces = [Piece("embed")] * (rank == 0) + layers + [Piece("head")] * (rank == p - 1)
            runs = [tuple(Piece(kind, at) for kind in run) for at, option in enumerate(chosen) for run in option]
            stage = Stage(tuple(pieces), recompute=tuple(runs))
            others = Stage(tuple(layers))
            stages = tuple(stage if at == rank else others for at in range(p))
            program = Program("one stage", stages, rows, uniform(shape.microbatches))
            time = sum(op_time(costs, program, Op(kind, rank, 0)) for kind in ("FBR" if runs else "FB"))
            if time < best and peak_memory(program, costs)[rank] <= limit * (1 + 1e-9):
                best = time
        return best

    splits = ([stage_time(rank, count) for rank, count in enumerate(split)] for split in every_split(shape.layers, p))
    return min(
        (sum(times) + (shape.microbatches - 1) * max(times) for times in splits if max(times) < inf), default=inf
    )


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32))
@pytest.mark.thorough
def test_the_best_of_all(seed: int) -> None:
    rng = Random(seed)
    ranks = rng.randint(2, 3)
    layers, microbatches = rng.randint(ranks, 5), rng.choice((1, 2, 5))
    limit = rng.uniform(0.2, 1.0) * layers / ranks * min(ranks, microbatches) + 0.3
    shape = Shape(ranks, microbatches, layers, costs=random_times(rng), memory_limit=limit)
    assert best_objective(shape) == pytest.approx(best_of_all(shape), rel=1e-7)


@pytest.mark.parametrize("limit", [20, 22, 24, 30, 36, 60])
def test_the_best_of_all_for_a_model(limit: int) -> None:
    """Where core attention has something to drop too, and the embedding and the head keep something."""
    shape = Shape(3, 4, 5, costs=model_costs(), memory_limit=limit * 2**30)
    assert best_objective(shape) == pytest.approx(best_of_all(shape), rel=1e-7)


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_the_best_split_of_all(seed: int) -> None:
    """Of longer models, of which at first only small stages are looked at; with slow ends, which want larger ones."""
    rng = Random(seed)
    costs = random_times(rng)
    ends = {"embed": rng.choice((0, 9, 30)), "head": rng.choice((0, 9, 30))}
    costs = replace(costs, forward={**costs.forward, **ends})
    ranks, microbatches = rng.randint(2, 4), rng.choice((1, 2, 3, 9))
    layers = rng.randint(2 * ranks, 14)
    limit = rng.choice((inf, rng.uniform(0.1, 1.0) * layers / ranks * min(ranks, microbatches) + 0.3))
    shape = Shape(ranks, microbatches, layers, costs=costs, memory_limit=None if limit == inf else limit)
    every = Stages(shape, costs, limit, layers - ranks + 1, (0.0,) * ranks)
    best = inf
    for split in every_split(layers, ranks):
        times = [every.times[rank][count] for rank, count in enumerate(split)]
        if max(times) < inf:
            again = sum(every.again[rank][count] for rank, count in enumerate(split))
            best = min(best, again + (microbatches - 1) * max(times))
    found = splits_by_time(search_of(shape, costs).stages(), layers, microbatches)
    first = found[0].again + (microbatches - 1) * found[0].slowest if found else inf
    assert first == pytest.approx(best, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("costs", [TIMES, model_costs()], ids=["hand", "model"])
@pytest.mark.parametrize(("embed", "head"), [*product((False, True), repeat=2)])
def test_memory_is_that_of_the_real_stage(costs: Costs, embed: bool, head: bool) -> None:
    choices = LayerChoices(costs, 4, embed, head)
    seen = set()
    for count, units in product((1, 2, 3, 4), (1, 2, 4)):
        static = costs.static_memory(make_stage([()] * count, 0, embed, head).pieces)
        limits = {choices.memory(choice, units) for choice in choices.worthwhile(count)}
        for limit in limits:
            choice = choices.cheapest(count, units, limit)
            assert choice is not None
            stage = make_stage(choices.kinds(choice), 0, embed, head)
            ops = tuple(Op(kind, 0, unit) for kind in "FB" for unit in range(units))
            program = Program("one stage", (stage,), (ops,), uniform(units))
            real, need = peak_memory(program, costs)[0] - static, choices.memory(choice, units)
            hidden = 2**28 * (costs is not TIMES)  # too much in a few mixes
            assert need == pytest.approx(real) or (
                need == pytest.approx(real + hidden) and len(set(stage.recompute)) > 1
            )
            seen.add(stage.recompute)
        assert choices.smallest(count, units) == min(limits)
        assert choices.cheapest(count, units, min(limits) * 0.999) is None
    assert len(seen) > 8


# ------------------------------------------------------------------------------------------------------- whole programs


@settings(max_examples=120)
@given(seed=st.integers(0, 2**32))
def test_never_worse_than_1f1b_and_never_above_the_limit(seed: int) -> None:
    rng = Random(seed)
    costs = random_times(rng)
    shape = replace(random_shape(rng, costs), recompute=rng.choice((RecomputeOptions(), LAZY)))
    bound = inf if shape.memory_limit is None else shape.memory_limit * (1 + 1e-9)
    try:
        program = build("adapipe", shape)
    except ScheduleError:
        program = None
        assert best_objective(shape) == inf
    else:
        validate(program)
        assert sum(sizes(program)) == shape.layers and min(sizes(program)) >= 1
        assert most_memory(program, costs) <= bound
        assert not any(stage.recompute for stage in program.stages) or shape.memory_limit is not None
    if shape.layers % shape.ranks:
        return
    full = replace(shape.recompute, recompute_granularity="full")
    for recompute in (shape.recompute, full):
        other = build("1f1b", replace(shape, recompute=recompute))
        if most_memory(other, costs) <= bound:
            assert program is not None
            assert makespan(program, costs) <= makespan(other, costs) * (1 + 1e-8)
            break


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_more_memory_is_never_slower(seed: int) -> None:
    rng = Random(seed)
    shape = replace(random_shape(rng, random_times(rng)), memory_limit=1.0)
    found = [best_objective(replace(shape, memory_limit=0.5 + 0.25 * step * step)) for step in range(8)]
    assert all(later <= earlier * (1 + 1e-8) for earlier, later in pairwise(found))


def test_steps_get_shorter_as_the_limit_grows() -> None:
    makespans = []
    for limit in (1.25, 1.5, 2, 3, 4, 6, 9, 12):
        shape = Shape(4, 8, 10, costs=TIMES, memory_limit=limit, recompute=LAZY)
        makespans.append(makespan(build("adapipe", shape), TIMES))
    assert makespans == sorted(makespans, reverse=True) and makespans[0] > makespans[-1]
    assert makespans[-1] == makespan(build("adapipe", replace(shape, memory_limit=None)), TIMES)


@pytest.mark.parametrize(
    ("times", "shape", "layers"),
    [
        ({"mlp": 1}, Shape(4, 8, 8), [2, 2, 2, 2]),
        ({"mlp": 1, "head": 2}, Shape(2, 8, 6), [4, 2]),
        ({"mlp": 1, "embed": 2}, Shape(2, 8, 6), [2, 4]),
        ({"mlp": 1, "head": 9}, Shape(3, 12, 6), [3, 2, 1]),
        ({"mlp": 1, "embed": 20, "head": 20}, Shape(3, 8, 14), [1, 12, 1]),
        ({"mlp": 1}, Shape(1, 3, 5), [5]),
        ({"mlp": 1}, Shape(4, 2, 4), [1, 1, 1, 1]),
    ],
)
def test_without_a_limit_embedding_and_head_are_balanced(
    times: dict[str, float], shape: Shape, layers: list[int]
) -> None:
    program = build("adapipe", replace(shape, costs=PieceTimes(times)))
    assert not any(stage.recompute for stage in program.stages)
    assert sorted(sizes(program)[:-1]) == sorted(layers[:-1]) and sizes(program)[-1] == layers[-1]
    assert not any(op.kind == "R" for ops in program.ranks for op in ops)


@pytest.mark.parametrize("costs", [None, TIMES])
def test_any_number_of_layers_and_microbatches(costs: Costs | None) -> None:
    for ranks, more, microbatches in product((1, 2, 3, 5), (0, 1, 4), (1, 2, 6)):
        program = build("adapipe", Shape(ranks, microbatches, ranks + more, costs=costs))
        validate(program)
        assert sum(sizes(program)) == ranks + more and len(program.stages) == ranks


def test_the_first_ranks_recompute_more_and_have_fewer_layers() -> None:
    """Rank 0 keeps p microbatches, the last one."""
    program = build("adapipe", Shape(8, 32, 64, costs=TIMES, memory_limit=16))
    recomputed = [
        sum(TIMES.forward.get(piece.kind, 0) for run in stage.recompute for piece in run) for stage in program.stages
    ]
    assert recomputed[0] > recomputed[3] > recomputed[-1] == 0
    assert sizes(program)[0] < sizes(program)[-1]
    even = build("1f1b", Shape(8, 32, 64, costs=TIMES, memory_limit=16, recompute=RecomputeOptions("full")))
    assert makespan(program, TIMES) < 0.95 * makespan(even, TIMES)


# --------------------------------------------------------------------------------------------------------- command line


def test_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "adapipe", "-p", "4", "-m", "8", "-L", "10", "--memory-limit", "6"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "adapipe: 4 ranks, 8 microbatches, 10 layers, 4 stages"
    assert re.fullmatch(r"stages: [23]( [23]){3} layers; layers recomputed: \d [a-z ]+(, [^,]+){3}", second)


def test_a_model_that_fits_only_with_some_recomputation(capsys: pytest.CaptureFixture[str]) -> None:
    given = "--model llama2-7b --seq-length 163840 --hardware a800 --nodes 4 --tensor-parallel 8"
    times = {}
    for schedule in ("1f1b", "adapipe", "1f1b --recompute-granularity full"):
        assert cli.main(f"simulate {schedule} {given}".split()) == 0
        text = capsys.readouterr().out
        times[schedule] = float(re.findall(r"step time +([0-9.]+) s", text)[0])
        assert ("does NOT fit" in text) == (schedule == "1f1b")
        assert ("layers recomputed: " in text) == (schedule != "1f1b")
    assert times["adapipe"] < 0.9 * times["1f1b --recompute-granularity full"]


@pytest.mark.parametrize("gibibytes", [34, 40, 50])
def test_shorter_than_any_recomputation_of_all_stages_alike(gibibytes: int) -> None:
    """Where 1F1B needs recomputation to fit."""
    costs = model_costs()
    shape = Shape(4, 8, 16, costs=costs, memory_limit=gibibytes * 2**30)
    assert most_memory(build("1f1b", shape), costs) > gibibytes * 2**30
    program = build("adapipe", shape)
    assert most_memory(program, costs) <= gibibytes * 2**30
    fitting = 0
    for granularity in ("selective", "without-attention", "full"):
        other = build("1f1b", replace(shape, recompute=RecomputeOptions(granularity)))
        if most_memory(other, costs) <= gibibytes * 2**30:
            fitting += 1
            assert makespan(program, costs) < makespan(other, costs)
    assert fitting


def test_layers_that_are_unlike_are_divided_by_what_they_take() -> None:
    """The first half of the layers attends to a window: stages there have more layers, and the step is shorter."""
    windows = {"window": 512, "windowed": (1,) * 8 + (0,) * 8}
    model = replace(find_model("llama3-8b"), layers=16, seq_length=65536, **windows)
    costs = ModelCosts(model, find_hardware("h100"), Layout(2, True), 65536)
    shape = Shape(4, 8, 16, costs=costs)
    program, even = build("adapipe", shape), build("1f1b", shape)
    assert program.layer_kinds == model.kinds_of(16)
    first, second, third, last = layers_of(program.stages)
    assert first + second > 8 > third + last
    assert makespan(program, costs) < 0.9 * makespan(even, costs)


def test_tables_are_shared_by_shapes_of_the_same_costs() -> None:
    """Of other numbers of microbatches and ranks, also of fewer layers a stage; with other costs there are others."""
    tables = ChoiceTables()
    one, other = PieceTimes({"mlp": 1.0}), PieceTimes({"mlp": 2.0})
    kinds = (LAYER_PIECES,)
    small = tables.choices(one, 2, True, False, False, kinds)
    large = tables.choices(one, 5, True, False, False, kinds)
    assert tables.choices(one, 4, True, False, False, kinds) is large and large.most == 5
    assert [large.worthwhile(count) for count in (1, 2)] == [small.worthwhile(count) for count in (1, 2)]
    others = [tables.choices(other, 4, True, False, False, kinds), tables.choices(one, 4, False, False, False, kinds)]
    assert all(each is not large for each in others)
    shapes = [Shape(2, microbatches, 6, costs=one, memory_limit=12.0, tables=tables) for microbatches in (4, 8)]
    assert [build("adapipe", shape) for shape in shapes] == [
        build("adapipe", replace(shape, tables=ChoiceTables())) for shape in shapes
    ]


def test_times_that_are_kept_are_those_of_the_program() -> None:
    """Of layouts that share stages, ranks of a stage, or what stands before one."""
    costs = PieceTimes({"qkv": 1.0, "attn": 3.0, "mlp": 2.0, "embed": 0.5, "head": 4.0}, message=0.25)
    shape = Shape(3, 5, 6, costs=costs)
    search = LayoutSearch("adapipe", shape, costs, one_f_one_b_order(3, 5))
    for counts in product((1, 2, 3, 4), repeat=3):
        for runs in ((CHOICES[0], CHOICES[-1]), (CHOICES[1], CHOICES[2])) if sum(counts) == 6 else ():
            layout = tuple((runs[0],) * (count - 1) + (runs[1],) for count in counts)
            program = search.program(layout)
            time = simulate(lower(program, costs), costs).makespan
            assert search._time(layout) == pytest.approx(time, rel=1e-8)


def test_what_graphs_hold_counts_in_the_choice() -> None:
    """Some layers of the first ranks recompute, below a limit that even stages in graphs exceed; not all of all."""
    costs = ModelCosts(find_model("llama2-7b"), find_hardware("h100"), Layout(cuda_graphs="auto"), 8192)
    shape = Shape(4, 8, 32, costs=costs)
    limit = 0.8 * max(peak_memory(build("1f1b", shape), costs))
    program = build("adapipe", replace(shape, memory_limit=limit))
    layers = [len({piece.layer for piece in stage.pieces if piece.layer >= 0}) for stage in program.stages]
    assert 0.9 * limit < max(peak_memory(program, costs)) <= limit
    assert program.stages[0].recompute and not program.stages[3].recompute and sum(layers) == 32
