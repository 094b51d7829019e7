"""All ranks switch to the same plan before the same step, and back; nobody does where one does not hold it."""

from __future__ import annotations

import operator
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from helixpipe.adapt import adaptation as module
from helixpipe.adapt.adaptation import Adaptation
from helixpipe.adapt.lead import Options, Place, SentPlan, digest
from helixpipe.adapt.live import load
from helixpipe.adapt.replan import PlannerAnswer, Situation, replan
from helixpipe.planning.plan import Plan, make_plan
from helixpipe.program.stages import layers_of
from tests.adapt.paper_steps import BASE, RANKS, STEP, program, reports, true_costs
from tests.adapt.test_replan import candidates

SLOW = {(1, 2): 6.0, (2, 1): 6.0}
PATIENCE = 20.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL", 0.005)
    monkeypatch.setattr("helixpipe.adapt.replan.MOST_ORDERS", 200)


class HerePlanner:
    """Plans when it is asked."""

    def announce(self, size: Situation) -> None: ...

    def plan(self, size: Situation, give_up: Callable[[], bool] | None = None) -> PlannerAnswer:
        return PlannerAnswer(replan(size, candidates))

    def close(self) -> None: ...


@dataclass
class Run:
    """Ranks of one process that share a store. running: the plan of each. steps: with the number of its plan."""

    options: Options
    lines: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    layers: int = RANKS

    def __post_init__(self) -> None:
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        self.own = make_plan(program("zb1p", layers=self.layers), BASE)
        self.running: list[Plan] = [self.own] * RANKS
        self.ranks = [
            Adaptation(
                self.own,
                Place(rank, RANKS, 0, 1),
                self.options,
                store,
                HerePlanner,
                partial(operator.setitem, self.running, rank),
                self.lines.append,
            )
            for rank in range(RANKS)
        ]

    def step(
        self, number: int, links: dict[tuple[int, int], float] | None = None, ranks: dict[int, float] | None = None
    ) -> None:
        plan = self.running[0]
        numbers = {each.number for each in self.ranks}
        assert len(numbers) == 1 and len({id(each.program) for each in self.running}) <= RANKS
        self.numbers.append(numbers.pop())
        ready = sum(each.ready for each in self.ranks)  # without a plan that this step's reports lead to
        if self.ranks[0].due(number, plan.lowered):
            own = reports(plan.lowered, true_costs(plan.program, ranks, links), number)
            for rank, each in enumerate(self.ranks):
                each.report(replace(own[rank], plan=each.number))
            lead = self.ranks[0]._lead
            assert lead is not None
            until = time.monotonic() + PATIENCE
            while lead.taken < number:
                assert time.monotonic() < until, f"step {number} was not taken in"
                time.sleep(0.002)
        for each in self.ranks:
            each.settle(ready, number)

    def wait_until_ready(self, *ranks: int) -> None:
        until = time.monotonic() + PATIENCE
        while not all(self.ranks[rank].ready for rank in ranks):
            assert time.monotonic() < until, self.lines
            time.sleep(0.002)

    def until_slow_is_found(self) -> int:
        """Steps until the slow link is found; returns the last."""
        for number in range(1, 21):
            self.step(number)
        for number in range(21, 31):
            self.step(number, SLOW)
            if self.lines:
                return number
        raise AssertionError("it was not found within ten steps")


@pytest.fixture
def started() -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(options: Options, layers: int = RANKS) -> Run:
        runs.append(Run(options, layers=layers))
        return runs[-1]

    yield start
    for each in runs:
        for rank in each.ranks:
            rank.close()


