"""The last backwards of a finished order, split in two."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Layout, find_model
from helixpipe.lowering.lower import scheduled
from helixpipe.planning.order.split_last import split_last
from schedules import Shape, build
from tests.lowering.ragged import random_chains

MODEL = replace(find_model("llama2-7b"), layers=8)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**20),
    ranks=st.sampled_from((2, 4, 8)),
    rows=st.integers(1, 9),
    tensor_parallel=st.sampled_from((1, 2, 4)),
)
def test_splits_take_as_long_as_list_scheduling_says(seed: int, ranks: int, rows: int, tensor_parallel: int) -> None:
    """With ranks whose neighbours are partly in their node and partly in another: each message at its own link's
    pace."""
    costs = ModelCosts(MODEL, HARDWARE["h100"], Layout(tensor_parallel=tensor_parallel), 4096)
    workload = random_chains(Random(seed), rows, 3, longest=4096)
    program = build("seq1f1b", Shape(ranks, rows, 8, costs=costs, ragged=workload))
    splits = split_last(program, costs, 80 * 2**30)
    assert splits
    for time, make in splits:
        assert abs(scheduled(make(), costs).makespan / time - 1) < 1e-9
