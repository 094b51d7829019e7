"""The search for sizes, chunks and recomputation: what it finds is what all pairs of sizes, one by one, come to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helixpipe.common.errors import UserError
from helixpipe.costs.hardware import GIB, HARDWARE
from helixpipe.costs.models import MODELS, Layout
from helixpipe.planning.solver import CHOICES, OFFLOADED, Problem, solve
from schedules import build, find

SMALL = replace(MODELS["weipipe-1024"], layers=4, seq_length=8192)


def problem(
    gpus: int = 8, limit: float = 70.0, schedule: str = "sppo", sequences: int = 1, **changed: object
) -> Problem:
    given = Problem(
        find(schedule),
        lambda shape: build(schedule, shape),
        SMALL,
        replace(HARDWARE["a100-80"], gpus_per_node=4),
        gpus,
        sequences,
        Layout(sequence_parallel=True),
        limit * GIB,
    )
    return replace(given, **changed)  # type: ignore[arg-type]


def test_the_best_of_all_pairs_of_sizes() -> None:
    every = solve(problem(), most=99)
    pairs = {(each.tensor_parallel, each.ranks) for each in every}
    assert pairs == {(8, 1), (4, 2), (2, 4)}  # one sequence leaves no data parallel ranks, four layers no eight stages
    assert [each.step for each in every] == sorted(each.step for each in every)
    assert [(each.tensor_parallel, each.step) for each in solve(problem(), most=1)] == [
        (every[0].tensor_parallel, every[0].step)
    ]
    assert all(each.chunks <= 4 and each.choice == CHOICES[0] for each in every)


def test_data_parallel_ranks_divide_the_batch() -> None:
    found = {
        (each.tensor_parallel, each.ranks, each.costs.data_parallel) for each in solve(problem(4, sequences=2), 99)
    }
    assert found == {(1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)}
    assert {each.microbatches * each.costs.data_parallel for each in solve(problem(4, sequences=2), 99)} == {2}


def test_what_is_recomputed_follows_the_memory() -> None:
    (free,) = solve(problem(1, schedule="1f1b"))
    tight = free.peak / GIB - 0.4
    given = problem(1, limit=tight, schedule="1f1b")
    (best,) = solve(replace(given, offloaded=None))
    assert free.choice == CHOICES[0] and best.choice in CHOICES[1:]
    (offloading,) = solve(given)
    assert offloading.choice == OFFLOADED
    assert free.step <= offloading.step < best.step and offloading.peak <= given.limit
    assert best.peak <= tight * GIB and best.step > free.step
    with pytest.raises(
        UserError, match=r"^--gpus 8 are too few for --seq-length 8192: the least .* 0\.1 are usable\.$"
    ):
        solve(problem(limit=0.1))


def test_schedules_without_chunks_and_shapes_that_none_takes() -> None:
    assert {each.chunks for each in solve(problem(4, schedule="1f1b", sequences=4), 99)} == {1}
    assert {each.ranks for each in solve(problem(4, schedule="none", sequences=4), 99)} == {1}
    with pytest.raises(UserError, match=r"^--gpus 7 cannot be divided into .* that sppo takes for 4 layers, 32 query"):
        solve(problem(7))
