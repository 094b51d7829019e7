"""Multiplexed sequence partition on paper: the paper's teams, what they gain for nothing, what transfers take of it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from benchmarks.multiplex import multiplexed, teams
from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.lower import lower
from helixpipe.simulate.simulator import simulate
from schedules import Shape, build


@dataclass
class Times:
    """F = 1 and B = 2 of each chunk; what travels takes so long."""

    hidden: float = 0.0
    kv: float = 0.0
    kv_gradient: float = 0.0
    weight: float = 0.0
    weight_gradient: float = 0.0

    def op_time(self, kind: str, stage: int, chunk: int, team: int) -> float:
        return {"F": 1.0, "B": 2.0}[kind] / team

    def activation(self, chunk: int) -> float:
        return self.hidden

    def keys_values(self, stage: int, chunk: int, gradients: bool) -> float:
        return self.kv_gradient if gradients else self.kv

    def weights(self, stage: int, gradients: bool) -> float:
        return self.weight_gradient if gradients else self.weight


def test_the_papers_teams() -> None:
    """Table 3 of SPPO: p = 4, N = 8."""
    found = {unit: team for unit, team in teams(4, 8, True, True).items() if len(team) > 1}
    assert found == {
        **{(0, chunk): (0, 1, 2, 3) for chunk in (0, 1, 2)},
        **{(1, chunk): (1, 2, 3) for chunk in (0, 1)},
        (1, 7): (0, 1),
        (2, 0): (2, 3),
        **{(2, chunk): (0, 1, 2) for chunk in (6, 7)},
        **{(3, chunk): (0, 1, 2, 3) for chunk in (5, 6, 7)},
    }
    assert all(team == (stage,) for (stage, _), team in teams(4, 8, False, False).items())


@pytest.mark.parametrize(("p", "n"), [(1, 1), (2, 3), (4, 8), (8, 32)])
def test_alone_it_is_terapipe(p: int, n: int) -> None:
    costs = PieceTimes({"mlp": n}, message=0.25)
    step = simulate(lower(build("terapipe", Shape(p, 1, p, n)), costs), costs)
    outcome = multiplexed(Times(hidden=0.25), p, n, left=False, right=False)
    assert outcome.makespan == pytest.approx(step.makespan)
    assert outcome.busy == pytest.approx(step.busy)


@pytest.mark.parametrize(("p", "n", "left", "both"), [(4, 8, 5.75, 2.0), (4, 16, 5.75, 2.0), (8, 32, 15.85, 9.24)])
def test_for_nothing_it_takes_most_of_the_bubble(p: int, n: int, left: float, both: float) -> None:
    assert multiplexed(Times(), p, n, right=False).bubble == pytest.approx(left, abs=5e-3)
    assert multiplexed(Times(), p, n).bubble == pytest.approx(both, abs=5e-3)
    assert sum(multiplexed(Times(), p, n).busy) == pytest.approx(3 * n * p)


def test_two_ranks_and_two_chunks_by_hand() -> None:
    """Stage 0 runs chunk 0 on both ranks, stage 1 chunk 1. F of 0.0 ends at 0.5, then 0.1 and 1.0 to 1.5, 1.1 to 2; its
    B to 3, then 0.1 and 1.0 to 5, 0.0 on both ranks to 6."""
    assert multiplexed(Times(), 2, 2).makespan == 6.0
    assert multiplexed(Times(weight=0.75), 2, 2).makespan == 6.75  # nothing hides the first stage's
    assert multiplexed(Times(weight_gradient=0.75), 2, 2).makespan == 6.75  # nor its gradients
    # F of 0.0 exchanges for 0.2; keys and values of 1.0, done at 1.7, are with rank 0 at 2.1; F of 1.1 ends at 2.8.
    assert multiplexed(Times(kv=0.4), 2, 2).makespan == pytest.approx(6.8)
    # B of 1.1 exchanges until 3.2; its part for 1.0 is back at 3.6, B of 1.0 ends at 5.6, as comes what 0.1, done at
    # 5.2, has for 0.0, whose B exchanges for 0.2.
    assert multiplexed(Times(kv_gradient=0.4), 2, 2).makespan == pytest.approx(6.8)


def test_a_rank_sends_one_message_at_a_time() -> None:
    """Weights of three stages pass rank 2 on their way: the last is there after three times as long."""
    slow = multiplexed(Times(weight=10.0), 4, 8, right=False).makespan
    assert slow == pytest.approx(multiplexed(Times(), 4, 8, right=False).makespan + 30 - 2, abs=2)
