"""The memory of CUDA graphs in the cost model; tests/fake_cuda compares it with what is allocated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helixpipe.costs.hardware import find_hardware
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Layout, find_model
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.lower import lower
from helixpipe.planning.memory.early import peak_memory
from helixpipe.program.program import Program
from helixpipe.program.tasks import Buffer
from helixpipe.simulate.graph_memory import CostsOutsideGraphs
from helixpipe.simulate.memory import rank_memory
from helixpipe.simulate.simulator import simulate
from schedules import Shape, build

COSTS = ModelCosts(find_model("llama2-7b"), find_hardware("h100"), Layout(cuda_graphs="auto"), 4096)
EAGER = replace(COSTS, layout=replace(COSTS.layout, cuda_graphs="off"))


def graphs(program: Program, rank: int, costs: ModelCosts = COSTS) -> float:
    return CostsOutsideGraphs(program, costs, rank).graphs()


@pytest.mark.parametrize("changes", [{"cuda_graphs": "off"}, {"tensor_parallel": 2}, {"mlp_chunk": 512}])
def test_nothing_is_counted_where_nothing_is_captured(changes: dict[str, object]) -> None:
    costs = replace(COSTS, layout=replace(COSTS.layout, **changes))  # type: ignore[arg-type]
    assert graphs(build("1f1b", Shape(4, 8, 32)), 0, costs) == 0
    assert graphs(build("zb1p", Shape(4, 8, 32)), 0) == 0


def test_each_unit_in_flight_has_memory_of_its_own() -> None:
    program = build("1f1b", Shape(4, 8, 32))
    first, second, last = (graphs(program, rank) for rank in (1, 2, 3))
    assert first - second == pytest.approx(second - last, rel=1e-6) and second > last > 0
    saved = Buffer("saved", 1, 1, 0, 0)  # of which attention's output alone lies outside
    assert 0 < CostsOutsideGraphs(program, COSTS, 1).size(saved) < 0.3 * BoundCosts(program, COSTS).size(saved)


def test_slots_of_all_chunks_stay() -> None:
    """On the last rank, of a sequence in four chunks all of which are in flight, as on the rank before."""
    whole, chunks = build("1f1b", Shape(4, 8, 32)), build("seq1f1b", Shape(4, 8, 32, 4))
    assert graphs(chunks, 3) > 1.2 * graphs(whole, 3)  # five units of a quarter


@pytest.mark.parametrize(("name", "sizes"), [("1f1b", {}), ("seq1f1b", {"chunks": 2}), ("helix", {"costs": EAGER})])
def test_limits_are_compared_with_what_graphs_hold(name: str, sizes: dict[str, Any]) -> None:
    """A rank's need is that of its report, and more than without graphs: inputs are copied, and slots stay."""
    program = build(name, Shape(4, 8, 32, **sizes))
    lowered = lower(program, COSTS)
    needs = simulate(lowered, COSTS).device_needs
    assert needs == pytest.approx([rank_memory(lowered, COSTS, rank).total for rank in range(4)])
    assert needs == pytest.approx(peak_memory(program, COSTS))
    eager = simulate(lowered, EAGER).device_needs
    assert all(1.02 * without < graphed < 1.5 * without for graphed, without in zip(needs, eager, strict=True))


def test_the_optimizers_moment_counts_beside_graphs() -> None:
    """Where weights are many and activations few, most is needed while Adam runs: graphs stay then."""
    costs = replace(COSTS, seq_length=128, distributed_optimizer=False)
    program = build("1f1b", Shape(4, 8, 32))
    memory, pieces = rank_memory(lower(program), costs, 0), program.pieces_of_rank(0)
    update = costs.update_memory(pieces)
    assert update == 4 * costs.bytes.parameters(pieces)
    assert memory.total == pytest.approx(costs.static_memory(pieces) + graphs(program, 0, costs) + update)
