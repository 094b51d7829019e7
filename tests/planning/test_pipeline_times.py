"""Makespans of orders without a graph: those of list scheduling, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Layout, find_model
from helixpipe.lowering.lower import scheduled
from helixpipe.planning.order.orders import grouped_one_f_one_b
from helixpipe.planning.order.pipeline_times import PipelineTimes, makespan
from helixpipe.program.costs import Costs
from helixpipe.program.program import Op, Program
from helixpipe.program.stages import even_stages
from tests.lowering.ragged import random_chains

MODEL = ModelCosts(replace(find_model("llama3-8b"), layers=12), HARDWARE["h100"], Layout(tensor_parallel=4), 8192)
SLOW_MESSAGES = PieceTimes({"mlp": 1.0, "head": 3.0}, message=9.0)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**20),
    ranks=st.integers(1, 5),
    rows=st.integers(1, 8),
    ahead=st.integers(1, 3),
    groups=st.integers(1, 3),
    costs=st.sampled_from((MODEL, SLOW_MESSAGES, PieceTimes())),
)
def test_makespans_are_those_of_list_scheduling(
    seed: int, ranks: int, rows: int, ahead: int, groups: int, costs: Costs
) -> None:
    """In any order of rows, in groups, over nodes and messages that take longer than ops."""
    rng = Random(seed)
    workload, numbers = random_chains(rng, rows, 4, longest=4096), list(range(rows))
    rng.shuffle(numbers)
    parts = [part for first in range(groups) if (part := numbers[first::groups])]
    orders = grouped_one_f_one_b(workload, parts, [ahead * (ranks - rank - 1) for rank in range(ranks)])
    stages = even_stages(costs.layer_kinds(12 if ranks in (1, 2, 3, 4) else 10), ranks)
    units = list(workload.units())
    ops = tuple(
        tuple(Op("F", rank, *units[each]) if each >= 0 else Op("B", rank, *units[~each]) for each in own)
        for rank, own in enumerate(orders)
    )
    times = PipelineTimes(stages, workload, costs)
    explained = makespan(orders, times.forward, times.backward, times.down, times.up)
    assert times.makespan(orders) == explained == scheduled(Program("any", stages, ops, workload), costs).makespan


@pytest.mark.parametrize("ranks", [1, 3])
def test_one_row_of_one_chunk(ranks: int) -> None:
    workload = random_chains(Random(1), 1, 1)
    orders = [[0, ~0]] * ranks
    times = PipelineTimes(even_stages(SLOW_MESSAGES.layer_kinds(3), ranks), workload, SLOW_MESSAGES)
    ops = sum(sum(own) for of_kind in (times.forward, times.backward) for own in of_kind)
    assert times.makespan(orders) == pytest.approx(ops + sum(map(sum, (*times.down, *times.up))))
