"""HelixPipe: heads that are spread over the ranks, and where they run."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, Layout
from helixpipe.lowering.lower import lower
from helixpipe.program.program import Op
from helixpipe.program.stages import LAYER_PIECES, Piece
from helixpipe.simulate.memory import rank_memory
from helixpipe.simulate.simulator import simulate
from schedules import Shape, build
from schedules.helix import SHIPPED, HelixOptions
from tests.costs.asking import op_time
from tests.schedules.test_helix import INSIDE, run

# --------------------------------------------------------------------------------------------------------------- heads


@settings(max_examples=60)
@given(
    shape=st.tuples(st.integers(2, 5), st.integers(1, 2), st.integers(1, 3)),
    times=st.fixed_dictionaries({kind: st.integers(0, 20) for kind in (*LAYER_PIECES, "head")}),
    recompute=st.booleans(),
    ship=st.sampled_from(["none", "qkv", "attention"]),
)
def test_heads_that_are_spread_lengthen_no_bubble(
    shape: tuple[int, int, int], times: dict[str, float], recompute: bool, ship: Literal["none", "qkv", "attention"]
) -> None:
    """However long: with one fold the bubble stays 3(p-1) combined stages and (p-1) times what is recomputed of one.
    On one rank each head keeps all others waiting, but for what may overlap the bubble."""
    p, rounds, loops = shape
    m = p * loops
    combined = [time for kind, time in times.items() if kind not in SHIPPED[ship] | {"head"}]
    again = sum(combined) - (times["proj"] if "proj" not in SHIPPED[ship] else 0)
    bubble = (p - 1) * (3 * sum(combined) + recompute * again)
    spread, alone = (
        run(p, m, p * rounds, HelixOptions(1, ship, recompute, helix_spread_head=each), times=times).bubble_time
        for each in (True, False)
    )
    assert spread == bubble
    heads = m * (p - 1) / p * 3 * times["head"]
    assert heads - bubble <= alone - spread <= heads + 1e-9


@pytest.mark.parametrize(("p", "folds"), [(3, 2), (4, 2), (8, 2), (4, 3), (8, 3)])
def test_rank_0_gives_heads_away_where_that_is_faster(p: int, folds: int) -> None:
    """It does so, all but the very last, where the MLPs that it alone runs between forwards and backwards take longer
    than rank 1's heads, and not where heads take much longer than layers."""
    m = p * folds
    for head, gives in ((1.0, True), (100.0, False)):
        costs = PieceTimes({"attn": 3.0, "mlp": 2.0, "head": head})
        program = build("helix", Shape(p, m, p, costs=costs, recompute=INSIDE), HelixOptions(folds))
        own = [[op.microbatch for op in ops if op.stage == 2 * p + 1 and op.kind == "F"] for ops in program.ranks]
        assert own[0] == ([m - 1] if gives else list(range(m - 1, m - folds - 1, -1)))
        assert len(own[1]) == (2 * folds - 1 if gives else folds)
        assert all(len(microbatches) == folds for microbatches in own[2:])


def test_heads_of_a_large_model() -> None:
    """7B at 128k tokens on 64 H20: fifteen of sixteen heads no longer keep the other ranks waiting."""
    costs = ModelCosts(MODELS["helix-7b"], HARDWARE["h20"], Layout(8, True), 131072)
    shape = Shape(8, 16, 32, costs=costs)
    alone, spread = (
        simulate(lower(program, costs), costs)
        for program in (build("helix", shape, HelixOptions(2, "attention", helix_spread_head=s)) for s in (False, True))
    )
    last = len(spread.lowered.program.stages) - 1
    head = sum(op_time(costs, spread.lowered.program, Op(kind, last, 0)) for kind in "FB")
    assert alone.makespan - spread.makespan == pytest.approx(15 * head, rel=0.01)
    assert alone.makespan / spread.makespan > 1.05


def test_every_rank_has_a_head() -> None:
    """Its weights, gradients and optimizer state, and the logits of the one microbatch it works on."""
    costs = ModelCosts(MODELS["llama2-7b"], HARDWARE["h20"], Layout(8, True), 32768)
    for spread in (False, True):
        program = build("helix", Shape(4, 8, 32, costs=costs), HelixOptions(2, "none", helix_spread_head=spread))
        held = [Piece("head") in program.pieces_of_rank(rank) for rank in range(4)]
        assert held == ([True] * 4 if spread else [True, False, False, False])
        assert [program.copies(rank) for rank in range(4)] == [
            {Piece("head"): rank} if spread else {} for rank in range(4)
        ]
        ranks = [rank_memory(lower(program, costs), costs, rank) for rank in range(4)]
        layers = costs.bytes.parameters([piece for piece in program.pieces_of_rank(2) if piece.kind != "head"])
        head = costs.bytes.parameters([Piece("head")])
        own = layers + head * spread
        assert (ranks[2].weights, ranks[2].gradients, ranks[2].optimizer) == (2 * own, 4 * own, 12 * own)
    assert build("helix", Shape(1, 2, 2)).stages[-1].placement == "resident"
