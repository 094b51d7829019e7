"""The memory of CUDA graphs in the cost model; tests/fake_cuda compares it with what is allocated."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helixpipe.costs.hardware import find_hardware
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Layout, find_model
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.lower import lower
from helixpipe.model.graphs import Graphs
from helixpipe.planning.memory.early import peak_memory
from helixpipe.program.costs import Contents
from helixpipe.program.program import Op, Program, Unit
from helixpipe.program.stages import Activations, Segment, segments
from helixpipe.program.tasks import Buffer
from helixpipe.program.workload import Slice, Workload
from helixpipe.simulate.graph_memory import CostsOutsideGraphs
from helixpipe.simulate.memory import rank_memory
from helixpipe.simulate.simulator import simulate
from schedules import Shape, build
from tests.runtime.recorded_graphs import RecordedEngine

COSTS = ModelCosts(find_model("llama2-7b"), find_hardware("h100"), Layout(cuda_graphs="auto"), 4096)
EAGER = replace(COSTS, layout=replace(COSTS.layout, cuda_graphs="off"))


def graphs(program: Program, rank: int, costs: ModelCosts = COSTS) -> float:
    return CostsOutsideGraphs(program, costs, rank).graphs()


@pytest.mark.parametrize("changes", [{"cuda_graphs": "off"}, {"tensor_parallel": 2}, {"mlp_chunk": 512}])
def test_nothing_is_counted_where_nothing_is_captured(changes: dict[str, object]) -> None:
    costs = replace(COSTS, layout=replace(COSTS.layout, **changes))
    assert graphs(build("1f1b", Shape(4, 8, 32)), 0, costs) == 0
    assert graphs(build("zb1p", Shape(4, 8, 32)), 0) == 0


def test_steps_of_documents_run_in_no_graphs() -> None:
    """Nor do rows of one document each, whose lengths are those of no other step."""
    rows = tuple(((Slice(number, 0, 1024 + number),), (Slice(number, 1024 + number, 512),)) for number in range(4))
    program = build("seq1f1b", Shape(4, 4, 32, costs=COSTS, ragged=Workload(rows)))
    assert all(graphs(program, rank) == 0 for rank in range(4))
    assert peak_memory(program, COSTS) == peak_memory(program, EAGER)


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


@settings(max_examples=25)
@given(st.data())
def test_slots_are_those_of_the_runtime(data: st.DataObject) -> None:
    """Whatever units recompute: those that `helixpipe.model.graphs` makes as it goes through steps."""
    chunks = data.draw(st.integers(1, 3))
    program = build("seq1f1b" if chunks > 1 else "1f1b", Shape(2, data.draw(st.integers(1, 4)), 4, chunks))
    choices = st.sampled_from([(), (0,), (1,), (0, 1)]), st.booleans()
    activations, ranks = dict[Unit, Activations](), list[tuple[Op, ...]]()
    for ops in program.ranks:
        own = list[Op]()
        for op in ops:
            if op.kind == "F":
                pieces, layers = program.stages[op.stage].pieces, data.draw(choices[0])
                runs = (tuple(piece for piece in pieces if piece.layer == 2 * op.stage + each) for each in layers)
                activations[op.unit] = Activations(tuple(runs))
            elif activations[op.unit].recompute and data.draw(choices[1]):
                own.append(Op("R", *op.unit))
            own.append(op)
        ranks.append(tuple(own))
    program = replace(program, ranks=tuple(ranks), activations=activations)
    for rank in range(2):
        graphs = Graphs(RecordedEngine(), lambda pieces: [], often=1, earlier=0)
        for _ in range(3):
            _go_through(program, rank, graphs, 6 * chunks)
        assert sum(CostsOutsideGraphs(program, COSTS, rank).slots().values()) == graphs.slots


def _go_through(program: Program, rank: int, graphs: Graphs, tokens_of_row: int) -> None:
    """A step of a rank, whose pieces each give a tensor like the one they get."""
    graphs.begin()
    explicit = {op.unit for op in program.ranks[rank] if op.kind == "R"}
    kept = defaultdict[Unit, list[Tensor]](list)
    for op in program.ranks[rank]:
        (extent,) = program.workload.extents[op.microbatch][op.chunk]
        tokens, offset = round(extent.tokens * tokens_of_row), round(extent.earlier * tokens_of_row)
        for part in segments(program.stages[op.stage].pieces, program.activations_of(op.unit)):
            if op.kind == (("R" if op.unit in explicit else "B") if part.recomputed else "F"):
                state = (torch.ones(tokens, requires_grad=True),)
                kept[op.unit] += graphs.run(part.pieces, state, offset, lambda pieces, state: (state[0] * 1.0,))
        if op.kind == "B":
            for result in kept.pop(op.unit):
                result.sum().backward()


def test_chunks_of_as_many_tokens_have_gradients_in_common() -> None:
    def beside_slots(program: Program, costs: ModelCosts) -> float:
        own, slots = CostsOutsideGraphs(program, costs, 1), 0.0
        for (pieces, after, extents), number in own.slots().items():
            parts = Segment(pieces, False), Segment((after,), False)
            slots += number * costs.size(Contents("graph_slot", parts, extents, own.whole))
        return own.graphs() - slots

    chunks, whole = build("seq1f1b", Shape(4, 8, 32, 4)), build("1f1b", Shape(4, 8, 32))
    assert beside_slots(chunks, COSTS) == pytest.approx(beside_slots(whole, replace(COSTS, seq_length=1024)))


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
    costs = replace(COSTS, seq_length=128, distributed_optimizer=False, fused_adam=False)
    program = build("1f1b", Shape(4, 8, 32))
    memory, pieces = rank_memory(lower(program), costs, 0), program.pieces_of_rank(0)
    update = costs.update_memory(pieces)
    assert update == 4 * costs.bytes.parameters(pieces)
    assert replace(costs, fused_adam=None).update_memory(pieces) == 0  # as on GPUs with fused kernels
    beside = graphs(program, 0, costs) + memory.received
    assert memory.total == pytest.approx(costs.static_memory(pieces) + beside + update)