def test_all_switch_before_the_same_step_and_back_when_the_cause_is_gone(
    started: Callable[[Options], Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched, loads = Counter[int](), pickle.loads

    def counted(data: bytes) -> Any:
        result = loads(data)
        fetched[result.number] += isinstance(result, SentPlan)
        return result

    monkeypatch.setattr(module, "pickle", SimpleNamespace(loads=counted, dumps=pickle.dumps))
    run = started(Options(STEP, "auto", folder=tmp_path, steps=100))
    last = run.until_slow_is_found()
    run.wait_until_ready(*range(RANKS))
    assert run.running == [run.own] * RANKS
    run.step(last + 1, SLOW)
    assert all(each.program == run.running[0].program != run.own.program for each in run.running)
    assert all(each.lowered.streams == run.running[0].lowered.streams for each in run.running)
    assert "rank 1's link to rank 2 is at 0.17 of its speed" in run.lines[0]
    assert f"from iteration {last + 2} on: " in run.lines[-1]
    for number in range(last + 2, 50):
        run.step(number, SLOW)
    assert set(run.numbers[last + 1 :]) == {1}
    for number in range(50, 70):
        run.step(number)
        if "losses equal" in run.lines[-1]:
            run.wait_until_ready(*range(RANKS))
    assert [each.program for each in run.running] == [run.own.program] * RANKS and run.ranks[0].number == 2
    live = load(tmp_path)
    assert live.step == 68 and live.steps == 100 and not live.slow and live.cost == 1.0
    assert live.lines == run.lines and live.plan == "the run's own order"
    assert sum("losses equal to the digit" in line for line in run.lines) == 2
    assert fetched[1] == fetched[2] == RANKS  # by each rank once, whenever the next comes


def test_layers_move_right_after_a_checkpoint_and_back_when_the_cause_is_gone(
    started: Callable[..., Run],
) -> None:
    run = started(Options(STEP, "auto", steps=200, checkpoints=20, limit=1000.0), 4 * RANKS)
    slow, moves, lost = range(21, 110), [], 0
    for number in range(1, 180):
        if any("losses equal" in line for line in run.lines[-1:]):  # and no switch since
            run.wait_until_ready(*range(RANKS))
        run.step(number, ranks={1: 2.0} if number in slow else None)
        agreed = [each.agreed for each in run.ranks]
        if any(agreed) and not lost:
            for each in run.ranks:
                each.stay("the checkpoint was not saved")
            lost = number
            assert run.lines[-1] == f"iteration {lost}: the checkpoint was not saved; layers stay for now"
        elif any(agreed):
            assert all(each is not None and each.program == agreed[0].program for each in agreed if agreed[0])
            before = layers_of(run.running[0].program.stages)
            for each in run.ranks:
                each.moved()
            moves.append((number, before, layers_of(run.running[0].program.stages)))
        else:
            assert {layers_of(each.program.stages) for each in run.running} == {moves[-1][2] if moves else (4, 4, 4, 4)}
    (first, own, less), (second, *back) = moves
    assert lost % 20 == 0 and lost < first
    assert first % 20 == 0 and second % 20 == 0 and first in slow and second > slow[-1]
    assert own == back[1] == (4, 4, 4, 4) and back[0] == less and less[1] < 4 and sum(less) == 16
    assert f"from iteration {first + 1} on: " in "".join(run.lines)


def test_a_plan_that_not_all_have_before_their_checkpoint_is_forgotten(
    started: Callable[..., Run],
) -> None:
    run = started(Options(STEP, "auto"))
    plan = run.own
    for rank, each in enumerate(run.ranks[:3]):
        sent = SentPlan(1, "late", plan.program, plan.program, {}, {}, 1.0, after=20)
        each._pending = sent, plan
        assert each.ready == 1.0, rank
    for number in (18, 19, 20):
        for each in run.ranks:
            each.settle(3.0, number)
    assert [each.ready for each in run.ranks] == [0.0] * RANKS
    assert all(each.agreed is None and each._pending is None for each in run.ranks)
    lead = run.ranks[0]._lead
    assert lead is not None
    lead._moves_after = 20
    run.step(22)
    assert run.lines == ["iteration 20: not all ranks had the plan in time; layers stay for now"]


def test_nobody_switches_where_one_does_not_hold_the_plan(
    started: Callable[[Options], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = started(Options(STEP, "auto"))
    run.ranks[3]._base = true_costs(run.own.program)
    monkeypatch.setattr(module, "digest", lambda plan: digest(plan) if plan.costs.base is BASE else "another")
    last = run.until_slow_is_found()
    run.wait_until_ready(0, 1, 2)
    for number in range(last + 1, last + 10):
        run.step(number, SLOW)
    assert run.running == [run.own] * RANKS and not run.ranks[3].ready


def test_advice_changes_nothing_and_off_gives_none(started: Callable[[Options], Run]) -> None:
    for mode in ("advise", "off"):
        run = started(Options(STEP, mode))
        last = run.until_slow_is_found()
        for number in range(last + 1, last + 5):
            run.step(number, SLOW)
        assert run.running == [run.own] * RANKS and not any(each.ready for each in run.ranks)
        advice = [line for line in run.lines if "--replan auto" in line]
        assert len(advice) == (mode == "advise"), run.lines


def test_only_due_steps_of_the_runs_plan_are_timed(started: Callable[[Options], Run]) -> None:
    run = started(Options(5, "off"))
    rank = run.ranks[2]
    assert [number for number in range(1, 12) if rank.due(number, run.own.lowered)] == [5, 10]
    assert not rank.due(5, make_plan(program("1f1b"), BASE).lowered)
