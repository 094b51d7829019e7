"""The simulator against closed forms, laws that hold for any program, and counted work."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.common.errors import UserError
from helixpipe.costs.by_hand import PieceTimes, parse_piece_times
from helixpipe.lowering.lower import lower
from helixpipe.program.program import Op, Program, Unit, forward_only
from helixpipe.program.stages import Stage, even_stages, model_pieces
from helixpipe.program.text import parse_rows
from helixpipe.program.timeline import Timeline
from helixpipe.program.workload import uniform
from helixpipe.simulate.simulator import Simulation, simulate
from schedules import Shape, build
from tests.costs.asking import op_time, sizes
from tests.lowering.random_programs import needs, random_costs, random_program

EXAMPLE = PieceTimes({"qkv": 1, "attn": 3, "mlp": 2})


def run(name: str, shape: Shape, costs: PieceTimes = EXAMPLE) -> Simulation:
    return simulate(lower(build(name, shape), costs), costs)


# ------------------------------------------------------------------------------------------------------- closed forms


def test_the_figures_of_the_specification() -> None:
    one = run("1f1b", Shape(4, 8, 8))
    assert (one.makespan, one.bubble_time, one.peak_activation) == (396, 108, [8, 6, 4, 2])
    assert run("gpipe", Shape(4, 8, 8)).makespan == 396
    assert run("interleaved-1f1b", Shape(4, 8, 8, virtual_stages=2)).bubble_time == 54


def test_json_has_what_is_promised_in_plain_numbers() -> None:
    result = run("1f1b", Shape(4, 8, 8)).to_json(order=True)
    order = result.pop("order")
    assert order[3][:4] == ["3F0", "3B0", "3F1", "3B1"] and len(order) == 4
    assert json.dumps(result) == (
        '{"schedule": "1f1b", "ranks": 4, "microbatches": 8, "layers": 8, "chunks": 1, "makespan": 396, "ideal": 288, '
        '"bubble_time": 108, "bubble_ratio": 0.272727273, "bubble_time_without_flush": 108, '
        '"busy": [288, 288, 288, 288], "peak_activation": [8, 6, 4, 2], "peak_activation_unit": "microbatch-layers", '
        '"messages": 48, "recomputed": {}}'
    )
    assert "order" not in run("1f1b", Shape(4, 8, 8)).to_json()


times = st.integers(1, 40).map(lambda n: n / 4)  # exact in binary, so the closed forms hold to the last digit
ratios = st.integers(1, 16).map(lambda n: n / 4)


@settings(max_examples=150)
@given(p=st.integers(1, 8), m=st.integers(1, 20), layers=st.integers(1, 3), forward=times, ratio=ratios)
def test_gpipe_and_1f1b(p: int, m: int, layers: int, forward: float, ratio: float) -> None:
    """Any m, also below p; any ratio of backward to forward."""
    costs = PieceTimes({"attn": forward}, ratio)
    a_rank = layers * forward * (1 + ratio)
    for name, peak in (("gpipe", [m] * p), ("1f1b", [min(p - rank, m) for rank in range(p)])):
        result = run(name, Shape(p, m, p * layers), costs)
        assert result.busy == [m * a_rank] * p
        assert result.makespan == (m + p - 1) * a_rank
        assert result.bubble_time == (p - 1) * a_rank
        assert result.peak_activation == [layers * alive for alive in peak]


@settings(max_examples=100)
@given(p=st.integers(1, 6), groups=st.integers(1, 4), v=st.integers(1, 3), forward=times, ratio=ratios)
def test_interleaved(p: int, groups: int, v: int, forward: float, ratio: float) -> None:
    costs = PieceTimes({"mlp": forward}, ratio)
    m = groups * p
    result = run("interleaved-1f1b", Shape(p, m, p * v, virtual_stages=v), costs)
    assert result.bubble_time == (p - 1) * forward * (1 + ratio)  # (p-1)(F+B)/v with F = v * forward
    warmup = [2 * (p - rank - 1) + (v - 1) * p for rank in range(p)]
    assert result.peak_activation == [min(ops + 1, m * v) for ops in warmup]  # layers; one layer a stage


def test_no_pipeline_has_no_bubble() -> None:
    result = run("none", Shape(1, 5, 3))
    assert (result.makespan, result.bubble_time, result.bubble_ratio, result.peak_activation) == (270, 0, 0, [3])
    assert result.lowered.messages == []


def test_evaluation_stashes_nothing() -> None:
    program = forward_only(build("1f1b", Shape(4, 8, 8)))
    result = simulate(lower(program), EXAMPLE)
    assert (result.makespan, result.peak_activation) == ((8 + 3) * 12, [0, 0, 0, 0])


def test_messages_cost_time_and_links_carry_one_at_a_time() -> None:
    def makespan(message: float) -> float:
        costs = PieceTimes({"attn": 1.0}, 1.0, message)
        return simulate(lower(build("gpipe", Shape(2, 4, 2)), costs), costs).makespan

    assert makespan(0) == 10
    assert makespan(0.5) == 11  # messages travel while ops run: one message each way shows
    # The first F, four messages one after another, the last F; the first B, four messages back, the last B.
    assert makespan(10) == 1 + 4 * 10 + 1 + 1 + 4 * 10 + 1


# -------------------------------------------------------------------------------------------------------- any program


def recomputes_inside(program: Program, rank: int, op: Op) -> bool:
    """Whether this op is a backward that recomputes, for want of an R."""
    explicit = op._replace(kind="R") in program.ranks[rank]
    return op.kind in "BI" and bool(program.stages[op.stage].recompute) and not explicit


def check_laws(result: Simulation, costs: PieceTimes) -> None:
    """What must hold for any program and costs: nothing overlaps or starts before what it needs, no work is lost."""
    program, timeline = result.lowered.program, result.timeline
    near = 1e-9
    start = {event.op: event.start for event in timeline.ops}
    end = {event.op: event.end for event in timeline.ops}
    assert len(timeline.ops) == sum(map(len, program.ranks)) == len(start)
    for rank, ops in enumerate(program.ranks):
        assert all(end[before] <= start[after] + near for before, after in pairwise(ops))
        work = sum(op_time(costs, program, op) for op in ops)
        work += sum(
            op_time(costs, program, op._replace(kind="R")) for op in ops if recomputes_inside(program, rank, op)
        )
        assert result.busy[rank] == pytest.approx(work)
        assert work <= result.makespan + near
    links: dict[tuple[int, int], list[Any]] = {}
    for event in timeline.messages:
        assert event.producer is not None and event.consumer is not None
        links.setdefault((event.source, event.target), []).append(event)
        assert event.end - event.start == pytest.approx(costs.message)
        assert end[event.producer] <= event.start + near or event.kind == "weights"
        assert event.end <= start[event.consumer] + near or event.kind == "weight_gradients"
    for events in links.values():
        events.sort(key=lambda event: (event.start, event.end))
        assert all(before.end <= after.start + near for before, after in pairwise(events))
    shipped = {event for event in timeline.messages if event.kind in ("weights", "weight_gradients")}
    arrivals = {(event.producer, event.consumer) for event in timeline.messages if event not in shipped}
    home = {op: rank for rank, ops in enumerate(program.ranks) for op in ops}
    crossing = set()
    longest: dict[Op, float] = {}
    for op in sorted(start, key=lambda op: result.lowered.order.index(result.lowered.graph.ops.index(op))):
        earliest = 0.0
        for needed in needs(program, op, start.keys()):
            assert end[needed] <= start[op] + near
            travel = costs.message if home[needed] != home[op] else 0.0
            crossing.update([(needed, op)] if home[needed] != home[op] else [])
            earliest = max(earliest, longest[needed] + travel)
        longest[op] = earliest + op_time(costs, program, op)
    assert arrivals == crossing
    assert max(longest.values()) <= result.makespan + near
    assert result.makespan == max((*end.values(), *(event.end for event in shipped)))
    assert result.bubble_time == pytest.approx(result.makespan - sum(result.busy) / len(result.busy))
    assert result.bubble_time >= -near and 0 <= result.bubble_ratio + near < 1 + 2 * near


@settings(max_examples=250)
@given(seed=st.integers(0, 2**32))
def test_laws(seed: int) -> None:
    rng = Random(seed)
    program, costs = random_program(rng), random_costs(rng)
    result = simulate(lower(program, rng.choice((None, costs, random_costs(rng)))), costs)
    check_laws(result, costs)
    # Memory, again but naively: what is kept once each op has run; a split unit keeps what W needs from I on.
    for rank, ops in enumerate(program.ranks):
        peak = 0.0
        alive: dict[Unit, float] = {}
        for op in ops if not program.forward_only else ():
            if recomputes_inside(program, rank, op):
                others = sum(kept for unit, kept in alive.items() if unit != op.unit)
                peak = max(peak, others + sizes(costs, program, op, "saved", "recomputed"))
            if op.kind in "FRI":
                kinds = {"F": ("saved",), "R": ("saved", "recomputed"), "I": ("deferred",)}[op.kind]
                alive[op.unit] = sizes(costs, program, op, *kinds)
            peak = max(peak, sum(alive.values()))
            if op.kind in "BW":
                del alive[op.unit]
        assert not alive
        assert result.peak_activation[rank] == pytest.approx(peak)


@pytest.mark.parametrize("message", [0.0, 0.5, 7.0, 100.0])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b"])
def test_laws_of_the_catalogue(name: str, message: float) -> None:
    costs = PieceTimes({"qkv": 1, "attn": 3, "mlp": 2, "embed": 0.5, "head": 4}, message=message)
    check_laws(run(name, Shape(4, 8, 8), costs), costs)


def test_a_slower_link_is_never_faster() -> None:
    for name in ("gpipe", "1f1b", "interleaved-1f1b"):
        spans = [
            run(name, Shape(4, 8, 8), PieceTimes(EXAMPLE.forward, message=m)).makespan for m in (0, 0.5, 1, 2, 8, 64)
        ]
        assert spans == sorted(spans)


# -------------------------------------------------------------------------------------------------------------- costs


def test_weight_gradients_cost_what_they_cost() -> None:
    """Attention has no weights: all its backward is I. The linear layers' W is their backward less their forward."""
    costs = PieceTimes({"qkv": 1, "attn": 10, "mlp": 2})
    (stage,) = even_stages(1, 1)
    stages = (replace(stage, recompute=(stage.pieces,)),)
    program = Program("split", stages, parse_rows([["0F0", "0I0", "0W0", "0F1", "0R1", "0B1"]]), uniform(2))
    assert [op_time(costs, program, op) for op in program.ranks[0]] == [13, 1 + 20 + 2, 1 + 0 + 2, 13, 13, 26]
    result = simulate(lower(program), costs)
    assert result.makespan == 13 + (23 + 13) + 3 + 13 + 13 + 26  # without R its time is the backward's
    assert {str(e.op): e.end - e.start for e in result.timeline.ops}["0W0"] == 3


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0, 2.0, 3.5])
def test_input_and_weight_gradients_are_the_backward(ratio: float) -> None:
    pieces = model_pieces(1)
    stages = tuple(Stage((piece,)) for piece in pieces)
    program = Program("pieces", stages, ((),), uniform(1))
    costs = PieceTimes({piece.kind: 3.0 for piece in pieces}, ratio)
    for stage in range(len(stages)):
        full, inputs, weights = (op_time(costs, program, Op(kind, stage, 0)) for kind in "BIW")
        assert inputs + weights == full == 3 * ratio
        assert inputs >= 0 and weights >= 0


