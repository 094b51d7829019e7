"""Recomputation by stage and chunk: against brute force, and against the memory sweep."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csc_array

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.costs.hardware import find_hardware
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import Layout, find_model
from helixpipe.planning.memory.chunk_recompute import Estimates, recompute_chunks
from helixpipe.planning.memory.early import peak_memory
from helixpipe.planning.memory.integer_program import Covering, lowered, solve
from helixpipe.planning.memory.recompute_needs import LayerSizes, layer_runs
from helixpipe.program.program import Program
from helixpipe.program.stages import Activations
from schedules import Shape, build
from schedules.infinipipe import InfinipipeOptions
from tests.lowering.ragged import equal_chains, random_chains

COSTS = PieceTimes({"mlp": 1.0, "attn": 0.3})
EQUAL = PieceTimes()
"""Layers of chunks of equally many tokens take equally long."""


def random_covering(rng: Random) -> Covering:
    """Windows of neighbours, as of a pipeline's memory."""
    size, most = rng.randint(1, 5), rng.randint(1, 3)
    rows = []
    for _ in range(rng.randint(1, 6)):
        start = rng.randrange(size)
        inside = range(start, min(size, start + rng.randint(1, 3)))
        rows.append([rng.uniform(0.5, 1.5) if at in inside else 0.0 for at in range(size)])
    need = [rng.uniform(0, 1.1) * most * sum(row) for row in rows]
    weights = np.array([rng.uniform(0.5, 2) for _ in range(size)])
    return Covering(csc_array(np.array(rows)), np.array(need), np.full(size, float(most)), weights)


def test_the_integer_program_against_brute_force() -> None:
    rng, found = Random(0), 0
    for _ in range(60):
        covering = random_covering(rng)
        choices = (np.array(each) for each in product(*(range(int(most) + 1) for most in covering.most)))
        best = min((covering.objective(each) for each in choices if covering.covers(each)), default=None)
        exact, rounded = solve(covering), solve(covering, exact=False)
        if best is None or exact is None or rounded is None:
            assert best is None and exact is None and rounded is None
            continue
        found += 1
        for solution in (exact, rounded):
            assert covering.covers(solution.values) and (solution.values <= covering.most).all()
            assert np.array_equal(solution.values, np.rint(solution.values))
            assert solution.objective == pytest.approx(covering.objective(solution.values))
            assert solution.bound <= best * (1 + 1e-6)
        assert best * (1 - 1e-9) <= exact.objective <= best * 1.011
        assert exact.objective <= rounded.objective
    assert found > 30


def test_nothing_to_cover_and_nothing_found_in_time() -> None:
    covering = random_covering(Random(4))
    free = Covering(covering.matrix, covering.need * 0, covering.most, covering.weights)
    solution = solve(free)
    assert solution is not None and not solution.values.any() and solution.gap == 0
    hard = Covering(covering.matrix, covering.matrix @ covering.most * 0.5, covering.most, covering.weights)
    late = solve(hard, time_limit=0.0)
    assert late is not None and hard.covers(late.values)


def test_numbers_are_lowered_as_far_as_the_others_allow() -> None:
    """Those first that are furthest above what is wanted."""
    covering = Covering(
        csc_array([[1.0, 1.0, 1.0], [0.0, 0.0, 2.0]]), np.array([2.5, 1.0]), np.full(3, 3.0), np.ones(3)
    )
    assert lowered(covering, np.array([3.0, 3.0, 3.0]), np.array([2.0, 0.0, 1.0])).tolist() == [2.0, 0.0, 1.0]
    assert lowered(covering, np.array([0.0, 0.0, 1.0]), np.array([1.0, 1.0, 1.0])).tolist() == [0.0, 0.0, 3.0]


def limited(program: Program, part: float) -> float:
    """A limit between what the program needs with all layers recomputed, and without."""
    most = max(peak_memory(program, COSTS))
    least = max(peak_memory(recompute_chunks(program, COSTS, 0.0).program, COSTS))
    return least + part * (most - least)


@settings(max_examples=12)
@given(
    name=st.sampled_from(["seq1f1b", "seq1f1b-zb", "terapipe", "seq1f1b-interleaved", "infinipipe"]),
    p=st.integers(1, 3),
    m=st.integers(1, 5),
    part=st.floats(0.05, 0.95),
    seed=st.integers(0, 2**32),
)
def test_every_rank_is_within_the_limit(name: str, p: int, m: int, part: float, seed: int) -> None:
    """Of random ragged programs, by the memory sweep; with one layer less somewhere it is still the same program."""
    program = build(name, Shape(p, m, 6 * p, ragged=random_chains(Random(seed), m, 4)))
    limit = limited(program, part)
    found = recompute_chunks(program, COSTS, limit)
    assert found.fits and max(peak_memory(found.program, COSTS)) <= limit * (1 + 1e-8)
    assert found.program.ranks == program.ranks
    for unit, count in found.layers.items():
        assert len(found.program.activations[unit].recompute) == count


