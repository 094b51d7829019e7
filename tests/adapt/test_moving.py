"""Layers that move between ranks while a run goes on, with their optimizer's state: it trains as if they had not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helixpipe.program.program import Unit
from helixpipe.program.stages import Activations
from megatron.pretrain.resilience.moving import Elements, MovedPart, RankHoldings, parts
from megatron.pretrain.resilience.watching import why_layers_stay
from schedules import Shape, build
from tests.adapt.moving_ranks import STEPS, Case, Outcome, outcomes
from tests.distributed import run_ranks
from tests.selection import graded, selected
from tests.training.steps import Run

EIGHT = "--num-layers 8 --micro-batch-size 1"
CASES = [  # without clipping, by a norm whose rounding depends on where layers are
    Case(Run("gpt", EIGHT, pp=4, clip=0), ((3, 1, 2, 2), (2, 2, 1, 3))),
    Case(Run("gpt", f"{EIGHT} --use-distributed-optimizer", pp=2, clip=0), ((5, 3), (7, 1))),
    Case(Run("llama", f"{EIGHT} --use-distributed-optimizer --bf16 --pipeline-schedule zb1p", pp=2, clip=0), ((3, 5),)),
    Case(Run("llama", f"{EIGHT} --bf16 --sequence-parallel", tp=2, pp=2, clip=0), ((5, 3), (1, 7))),
]


NUMBERS = graded(range(len(CASES)), (1,))


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[tuple[Outcome, Outcome]]]:
    """For each case what came of every rank, with layers that stay and with such that move."""
    numbers = selected(request, "number", range(len(CASES)))
    by_rank = run_ranks(outcomes, 4, [CASES[number] for number in numbers], str(tmp_path_factory.mktemp("moved")))
    return {number: [of_rank[place] for of_rank in by_rank] for place, number in enumerate(numbers)}


@pytest.mark.parametrize("number", NUMBERS)
def test_layers_move_and_training_goes_on_as_if_they_had_not(
    found: dict[int, list[tuple[Outcome, Outcome]]], number: int
) -> None:
    divisions = CASES[number].divisions
    for rank, (stayed, moved) in enumerate(found[number]):
        assert moved.kept == [True] * len(divisions) and moved.stayed, f"rank {rank}"
        assert len(moved.losses) == len(stayed.losses) == STEPS * (1 + len(divisions))
        assert moved.losses == stayed.losses
        assert moved.norms == pytest.approx(stayed.norms, rel=1e-5)  # its squares are summed in another order
        assert moved.state.keys() == stayed.state.keys() and any("exp_avg_sq" in name for name in moved.state)
        for name, value in stayed.state.items():
            assert torch.equal(moved.state[name], value), name


@pytest.mark.parametrize(
    ("flags", "schedule", "reason"),
    [
        ("--save s --save-interval 4", "1f1b", None),
        ("--save s --save-interval 3 --watch-interval 2", "1f1b", None),
        ("", "1f1b", "--save-interval"),
        ("--save s --save-interval 1", "1f1b", "--watch-interval"),
        ("--save s --save-interval 2", "1f1b", "--watch-interval"),
        ("--save s --save-interval 4", "weipipe", "travel"),
        ("--save s --save-interval 4", "offloaded", "in their own ways"),
    ],
)
def test_where_layers_never_move_a_reason_is_said(flags: str, schedule: str, reason: str | None) -> None:
    config = Run("gpt", flags, pp=4).config(0, 4)
    program = build("1f1b" if schedule == "offloaded" else schedule, Shape(4, 8, 4))
    if schedule == "offloaded":
        program = replace(program, activations={Unit(0, 0): Activations()})
    why = why_layers_stay(config, SimpleNamespace(chained_optimizers=[]), program)
    assert why is None if reason is None else why is not None and reason in why


SHARES = st.lists(st.integers(1, 5), min_size=1, max_size=6)
"""Elements that each rank has of one weight, one rank's after another's."""


@given(SHARES, SHARES, st.booleans())
def test_every_element_comes_from_a_rank_that_has_it_and_the_nearest_does(
    held: list[int], needed: list[int], twice: bool
) -> None:
    total = min(sum(held), sum(needed))
    have, need = (_shares(each, total) for each in (held, needed))
    ranks = max(len(have), len(need))
    have, need = ([*each, *[[]] * (ranks - len(each))] for each in (have, need))
    replicas = [0] * ranks + [1] * ranks
    have, need = (each + (each if twice else [[] for _ in each]) for each in (have, need))
    got: dict[int, list[int]] = {target: [] for target in range(len(need))}
    for source, target, extent in parts(RankHoldings(have, need, [0] * len(have), replicas)):
        elements = range(extent.start, extent.end)
        assert any(own.start <= extent.start and extent.end <= own.end for own in have[source])
        if source != target:
            assert not any(own.start <= extent.start < own.end for own in have[target])
        if twice:
            assert replicas[source] == replicas[target]
        got[target] += elements
    assert [got[target] for target in got] == [
        [element for extent in own for element in range(extent.start, extent.end)] for own in need
    ]


def test_ranks_of_other_shards_are_not_asked() -> None:
    own = [[Elements("w", 0, 4)], [Elements("w", 0, 4)]]
    assert list(parts(RankHoldings([own[0], own[1], []], [[], [], own[0]], [0, 1, 1], [0, 0, 0]))) == [
        MovedPart(1, 2, Elements("w", 0, 4))
    ]
    with pytest.raises(RuntimeError, match="no rank has elements of w from 0 on"):
        list(parts(RankHoldings([own[0], []], [[], own[0]], [0, 1], [0, 0])))


def _shares(counts: list[int], total: int) -> list[list[Elements]]:
    shares, start = [], 0
    for count in counts:
        end = min(start + count, total)
        shares.append([Elements("w", start, end)] if end > start else [])
        start = end
    return shares


@pytest.mark.parametrize("number", NUMBERS)
def test_what_is_saved_then_resumes_with_the_first_layers(
    found: dict[int, list[tuple[Outcome, Outcome]]], number: int
) -> None:
    assert all(moved.resumed for _, moved in found[number])