def test_uneven_chunks_share_the_work() -> None:
    stages = even_stages(1, 1)
    rows = parse_rows([["0F0", "0F0.1", "0F0.2", "0B0.2", "0B0.1", "0B0"]])
    program = Program("chunks", stages, rows, uniform(1, 3, (1, 2, 5)))
    linear, attention = PieceTimes({"mlp": 8.0}), PieceTimes({"attn": 64.0})
    assert [op_time(linear, program, op) for op in rows[0][:3]] == [1, 2, 5]
    # n tokens after c earlier ones cost n(c + n/2) of total²/2 = 32
    assert [op_time(attention, program, op) for op in rows[0][:3]] == [2 * 0.5, 2 * 2 * 2, 2 * 5 * 5.5]
    assert simulate(lower(program), linear).peak_activation == [1]


@pytest.mark.parametrize(
    ("first", "last", "stash"),
    [(0, 2, 1 / 16), (2, 4, 4 / 16), (4, 6, 11 / 16), (0, 6, 1), (3, 8, 1), (0, 13, 2), (10, 12, 0.625)],
)
def test_stash_of_a_stage(first: int, last: int, stash: float) -> None:
    pieces = model_pieces(2)
    stages = (Stage(pieces[first:last]),)
    assert sizes(EXAMPLE, Program("part", stages, ((),), uniform(1)), Op("F", 0, 0), "saved") == stash


