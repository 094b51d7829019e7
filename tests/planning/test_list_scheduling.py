"""The rules of list scheduling under a memory limit."""

from __future__ import annotations

import pytest

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.planning.order.list_scheduling import Rules, greedy
from helixpipe.planning.order.problem import problem
from helixpipe.program.costs import Contents
from helixpipe.program.stages import even_stages
from helixpipe.program.workload import uniform


class Deferring(PieceTimes):
    """A unit keeps 1 from F to I, and 3 from I to W."""

    def size(self, contents: Contents) -> float:
        return {"saved": 1.0, "deferred": 3.0}.get(contents.kind, 0.0)


@pytest.mark.parametrize("inflight", [1, 2, 3])
def test_forwards_leave_room_for_what_an_input_backward_adds(inflight: int) -> None:
    given = problem("test", even_stages(4, 4), tuple(range(4)), uniform(8), inflight, Deferring())
    assert given.limit == (inflight + 2,) * 4
    found = greedy(given, Rules((("I", 0), ("F", 0))))
    assert found is not None and found.memory == pytest.approx(1)
