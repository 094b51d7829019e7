"""Bounds and certificates of steps in which forwards run beside backwards of other units."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.certify import pairs
from helixpipe.certify.certificate import Certificate, certify
from helixpipe.certify.pairs import op_times
from helixpipe.common.errors import UserError
from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, PAIRS, Layout
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.lower import lower
from helixpipe.planning.overlap.pairs import may_pair
from helixpipe.planning.setup import Setup
from helixpipe.planning.vocabulary.choice import VocabularyOptions
from helixpipe.program.program import Program
from helixpipe.simulate.simulator import simulate
from schedules import build
from tests.certify.test_bounds import reordered
from tests.selection import graded
from tools.check_certificate import check

START, END, ALONE = 7, 8, 9


def costs(network: float = 50e9) -> ModelCosts:
    """Of four layers; network: bytes a second of a node."""
    model, hardware = replace(MODELS["llama3-8b"], layers=4), replace(HARDWARE["h100"], network=network)
    return ModelCosts(model, hardware, Layout(8, True, overlap_tp_comm=PAIRS), 8192)


def program(
    model: ModelCosts, name: str, ranks: int, microbatches: int, chunks: int = 1, vocabulary: Any = "ends"
) -> Program:
    setup = Setup(ranks, 4, model, vocabulary=VocabularyOptions(vocabulary))
    return build(name, setup.shape(microbatches, chunks))


def with_other_pairs(plain: Program, rng: Random) -> Program:
    """Some of the forwards right before a backward beside it."""
    chosen = set()
    for rank, ops in enumerate(plain.ranks):
        for op, after in pairwise(ops):
            if op.kind == "F" and after.kind in "BI" and may_pair(plain, rank, op, after) and rng.random() < 0.8:
                chosen.add(op)
    return replace(plain, pairs=frozenset(chosen))


def certified(made: Program, model: ModelCosts, limit: float | None = None) -> Certificate:
    return certify(simulate(lower(made, model), model), limit, linear_program=False)


@pytest.mark.hypothesis
@pytest.mark.parametrize("examples", graded((25, 400), (25,)))
def test_no_order_with_pairs_is_below_the_bound(examples: int) -> None:
    @settings(max_examples=examples)
    @given(seed=st.integers(0, 2**32))
    def verify(seed: int) -> None:
        rng = Random(seed)
        name, chunks = rng.choice([("1f1b", 1), ("zb1p", 1), ("seq1f1b", 2), ("seq1f1b", 3), ("interleaved-1f1b", 1)])
        model = costs(rng.choice([5e9, 50e9, 1e15]))
        vocabulary = rng.choice(["ends", "ends", "split"])
        made = program(model, name, 2, 2 * rng.randint(1, 3), chunks, vocabulary)
        own = certified(made, model, 1e15)  # which every order keeps to
        check(json.loads(json.dumps(own.to_json())))
        assert own.bound.value <= own.makespan * (1 + 1e-9)
        for _ in range(3):
            plain = reordered(replace(made, pairs=frozenset()), rng)
            try:
                other = certified(with_other_pairs(plain, rng), model, 1e15)
            except UserError:  # they wait for each other
                other = certified(plain, model, 1e15)
            assert other.bound.value == pytest.approx(own.bound.value, rel=1e-9)
            assert own.bound.value <= other.makespan * (1 + 1e-9)

    verify()


def test_a_pair_is_no_shorter_than_the_least_times_of_its_ops() -> None:
    model = costs()
    plain = replace(program(model, "seq1f1b", 2, 4, 4), pairs=frozenset())
    bound = BoundCosts(plain, model)
    times = op_times(bound)
    gains = []
    for ops in plain.ranks:
        for forward in (op for op in ops if op.kind == "F"):
            rest = [bound.pair_time(forward, other) - times[other].least for other in ops if other.kind == "B"]
            alone = bound.op_time(forward)
            assert times[forward].least == pytest.approx(min(alone, *rest)) and times[forward].alone == alone
            gains.append(times[forward].alone - times[forward].least)
    assert max(gains) > 0
    assert all(times[op].least <= bound.op_time(op) for ops in plain.ranks for op in ops)


def test_what_is_too_much_to_time_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "MOST_PAIRS", 3)
    model = costs()
    plain = replace(program(model, "seq1f1b", 2, 4, 2), pairs=frozenset())
    times = op_times(BoundCosts(plain, model))
    assert all((each.least == 0) == (op.kind == "F") for op, each in times.items())


def test_orders_with_pairs_are_as_short_as_any() -> None:
    """Of 1F1B exactly, of chunks but for what the best partner of each forward would gain more than its own."""
    model = costs()
    whole, chunks = (
        certified(program(model, name, 4, 16, count), model) for name, count in (("1f1b", 1), ("seq1f1b", 4))
    )
    assert whole.problem.tasks[0].time < whole.problem.tasks[0].alone and abs(whole.gap) < 1e-9
    assert chunks.gap < 1e-3 and "forwards before its first backward alone" in chunks.text()


# ------------------------------------------------------------------------------------------------------- the checker


@cache
def of_pairs() -> str:
    model = costs()
    return json.dumps(certified(program(model, "seq1f1b", 2, 4, 2), model).to_json())


def in_a_pair(text: dict[str, Any], rank: int = 1) -> tuple[list[Any], list[Any]]:
    """The first forward that is shorter than alone, and the backward beside it."""
    own = sorted((task for task in text["tasks"] if task[5] == [rank]), key=lambda task: task[START])
    return next((one, other) for one, other in pairwise(own) if one[END] - one[START] < one[ALONE] * (1 - 1e-6))


def test_pairs_are_accepted() -> None:
    text = json.loads(of_pairs())
    forward, backward = in_a_pair(text)
    assert forward[0] == "F" and backward[0] == "B" and forward[END] == backward[START]
    assert check(text).startswith("valid")


def shorter_alone(text: dict[str, Any]) -> None:
    """A forward beside nothing takes as long as one in a pair."""
    alone = next(task for task in text["tasks"] if task[0] == "F" and task[4] == "compute")
    alone[START] = alone[END] - alone[6]


def backward_beside_nothing(text: dict[str, Any]) -> None:
    """The backward of a pair starts later than its forward ends."""
    _, backward = in_a_pair(text)
    backward[START] += 1e-3 * (backward[END] - backward[START])
    backward[6] = backward[ALONE] = backward[END] - backward[START]


def used_before_the_pair_ends(text: dict[str, Any]) -> None:
    """What the forward of a pair made is sent when its part of the time is over."""
    forward, _ = in_a_pair(text, rank=0)
    key = ["activation", forward[1] + 1, *forward[2:4]]  # messages have the unit that takes them
    sent = next(task for task in text["tasks"] if task[:4] == key)
    sent[START:] = forward[END], forward[END] + sent[6], sent[6]


def longer_alone(text: dict[str, Any]) -> None:
    """A bound from forwards that would take longer alone than they do in this step."""
    for task in text["tasks"]:
        if task[0] == "F":
            task[ALONE] *= 2


def negative_rate(text: dict[str, Any]) -> None:
    text["bound"]["rate"] = -1.0
    text["bound"]["value"] = text["makespan"]


@pytest.mark.parametrize(
    ("tamper", "why"),
    [
        (shorter_alone, "alone it takes longer"),
        (backward_beside_nothing, "alone it takes longer"),
        (used_before_the_pair_ends, "before its needs"),
        (longer_alone, "alone it takes longer"),
        (negative_rate, "not proven"),
    ],
)
def test_pairs_that_cannot_be_are_rejected(tamper: Any, why: str) -> None:
    text = json.loads(of_pairs())
    tamper(text)
    with pytest.raises(ValueError, match=why):
        check(text)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**32))
def test_what_pairs_save_is_given_out_whole_and_least(rows: int, columns: int, seed: int) -> None:
    """Never more than where forwards are given all of it."""
    rng = Random(seed)
    saved = [[rng.uniform(-1, 1) for _ in range(columns)] for _ in range(rows)]
    counts = [rng.randint(1, 9) for _ in range(rows + columns)]
    found = pairs._given(saved, counts, [1.0] * (rows + columns))
    assert min(found) >= 0
    for row, line in enumerate(saved):
        assert all(found[row] + found[rows + column] >= most - 1e-12 for column, most in enumerate(line))
    forwards = sum(count * max(0.0, *line, 0.0) for count, line in zip(counts, saved, strict=False))
    assert sum(map(float.__mul__, found, map(float, counts))) <= forwards + 1e-6


def test_a_backward_that_hides_more_than_the_many_is_given_it_itself() -> None:
    assert pairs._given([[1.0, 3.0]], [8, 8, 1], [5.0] * 3) == pytest.approx([1.0, 0.0, 2.0])
