"""Schedules over sequence chunks: the paper's figures, right for every number of chunks, never worse than without I
and W."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.common.errors import ProgramError, ScheduleError
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.lower import lower
from helixpipe.lowering.validate import validate
from helixpipe.planning.order.list_scheduling import Rules, greedy
from helixpipe.planning.order.orders import backward_units, forward_units, one_forward_one_backward
from helixpipe.planning.order.problem import problem
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import even_stages
from helixpipe.program.text import to_csv
from helixpipe.program.workload import uniform
from helixpipe.simulate.simulator import Simulation, simulate
from schedules import Shape, build
from schedules.zero_bubble import ZeroBubbleOptions
from tests.lowering.random_programs import random_costs
from tests.selection import graded

EQUAL = PieceTimes({"mlp": 1.0})  # F = I = W = 1 a layer, chunks of equal time
LONG = PieceTimes({"qkv": 1, "attn": 10, "mlp": 2}, message=0.1)
NAMES = ("terapipe", "seq1f1b", "seq1f1b-interleaved", "seq1f1b-zb")
SIZES = (1, 2, 3, 4, 8)


def run(
    name: str,
    p: int,
    m: int,
    k: int,
    costs: PieceTimes = EQUAL,
    v: int | None = None,
    lengths: tuple[int, ...] | None = None,
    limit: int | None = None,
) -> Simulation:
    """One layer a stage, so F and B of a whole microbatch on a rank are v and 2v with EQUAL costs."""
    shape = Shape(p, m, p * (v or 1), k, v, lengths, costs)
    program = build(name, shape, ZeroBubbleOptions(limit) if name.endswith("zb") else None)
    return simulate(lower(program, costs), costs)


# ------------------------------------------------------------------------------------------------------------- orders


@pytest.mark.parametrize(
    ("name", "whole"),
    [("terapipe", "gpipe"), ("seq1f1b", "1f1b"), ("seq1f1b-interleaved", "interleaved-1f1b"), ("seq1f1b-zb", "zb1p")],
)
@pytest.mark.parametrize("costs", [None, LONG], ids=["none", "long"])
def test_one_chunk_is_the_schedule_without_chunks(name: str, whole: str, costs: PieceTimes | None) -> None:
    for p in SIZES:
        for m in (p, 2 * p, 3 * p) if "interleaved" in name else (1, p, p + 1, 3 * p):
            for v in (1, 2, 3) if "interleaved" in name else (None,):
                shape = Shape(p, m, 6 * p, virtual_stages=v, costs=costs)
                assert build(name, shape).ranks == build(whole, shape).ranks


def test_the_papers_order() -> None:
    """p = 2, m = 2, k = 2: warm-up of p-r-1+k-1, microbatches first in first out, chunks last in first out."""
    rows = [" ".join(map(str, ops)) for ops in build("seq1f1b", Shape(2, 2, 2, chunks=2)).ranks]
    assert rows == [
        "0F0 0F0.1 0F1 0B0.1 0F1.1 0B0 0B1.1 0B1",
        "1F0 1F0.1 1B0.1 1F1 1B0 1F1.1 1B1.1 1B1",
    ]
    rows = [" ".join(map(str, ops)) for ops in build("terapipe", Shape(1, 2, 1, chunks=2)).ranks]
    assert rows == ["0F0 0F0.1 0F1 0F1.1 0B0.1 0B0 0B1.1 0B1"]


@pytest.mark.parametrize("name", NAMES)
def test_chunks_ascend_forward_and_descend_backward(name: str) -> None:
    for p, m, k, v in ((4, 8, 3, 2), (2, 3, 5, 2), (3, 7, 4, 3), (4, 2, 8, 2)):
        shape = Shape(p, m, 6 * p, k, v if "interleaved" in name else None)
        program = build(name, shape)
        assert (program.num_chunks, program.num_microbatches) == (k, m)
        for ops in program.ranks:
            for stage in {op.stage for op in ops}:
                own = [op for op in ops if op.stage == stage]
                forward = [(op.microbatch, op.chunk) for op in own if op.kind == "F"]
                backward = [(op.microbatch, op.chunk) for op in own if op.kind in "BI"]
                assert forward == sorted(forward)
                assert backward == sorted(backward, key=lambda unit: (unit[0], -unit[1]))


@pytest.mark.parametrize("p", graded(SIZES, SIZES[:3]))
def test_interleaved_is_well_ordered_for_every_number_of_chunks(p: int) -> None:
    for k in range(1, 9):
        for m in {1, 2, p, p + 1, 2 * p + 1}:
            for v in (1, 2, 3):
                validate(build("seq1f1b-interleaved", Shape(p, m, p * v, k, v)))


def test_groups_of_p_units_are_not() -> None:
    """The published rule, for p = 4, k = 3: a group ends within a microbatch. For k = 2 it is ours."""

    def published(p: int, m: int, k: int, v: int) -> Program:
        def order(kind: str, units: list[tuple[int, int]], places: range, rank: int) -> list[Op]:
            groups = [units[i : i + p] for i in range(0, len(units), p)]
            return [Op(kind, place * p + rank, *unit) for group in groups for place in places for unit in group]

        ranks = []
        for rank in range(p):
            forwards = order("F", forward_units(uniform(m, k)), range(v), rank)
            backwards = order("B", backward_units(uniform(m, k)), range(v)[::-1], rank)
            warmup = (v - 1) * p + 2 * (p - rank - 1) + k - 1
            ranks.append(tuple(one_forward_one_backward(forwards, backwards, warmup)))
        return Program("published", even_stages(p * v, p * v), tuple(ranks), uniform(m, k))

    with pytest.raises(ProgramError):
        validate(published(4, 8, 3, 2))
    validate(build("seq1f1b-interleaved", Shape(4, 8, 8, 3, 2)))
    for k in (1, 2, 4):
        assert published(4, 8, k, 2).ranks == build("seq1f1b-interleaved", Shape(4, 8, 8, k, 2)).ranks


def test_lengths_are_those_of_the_shape(tmp_path: Path) -> None:
    shape = Shape(2, 3, 4, chunks=3, chunk_lengths=(5, 3, 2))
    for name in NAMES:
        assert build(name, shape).chunk_lengths == (5, 3, 2)
    path = str(tmp_path / "mine.csv")
    to_csv(build("seq1f1b", replace(shape, chunk_lengths=None)), path)  # a CSV file has none
    assert replace(build(path, shape), schedule="seq1f1b") == build("seq1f1b", shape)
    for lengths in ((5, 5), (5, 5, 0)):
        with pytest.raises(ScheduleError, match=r"^chunk lengths \(5, 5.*\) do not fit the number of chunks, 3\.$"):
            Shape(2, 3, 4, chunks=3, chunk_lengths=lengths)


# ------------------------------------------------------------------------------------------------- bubbles and memory


@pytest.mark.parametrize("name", ["seq1f1b", "terapipe"])
@pytest.mark.parametrize("p", SIZES)
def test_the_bubble_is_a_kth(name: str, p: int) -> None:
    for k in range(1, 9):
        for m in sorted({p, p + 1, 2 * p}):
            assert run(name, p, m, k).bubble_time == pytest.approx((p - 1) * 3 / k)


@pytest.mark.parametrize("p", SIZES)
def test_memory_of_seq1f1b(p: int) -> None:
    for k in range(1, 9):
        for m in (1, 2, p, 2 * p):
            peaks = run("seq1f1b", p, m, k).peak_activation
            assert peaks == pytest.approx([min((p - r - 1 + k) / k, m) for r in range(p)])
    assert run("terapipe", 4, 8, 4).peak_activation == pytest.approx([8] * 4)


@pytest.mark.parametrize("p", SIZES)
def test_interleaving_divides_the_bubble(p: int) -> None:
    """Also where k does not divide p, and for any m that fills a group."""
    for k in range(1, 9):
        group = ceil(p / k)
        for m in sorted({group, group + 1, p}):
            for v in (2, 3):
                result = run("seq1f1b-interleaved", p, m, k, v=v)
                assert result.bubble_time == pytest.approx((p - 1) * 3 * v / (k * v))
                most = group + m % group if m < 2 * group else group + ceil(m % group / (m // group))
                units = [(v - 1) * most * k + 2 * (p - r - 1) + k for r in range(p)]
                assert result.peak_activation == pytest.approx([min(count, m * k * v) / k for count in units])


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_each_form_idles_less(p: int, k: int) -> None:
    """F = B/2 = 2 a rank, so that v = 2 stages have whole layers."""
    bubbles = {}
    for name, v in (("terapipe", None), ("seq1f1b", None), ("seq1f1b-interleaved", 2), ("seq1f1b-zb", None)):
        program = build(name, Shape(p, 2 * p, 2 * p, k, v, costs=EQUAL))
        bubbles[name] = simulate(lower(program, EQUAL), EQUAL).bubble_time
    assert bubbles["terapipe"] == pytest.approx(bubbles["seq1f1b"]) == pytest.approx((p - 1) * 6 / k)
    assert bubbles["seq1f1b-interleaved"] == pytest.approx((p - 1) * 3 / k)
    assert bubbles["seq1f1b-zb"] == pytest.approx((p - 1) * 2 / k)  # (p-1)(F+I-W)/k


def test_few_units_leave_ranks_idle_but_finish() -> None:
    for p, m, k in ((8, 1, 3), (8, 2, 2), (4, 1, 1)):
        for name in NAMES:
            result = run(name, p, m, k, v=2 if "interleaved" in name else None)
            assert result.makespan >= result.ideal


# -------------------------------------------------------------------------------------------------------- zero bubble


def check_zero_bubble(p: int, m: int, k: int, costs: PieceTimes, lengths: tuple[int, ...] | None) -> None:
    ours, plain = (run(name, p, m, k, costs, lengths=lengths) for name in ("seq1f1b-zb", "seq1f1b"))
    assert ours.makespan <= plain.makespan * (1 + 1e-9) + 1e-9
    allowed = max(1 + (p - 1) / k, max(plain.peak_activation))
    assert max(ours.peak_activation) <= allowed * (1 + 1e-9)
    stages = even_stages(p, p)
    bound, span = problem("test", stages, tuple(range(p)), uniform(m, k, lengths), allowed, costs).lower_bounds()
    assert ours.makespan >= bound * (1 - 1e-9)
    assert ours.shifted_bubble_time + ours.ideal >= span * (1 - 1e-9)


@settings(max_examples=120)
@given(p=st.integers(1, 5), m=st.integers(1, 6), k=st.integers(1, 7), seed=st.integers(0, 2**32))
def test_zero_bubble_is_never_worse_and_within_memory(p: int, m: int, k: int, seed: int) -> None:
    rng = Random(seed)
    drawn = random_costs(rng)
    costs = PieceTimes(drawn.forward, max(drawn.backward_ratio, 1.0), drawn.message)
    lengths = None if rng.random() < 0.3 else tuple(rng.randint(1, 9) for _ in range(k))
    check_zero_bubble(p, m, k, costs, lengths)


@pytest.mark.parametrize(("p", "m", "k"), [(4, 1, 6), (5, 2, 8), (2, 3, 8), (8, 3, 2), (1, 2, 3)])
def test_zero_bubble_with_few_microbatches_or_many_chunks(p: int, m: int, k: int) -> None:
    for lengths in (None, tuple(range(2 * k, k, -1)), tuple(range(1, k + 1))):
        check_zero_bubble(p, m, k, LONG, lengths)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_zero_bubble_under_a_limit(limit: int) -> None:
    for k in (1, 3, 8):
        for lengths in (None, tuple(range(k, 0, -1))):
            result = run("seq1f1b-zb", 4, 6, k, LONG, lengths=lengths, limit=limit)
            assert max(result.peak_activation) <= limit * (1 + 1e-9)
    with pytest.raises(ScheduleError, match=r"^--zb-max-inflight 0 must be at least 1\.$"):
        run("seq1f1b-zb", 4, 6, 2, limit=0)


def test_more_memory_idles_less() -> None:
    bubbles = [run("seq1f1b-zb", 4, 8, 2, limit=limit).shifted_bubble_time for limit in (1, 2, 4)]
    assert bubbles[0] > bubbles[1] >= bubbles[2] == pytest.approx(0)


@settings(max_examples=150)
@given(p=st.integers(1, 3), v=st.integers(1, 3), m=st.integers(1, 5), k=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_rules_never_get_stuck_whatever_lies_on_a_rank(p: int, v: int, m: int, k: int, seed: int) -> None:
    """With room for one microbatch and any placement, order of preference and lengths, every op is scheduled."""
    rng = Random(seed)
    homes = [stage % p for stage in range(p * v)]
    rng.shuffle(homes)
    lengths = tuple(rng.randint(1, 5) for _ in range(k))
    found_for = problem(
        "test", even_stages(p * v, p * v), tuple(homes), uniform(m, k, lengths), rng.choice((1, 1.5)), LONG
    )
    prefer = [(kind, place) for kind in "FI" for place in range(v)]
    rng.shuffle(prefer)
    found = greedy(found_for, Rules(tuple(prefer), make_room=rng.random() < 0.5, in_turn=rng.random() < 0.5))
    assert found is not None and found.memory <= 1 + 1e-9
    validate(Program("found", even_stages(p * v, p * v), found.ranks, uniform(m, k)))
