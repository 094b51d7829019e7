"""The memory of CUDA graphs in the cost model; tests/fake_cuda compares it with what is allocated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helixpipe.costs.hardware import find_hardware
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Layout, find_model
from helixpipe.lowering.lower import lower
from helixpipe.simulate.graph_memory import graph_memory
from helixpipe.simulate.memory import rank_memory
from schedules import Shape, build

COSTS = ModelCosts(find_model("llama2-7b"), find_hardware("h100"), Layout(cuda_graphs="auto"), 4096)


@pytest.mark.parametrize("changes", [{"cuda_graphs": "off"}, {"tensor_parallel": 2}, {"mlp_chunk": 512}])
def test_nothing_is_added_where_nothing_is_captured(changes: dict[str, object]) -> None:
    costs = replace(COSTS, layout=replace(COSTS.layout, **changes))  # type: ignore[arg-type]
    program = build("1f1b", Shape(4, 8, 32))
    assert graph_memory(program, costs, 0) == 0
    assert graph_memory(build("zb1p", Shape(4, 8, 32)), COSTS, 0) == 0


def test_each_unit_in_flight_has_memory_of_its_own() -> None:
    program = build("1f1b", Shape(4, 8, 32))
    first, second, last = (graph_memory(program, COSTS, rank) for rank in (0, 1, 2))  # a backward of 3 needs more
    assert first - second == pytest.approx(second - last, rel=1e-6) and second > last > 0
    lowered = lower(program)
    off = replace(COSTS, layout=replace(COSTS.layout, cuda_graphs="off"))
    added = rank_memory(lowered, COSTS, 0).activations - rank_memory(lowered, off, 0).activations
    assert added == pytest.approx(first)


def test_slots_of_all_chunks_stay() -> None:
    """One more unit of each chunk than there ever is in flight at once, at most."""
    program = build("seq1f1b", Shape(4, 8, 32, 4))
    at_once = rank_memory(lower(program), COSTS, 3).activations - graph_memory(program, COSTS, 3)
    assert graph_memory(program, COSTS, 3) > 0.3 * at_once