def test_no_layer_is_recomputed_for_nothing() -> None:
    """One layer less of any unit, and its rank is over the limit."""
    program = build("seq1f1b", Shape(3, 5, 9, ragged=equal_chains((3, 1, 2, 1, 1))))
    limit = limited(program, 0.3)
    found = recompute_chunks(program, COSTS, limit)
    assert found.layers and found.solution is not None
    for unit, count in found.layers.items():
        fewer = Activations(found.program.activations[unit].recompute[: count - 1])
        changed = replace(found.program, activations={**found.program.activations, unit: fewer})
        assert max(peak_memory(changed, COSTS)) > limit


def test_the_least_of_all_that_fit() -> None:
    """Of a tiny program, against every choice of its diagonals, each tried by the memory sweep."""
    program = build("seq1f1b", Shape(2, 2, 6, ragged=equal_chains((2, 1))))
    diagonals = {
        op.unit: place + 1 - rank
        for rank, ops in enumerate(program.ranks)
        for place, op in enumerate(op for op in ops if op.kind == "B")
    }
    layers = [
        [stage.pieces[at : at + 5] for at in range(rank == 0, 15, 5)] for rank, stage in enumerate(program.stages)
    ]
    for part in (0.1, 0.3, 0.5, 0.7, 0.9):
        limit = limited(program, part)

        def fits(counts: tuple[int, ...], limit: float = limit) -> bool:
            chosen = {unit: Activations(tuple(layers[unit.stage][: counts[at]])) for unit, at in diagonals.items()}
            return max(peak_memory(replace(program, activations=chosen), EQUAL)) <= limit

        least = min(sum(counts) for counts in product(range(4), repeat=4) if fits(counts))
        found = recompute_chunks(program, EQUAL, limit)
        assert found.solution is not None and found.solution.objective == pytest.approx(least)


def test_all_layers_where_nothing_fits_and_none_where_all_does() -> None:
    program = build("seq1f1b", Shape(2, 3, 8, chunks=2))
    nothing = recompute_chunks(program, COSTS, 0.0)
    assert not nothing.fits and set(nothing.layers.values()) == {4} and len(nothing.layers) == 12
    everything = recompute_chunks(program, COSTS, 1e9)
    assert everything.fits and everything.program is program and not everything.layers


def test_estimates_are_near_what_is_found() -> None:
    shape = Shape(3, 8, 24, ragged=equal_chains((4, 1, 1, 3, 1, 2, 1, 1)))
    program = build("infinipipe", shape, InfinipipeOptions(infinipipe_zb=False))
    limit = limited(program, 0.4)
    estimates = Estimates(program, COSTS, LayerSizes())
    least, found = estimates.least(program, limit), recompute_chunks(program, COSTS, limit)
    assert found.solution is not None and estimates.recomputation(program, limit).fits
    assert 0 < least == pytest.approx(found.time, rel=0.1)
    assert estimates.least(program, 1e9) == 0


def test_estimates_count_what_graphs_hold() -> None:
    """Below what ranks need with their graphs, layers are recomputed, and about as many as are found."""
    costs = ModelCosts(find_model("llama2-7b"), find_hardware("h100"), Layout(cuda_graphs="auto"), 8192)
    eager = replace(costs, layout=Layout())
    program = build("seq1f1b", Shape(4, 8, 32, 4))
    needs = [max(peak_memory(program, each)) for each in (eager, costs)]
    limit = sum(needs) / 2
    estimates, without = (Estimates(program, each, LayerSizes()) for each in (costs, eager))
    assert (
        without.fits(program, limit) and not estimates.fits(program, limit) and estimates.fits(program, 1.05 * needs[1])
    )
    estimated, found = estimates.recomputation(program, limit), recompute_chunks(program, costs, limit)
    counts = [{unit.stage: count for unit, count in each.layers.items()} for each in (estimated, found)]
    assert estimated.fits and 0 < estimates.least(program, limit) == estimated.time
    assert counts[1] and all(abs(counts[0].get(stage, 0) - counts[1].get(stage, 0)) <= 2 for stage in range(4))


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("seq1f1b", 4)])
def test_units_in_graphs_recompute_alike(name: str, chunks: int) -> None:
    """As few layers as keeps a rank to a limit just below its need, and not those of all ranks."""
    costs = ModelCosts(find_model("llama2-7b"), find_hardware("h100"), Layout(cuda_graphs="auto"), 8192)
    program = build(name, Shape(4, 8, 32, chunks))
    limit = 0.95 * max(peak_memory(program, costs))
    chosen = recompute_chunks(program, costs, limit)
    assert chosen.fits and max(peak_memory(chosen.program, costs)) <= limit
    counts = dict({(unit.stage, layers) for unit, layers in chosen.layers.items()})
    assert counts and set(counts) < set(range(4)) and len(chosen.layers) == len(counts) * 8 * chunks
    for stage, count in counts.items():
        activations = Activations(layer_runs(program)[stage][: count - 1])
        fewer = {unit: activations for unit in chosen.layers if unit.stage == stage}
        less = replace(chosen.program, activations={**chosen.program.activations, **fewer})
        assert peak_memory(less, costs)[stage] > limit
