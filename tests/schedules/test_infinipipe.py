"""InfiniPipe's order: chains in groups, the longest first, without a flush between them."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helixpipe.cli.model import ModelOptions, make_plan
from helixpipe.common.errors import ScheduleError
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.costs.hardware import GIB, HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Layout, find_model
from helixpipe.lowering.lower import lower
from helixpipe.planning.memory.early import peak_memory, recomputes
from helixpipe.planning.order.chunk_options import ChunkOptions
from helixpipe.planning.order.grouping import NEGLIGIBLE
from helixpipe.planning.setup import Setup
from helixpipe.program.costs import Work
from helixpipe.program.program import Program
from helixpipe.program.workload import Workload
from helixpipe.simulate.simulator import Simulation, simulate
from schedules import Shape, build
from schedules.infinipipe import InfinipipeOptions
from schedules.zero_bubble import ZeroBubbleOptions
from tests.lowering.ragged import equal_chains, random_chains

COSTS = PieceTimes()
"""F takes as long as the chunk's share of a microbatch, B twice that."""


def run(program: Program) -> Simulation:
    return simulate(lower(program, COSTS), COSTS)


def infinipipe(shape: Shape, **given: Any) -> Program:
    """Its own order, without split backwards unless they are asked for."""
    return build("infinipipe", shape, InfinipipeOptions(**{"infinipipe_zb": False, **given}))


def in_chunks(simulation: Simulation, figure: float, tokens: int = 8) -> float:
    """In forwards of a chunk, or in chunks' activations."""
    mean = simulation.lowered.program.workload.mean_tokens
    assert mean is not None
    return figure * mean / tokens


@pytest.mark.parametrize(
    ("p", "m", "k", "lengths"), [(1, 3, 2, None), (2, 4, 1, None), (4, 6, 3, (5, 4, 3)), (3, 2, 5, None)]
)
def test_microbatches_that_are_all_alike_run_as_in_seq1f1b(
    p: int, m: int, k: int, lengths: tuple[int, ...] | None
) -> None:
    shape = Shape(p, m, p, chunks=k, chunk_lengths=lengths)
    assert infinipipe(shape).ranks == build("seq1f1b", shape).ranks


def test_without_groups_chains_run_as_in_seq1f1b() -> None:
    shape = Shape(3, 6, 3, ragged=equal_chains((1, 3, 1, 2, 4, 1)))
    assert infinipipe(shape, infinipipe_grouping=False).ranks == build("seq1f1b", shape).ranks


@pytest.mark.parametrize("p", [2, 4, 8])
def test_changes_of_groups_cost_nothing(p: int) -> None:
    """Bubble (p-1)(F+B) of a chunk once a step, and each group keeps a(p-r-1) + N chunks on rank r."""
    counts = (1,) * 10 + (6,) * 2 + (2,) * 4 + (3,) * 3 + (1,) * 9
    result = run(infinipipe(Shape(p, len(counts), p, ragged=equal_chains(counts))))
    assert in_chunks(result, result.bubble_time) == pytest.approx((p - 1) * 3)
    assert in_chunks(result, max(result.peak_activation)) == pytest.approx(p - 1 + 6)
    ungrouped = run(infinipipe(Shape(p, len(counts), p, ragged=equal_chains(counts)), infinipipe_grouping=False))
    kept = [sum(most_kept(each, 28)) for each in (result, ungrouped)]
    assert kept[0] < kept[1]


