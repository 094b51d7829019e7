"""Multiplexed chunks: the bubble that is left where transfers are free, the parts of chunks, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from helixpipe.common.errors import ScheduleError
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.costs.hardware import HARDWARE
from helixpipe.costs.model_costs import ModelCosts
from helixpipe.costs.models import MODELS, Layout
from helixpipe.lowering.lower import lower
from helixpipe.planning.order.chunk_lengths import chunk_times
from helixpipe.planning.order.multiplexed import team
from helixpipe.program.stages import Stage, model_pieces
from helixpipe.simulate.simulator import Simulation, simulate
from schedules import Shape, build
from schedules.sppo import SppoOptions

EQUAL = PieceTimes({"qkv": 0.5, "mlp": 0.5})  # F = 1, B = 2 a layer; chunks of equal time


def run(p: int, chunks: int, way: Any) -> Simulation:
    program = build("sppo", Shape(p, 1, p, chunks, costs=EQUAL), SppoOptions(sppo_multiplex=way))
    return simulate(lower(program, EQUAL), EQUAL)


@pytest.mark.parametrize(
    ("p", "left", "both"), [(2, 1.5, 0.0), (3, 4.0, 1.0), (4, 6.375, 1.875)], ids=["p2", "p3", "p4"]
)
def test_the_bubble_that_is_left(p: int, left: float, both: float) -> None:
    """In chunks: 3 (p - 1) without. With p = 4 and both ends 9 become less than 2."""
    for chunks in (2 * p, 3 * p):
        unit = 1 / chunks
        assert run(p, chunks, "off").bubble_time == pytest.approx(3 * (p - 1) * unit)
        assert run(p, chunks, "left").bubble_time == pytest.approx(left * unit)
        assert run(p, chunks, "both").bubble_time == pytest.approx(both * unit)


def test_teams_are_those_of_the_paper() -> None:
    """Table 3: p = 4, N = 8."""
    found = {(stage, chunk): team(4, 8, stage, chunk, True, True) for stage in range(4) for chunk in range(8)}
    teams = {place: members for place, members in found.items() if len(members) > 1}
    everyone = (0, 1, 2, 3)
    assert teams == {
        **{(0, chunk): everyone for chunk in (0, 1, 2)},
        **{(1, chunk): (1, 2, 3) for chunk in (0, 1)},
        (1, 7): (0, 1),
        (2, 0): (2, 3),
        **{(2, chunk): (0, 1, 2) for chunk in (6, 7)},
        **{(3, chunk): everyone for chunk in (5, 6, 7)},
    }


def test_the_parts_of_a_chunk_take_equally_long() -> None:
    costs = ModelCosts(MODELS["sppo-7b"], HARDWARE["a100-80"], Layout(8, True), 262144)
    lengths = (131072, 65536, 40960, 24576)
    shape = Shape(4, 1, 4, 4, chunk_lengths=lengths, costs=costs)
    parts = build("sppo", shape, SppoOptions(sppo_multiplex="left")).workload.tokens(0)
    assert sum(parts[:4]) == lengths[0] and sum(parts[4:8]) == lengths[1] and parts[-1] == lengths[3]
    assert all(length % 64 == 0 for length in parts)
    times = chunk_times(costs, (Stage(model_pieces(4)[1:-1]),), tuple(map(int, parts)))
    assert max(times[:4]) < 1.1 * min(times[:4])
    assert parts[0] > 1.5 * parts[3]


def test_what_is_refused() -> None:
    shape = Shape(2, 3, 2, 4, costs=EQUAL)
    with pytest.raises(ScheduleError, match=r"^--sppo-multiplex needs steps of one microbatch and not 3; "):
        build("sppo", shape, SppoOptions(sppo_multiplex="left"))
    with pytest.raises(ScheduleError, match=r"^--sppo-multiplex cuts a chunk of 1 tokens into 2 parts of at least 1; "):
        build("sppo", Shape(2, 1, 2, 2, chunk_lengths=(1, 5)), SppoOptions(sppo_multiplex="left"))
    alone = build("sppo", Shape(1, 1, 2, 4), SppoOptions(sppo_multiplex="both"))
    assert alone == build("sppo", Shape(1, 1, 2, 4), SppoOptions())
