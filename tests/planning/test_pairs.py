"""Orders in which forwards run beside backwards of other units, simulated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, OFF, PAIRS, Layout
from helixpipe.lowering.bound import BoundCosts
from helixpipe.lowering.lower import lower
from helixpipe.planning.memory.early import peak_memory
from helixpipe.planning.setup import Setup
from helixpipe.program.costs import Work
from helixpipe.program.program import Program
from helixpipe.program.stages import model_pieces
from helixpipe.program.workload import Extent
from helixpipe.simulate.simulator import simulate
from schedules import build

LLAMA = MODELS["llama3-8b"]


Sizes = tuple[int, int, str]
"""Tensor-parallel ranks, context-parallel ones, and what these exchange."""


def costs(overlap: str = PAIRS, tokens: int = 8192, sizes: Sizes = (8, 1, "p2p"), **changes: Any) -> ModelCosts:
    tp, cp, how = sizes
    layout = Layout(tp, tp > 1, context_parallel=cp, cp_comm_type=how, overlap_tp_comm=overlap)
    return ModelCosts(LLAMA, replace(HARDWARE["h100"], **changes), layout, tokens)


def program(
    name: str, model: ModelCosts, chunks: int = 1, limit: float | None = None, microbatches: int = 8
) -> Program:
    setup = Setup(4, 32, model, memory_limit=limit)
    return build(name, setup.shape(microbatches, chunks))


@pytest.mark.parametrize(("name", "chunks", "gain"), [("1f1b", 1, 1.1), ("seq1f1b", 4, 1.14), ("zb1p", 1, 1.25)])
def test_pairs_are_faster_and_keep_to_the_memory(name: str, chunks: int, gain: float) -> None:
    off, pairs = costs(OFF), costs()
    plain, paired = program(name, off, chunks), program(name, pairs, chunks)
    assert paired.pairs and not plain.pairs
    time = simulate(lower(paired, pairs), pairs).makespan
    assert simulate(lower(plain, off), off).makespan > gain * time
    least, most = max(peak_memory(plain, off)), max(peak_memory(paired, pairs))
    assert most > least
    limit = (least + most) / 2
    within = program(name, pairs, chunks, limit)
    assert max(peak_memory(within, pairs)) <= limit
    assert simulate(lower(within, pairs), pairs).makespan >= time


def test_without_collectives_to_hide_nothing_is_paired() -> None:
    model = ModelCosts(LLAMA, HARDWARE["h100"], Layout(overlap_tp_comm=PAIRS), 8192)
    assert not model.layout.pairs and not program("1f1b", model).pairs


@settings(max_examples=30)
@given(
    st.sampled_from(["B", "I"]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([1024, 4096, 16384]),
    st.sampled_from([(8, 1, "p2p"), (1, 4, "a2a"), (4, 2, "a2a"), (4, 2, "p2p"), (1, 16, "p2p")]),
)
def test_a_pair_takes_no_less_than_its_kernels(
    kind: str, forward: int, backward: int, tokens: int, sizes: Sizes
) -> None:
    """And hardly more than its ops alone; on an infinitely fast network as long as these."""

    def pair(model: ModelCosts) -> tuple[float, float]:
        extents = (Extent(tokens, 0.0),)
        works = [
            Work(op, model_pieces(layers)[1:-1], extents, float(tokens))
            for op, layers in (("F", forward), (kind, backward))
        ]
        beside = [works[0]._replace(beside=works[1]), works[1]._replace(beside=works[0])]
        return sum(map(model.op_time, beside)), sum(map(model.op_time, works))

    together, alone = pair(costs(tokens=tokens, sizes=sizes))
    fast_together, fast_alone = pair(costs(tokens=tokens, sizes=sizes, nvlink=1e30, network=1e30, latency=0.0))
    assert fast_together == pytest.approx(fast_alone)
    assert fast_alone < together <= alone * (1.001 if sizes[2] == "a2a" or sizes[1] == 1 else 1.03)
    assert together < alone * 0.97 or sizes[1] > 1


@pytest.mark.parametrize("way", ["a2a", "p2p"])
def test_context_parallel_ranks_have_pairs_too(way: str) -> None:
    """Over the network, by which a ring sends longer than a round attends."""
    sizes = (1, 16, way)
    off, pairs = costs(OFF, 16384, sizes), costs(PAIRS, 16384, sizes)
    plain, paired = program("1f1b", off), program("1f1b", pairs)
    assert paired.pairs and not plain.pairs
    gain = simulate(lower(plain, off), off).makespan / simulate(lower(paired, pairs), pairs).makespan
    assert gain > 1.01


def test_a_bound_pair_takes_what_its_ops_say() -> None:
    model = costs()
    paired = program("seq1f1b", model, 4)
    bound = BoundCosts(paired, model)
    for forward in paired.pairs:
        backward = paired.beside[forward]
        both = bound.op_time(forward) + bound.op_time(backward)
        assert bound.pair_time(forward, backward) == pytest.approx(both)
        alone = BoundCosts(replace(paired, pairs=frozenset()), model)
        assert both < alone.op_time(forward) + alone.op_time(backward)