def most_kept(simulation: Simulation, last: int) -> list[int]:
    """The most units that each rank keeps while the last so many forwards of its order run."""
    found = []
    for ops in simulation.lowered.program.ranks:
        kept, counts = 0, []
        for op in ops:
            kept += 1 if op.kind == "F" else -1
            counts.append((op.kind, kept))
        found.append(max([kept for kind, kept in counts if kind == "F"][-last // 2 :]))
    return found


def test_the_longest_chains_come_first_and_slower_chunks_before_faster() -> None:
    def order(program: Program) -> list[int]:
        return [op.microbatch for op in program.ranks[0] if op.kind == "F" and op.chunk == 0]

    workload = Workload(sum((equal_chains((count,), tokens).microbatches for count, tokens in CHAINS), ()))
    workload = Workload(
        tuple(
            tuple(tuple(part._replace(document=number) for part in chunk) for chunk in chunks)
            for number, chunks in enumerate(workload.microbatches)
        )
    )
    shape = Shape(2, 5, 2, ragged=workload)
    assert order(infinipipe(shape)) == [3, 1, 2, 4, 0]
    assert order(infinipipe(shape, infinipipe_sort=False)) == [1, 3, 2, 0, 4]
    assert order(infinipipe(shape, infinipipe_grouping=False)) == [0, 1, 2, 3, 4]


CHAINS = ((1, 4), (3, 5), (2, 7), (3, 6), (1, 9))


def test_sorting_makes_the_bubble_smaller() -> None:
    rng = Random(1)
    shape = Shape(4, 40, 4, ragged=random_chains(rng, 40, 1, longest=40))
    bubbles = [run(infinipipe(shape, infinipipe_sort=sort)).bubble_time for sort in (True, False)]
    assert bubbles[0] < 0.6 * bubbles[1]


def test_more_ahead_idles_less_and_keeps_more() -> None:
    shape = Shape(4, 12, 4, ragged=random_chains(Random(2), 12, 5))
    one, two = (run(infinipipe(shape, infinipipe_ahead=ahead)) for ahead in (1, 2))
    assert two.bubble_time < one.bubble_time
    assert max(two.peak_activation) > max(one.peak_activation)
    assert run(infinipipe(shape)).makespan == one.makespan
    roomy = infinipipe(replace(shape, memory_limit=1e9))
    assert run(roomy).makespan == two.makespan
    with pytest.raises(ScheduleError, match=r"^--infinipipe-ahead 0 must be at least 1\.$"):
        infinipipe(shape, infinipipe_ahead=0)


def test_it_recomputes_what_does_not_fit() -> None:
    shape = Shape(2, 8, 8, ragged=equal_chains((4, 1, 1, 3, 1, 2, 1, 1)))
    peak = max(peak_memory(infinipipe(shape), COSTS))
    limited = replace(shape, memory_limit=0.6 * peak)
    program = infinipipe(limited)
    assert program.activations and max(peak_memory(program, COSTS)) <= 0.6 * peak * (1 + 1e-6)
    grouped, one = (run(infinipipe(limited, infinipipe_grouping=grouping)) for grouping in (True, False))
    assert grouped.makespan <= one.makespan
    assert not infinipipe(limited, infinipipe_recompute=False).activations
    assert not infinipipe(replace(shape, memory_limit=peak)).activations


# ------------------------------------------------------------------------------------------------------ split backwards


class SlowHalves(PieceTimes):
    """I and W together take longer than B, as where B hides collectives behind its weight gradients."""

    def op_time(self, work: Work) -> float:
        return super().op_time(work) * (1.2 if work.kind in "IW" else 1.0)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**20),
    ranks=st.integers(1, 5),
    microbatches=st.integers(1, 7),
    most=st.integers(1, 4),
    room=st.sampled_from((None, 0.4, 0.7, 1.0, 2.0)),
    recompute=st.booleans(),
    costs=st.sampled_from((COSTS, SlowHalves())),
)
def test_split_backwards_never_make_a_step_longer(
    seed: int, ranks: int, microbatches: int, most: int, room: float | None, recompute: bool, costs: PieceTimes
) -> None:
    """The plan is valid, and within the memory wherever it is without a split; where no limit is known, within what the
    fullest rank needs without one. It is no slower than seq1f1b-zb in that memory. Nothing is recomputed where that is
    off or no limit asks for it."""
    workload = random_chains(Random(seed), microbatches, most)
    shape = Shape(ranks, microbatches, 2 * ranks, costs=costs, ragged=workload)
    if room is not None:
        shape = replace(shape, memory_limit=room * max(peak_memory(infinipipe(shape), costs)))
    plain, split = (
        lower(infinipipe(shape, infinipipe_zb=zb, infinipipe_recompute=recompute), costs) for zb in (False, True)
    )
    took, takes = (simulate(each, costs).makespan for each in (plain, split))
    assert takes <= took * (1 + 1e-12)
    assert takes < took or split.program.ranks == plain.program.ranks
    needs = [max(peak_memory(each.program, costs)) for each in (plain, split)]
    assert needs[1] <= max(needs[0], shape.memory_limit or 0.0) * (1 + 1e-9)
    assert (recompute and room is not None) or not recomputes(split.program)
    limit = needs[0] if room is None else shape.memory_limit
    zero_bubble = ZeroBubbleOptions(zb_recompute=recompute and room is not None)
    assert limit is not None
    other = lower(build("seq1f1b-zb", replace(shape, memory_limit=limit), zero_bubble), costs)
    fits = max(peak_memory(other.program, costs)) <= limit * (1 + 1e-9)
    assert not fits or takes <= simulate(other, costs).makespan * (1 + NEGLIGIBLE)


@settings(max_examples=4)
@example(counts=[2] * 4, tokens=4096, ranks=2, room=None)
@given(
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    tokens=st.integers(1024, 8192),
    ranks=st.sampled_from((2, 4)),
    room=st.sampled_from((None, 0.9)),
)
def test_split_backwards_recompute_nothing_where_that_is_off(
    counts: list[int], tokens: int, ranks: int, room: float | None
) -> None:
    costs = ModelCosts(find_model("llama2-7b"), HARDWARE["h100"], Layout(), 8192)
    shape = Shape(ranks, len(counts), 32, costs=costs, ragged=equal_chains(tuple(counts), tokens))
    if room is not None:
        shape = replace(shape, memory_limit=room * max(peak_memory(infinipipe(shape), costs)))
    assert not recomputes(infinipipe(shape, infinipipe_zb=True, infinipipe_recompute=False))


def test_what_a_split_costs_decides_how_many_backwards_are_split() -> None:
    """All, where the halves take no longer than the whole; else the last of each rank, whose W fill what it idles."""
    shape = Shape(4, 40, 8, ragged=equal_chains((4, 3) * 5 + (1,) * 30))
    kinds = [op.kind for ops in infinipipe(shape, infinipipe_zb=True).ranks for op in ops]
    assert "B" not in kinds and "W" in kinds
    slow = replace(shape, costs=SlowHalves())
    program = infinipipe(slow, infinipipe_zb=True)
    for ops in program.ranks:
        backwards = [op.kind for op in ops if op.kind in "BI"]
        assert backwards == sorted(backwards) and {"B", "I"} <= set(backwards)
    took, takes = (simulate(lower(each, slow.costs), SlowHalves()).makespan for each in (infinipipe(slow), program))
    assert takes < took


def test_split_backwards_keep_the_recomputation_and_the_memory_limit() -> None:
    shape = Shape(4, 12, 16, ragged=random_chains(Random(5), 12, 4))
    limit = 0.6 * max(peak_memory(infinipipe(shape), COSTS))
    program = infinipipe(replace(shape, memory_limit=limit), infinipipe_zb=True)
    assert program.activations and any(op.kind == "W" for ops in program.ranks for op in ops)
    assert max(peak_memory(program, COSTS)) <= limit * (1 + 1e-9)


def test_stages_that_seq1f1b_zb_recomputes_are_recomputed() -> None:
    """Where its order, which fits for that reason, is the fastest."""
    shape = Shape(4, 8, 8)
    limited = replace(shape, memory_limit=0.7 * max(peak_memory(infinipipe(shape), COSTS)))
    program, other = infinipipe(limited, infinipipe_zb=True), build("seq1f1b-zb", limited)
    assert any(stage.recompute for stage in program.stages)
    assert max(peak_memory(program, COSTS)) <= limited.memory_limit * (1 + 1e-9)  # type: ignore[operator]
    assert run(program).makespan == run(other).makespan < run(infinipipe(limited)).makespan


def test_split_backwards_fit_as_they_run_with_weights_in_parts() -> None:
    """Stages are then single layers, whose cuts keep more between I and W than whole stages do."""
    options = ModelOptions(
        model="llama2-13b",
        hardware="h100",
        nodes=4,
        seq_length=32768,
        context_parallel=4,
        global_batch_size=64,
        network_bandwidth=25,
        network_adapters=1,
        data_parallel_sharding_strategy="optim_grads_params",
    )
    plan = make_plan(options, 4, None, None)
    assert plan is not None
    costs, limit = plan.costs, 70 * GIB
    lengths = ChunkOptions().resolve(4, costs, plan.layers, costs.seq_length, costs.layout.tensor_parallel)
    setup = Setup(4, plan.layers, costs, memory_limit=limit, sharded=costs.sharded)
    shape = setup.shape(plan.microbatches, 4, chunk_lengths=lengths)
    program = build("infinipipe", shape, InfinipipeOptions())
    assert any(op.kind == "W" for ops in program.ranks for op in ops)
    assert max(peak_memory(program, costs)) <= limit * (1 + 1e-9)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.8])
def test_no_rank_with_weights_in_parts_is_over_the_limit(part: float) -> None:
    """Which are cut layer by layer, and keep what crosses these cuts; and not all layers are recomputed for it."""
    model = replace(find_model("weipipe-1024"), layers=16, seq_length=16384)
    costs = ModelCosts(model, HARDWARE["a100-80"], Layout(), 16384, 2, True, shards_weights=True)

    def built(limit: float | None) -> Program:
        setup = Setup(2, 16, costs, memory_limit=limit, sharded=2)
        return build("infinipipe", setup.shape(6, 4), InfinipipeOptions(infinipipe_zb=False))

    most, least = (max(peak_memory(built(limit), costs)) for limit in (None, 0.0))
    limit = least + part * (most - least)
    program = built(limit)
    assert max(peak_memory(program, costs)) <= limit * (1 + 1e-8)
    layers = sum(bool(program.activations_of(unit).recompute) for unit in program.units())
    assert 0 < layers < 6 * 4 * 16
