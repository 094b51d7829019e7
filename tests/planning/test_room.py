"""The room that solvers leave beside what units keep."""

from __future__ import annotations

import pytest

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.bound import BoundCosts
from helixpipe.planning.memory.room import beside_units
from helixpipe.program.costs import Contents
from helixpipe.program.program import Program
from helixpipe.program.stages import even_stages
from helixpipe.program.workload import uniform


class Sized(PieceTimes):
    """A token of workspace weighs 1, recomputed 10, an activation at a cut 100, a gradient 1000, what units keep no end
    of it."""

    def size(self, contents: Contents) -> float:
        weights = {"workspace": 1.0, "recomputed": 10.0, "activation": 100.0, "gradient": 1000.0}
        return weights.get(contents.kind, 1e9) * sum(part.tokens for part in contents.extents)


@pytest.mark.parametrize(
    ("stages", "room"),
    [
        ([0], 1111),  # an activation goes out, its gradient comes in
        ([1], 2211),
        ([2], 1111),
        ([0, 2], 1111),  # an op at a time
        ([0, 1], 2211),
    ],
)
def test_room_is_what_is_around_an_op(stages: list[int], room: float) -> None:
    program = Program("test", even_stages(3, 3), ((),) * 3, uniform(2))
    assert beside_units(BoundCosts(program, Sized()), stages) == room


def test_the_largest_chunk_counts() -> None:
    program = Program("test", even_stages(1, 1), ((),), uniform(1, 3, (2, 5, 1)))
    assert beside_units(BoundCosts(program, Sized()), [0]) == 5 * 11