def test_piece_times_text() -> None:
    assert parse_piece_times("pre=1,attn=3, post=2,embed=0.5") == {"qkv": 1, "attn": 3, "mlp": 2, "embed": 0.5}
    for text, message in [
        ("", "'' is not NAME=TIME"),
        ("attn", "'attn' is not NAME=TIME"),
        ("atn=1", "'atn=1' is not NAME=TIME with a name of embed, norm"),
        ("attn=x", "'x' is not a number"),
        ("pre=1,qkv=2", "gives qkv twice"),
    ]:
        with pytest.raises(UserError, match=f"^--piece-times.*{message}"):
            parse_piece_times(text)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_times_are_finite_and_not_negative(value: float) -> None:
    for make in (
        lambda: PieceTimes({"attn": value}),
        lambda: PieceTimes({}, value),
        lambda: PieceTimes({}, 2.0, value),
    ):
        with pytest.raises(UserError, match="must be a finite number and not negative"):
            make()


# ----------------------------------------------------------------------------------------------------------- timeline


def test_timeline_round_trip(tmp_path: Path) -> None:
    for seed in range(20):
        program, costs = random_program(Random(seed)), random_costs(Random(seed))
        timeline = simulate(lower(program), costs, unit="s").timeline
        timeline.save(tmp_path / "timeline.json")
        assert Timeline.load(tmp_path / "timeline.json") == timeline


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"3", b"\xff\x00", b'{"title":1,"ranks":1,"unit":"","ops":[[0,"junk",0,1]],"transfers":[]}']
    + [
        b'{"title":1,"ranks":1,"unit":"","ops":[[0,"",0,1]],"transfers":[]}',
        b'{"title":1,"ranks":1,"unit":"","ops":[[0,"0F0"]]}',
        b'{"title":1,"ranks":999999999,"unit":"","ops":[[0,"0F0",0,1]],"transfers":[]}',
        b'{"title":1,"ranks":1,"unit":"","ops":[],"transfers":[["post",[0,1],"0F0","1F0",0,1]]}',
        b'{"title":1,"ranks":1,"unit":"","ops":[],"transfers":[["activation",[],"0F0","1F0",0,1]]}',
        b'{"title":1,"ranks":1,"unit":"","ops":[],"transfers":[["offload",[0],null,null,0,1]]}',
        b'{"title":1,"ranks":1e999,"unit":"","ops":[[0,"0F0",0,1]],"transfers":[]}',
    ],
)
def test_what_is_no_timeline(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.json is not a timeline"):
        Timeline.load(tmp_path / "bad.json")
    with pytest.raises(UserError, match="cannot read the timeline"):
        Timeline.load(tmp_path / "none.json")
