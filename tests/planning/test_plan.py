"""Plans: made once for a step size and handed on; the same when a process in the background makes them."""

from __future__ import annotations

import gc
import pickle
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from helixpipe.costs.by_hand import PieceTimes
from helixpipe.lowering.build import build_graph
from helixpipe.lowering.lower import lower
from helixpipe.lowering.order import list_schedule
from helixpipe.lowering.validate import validate
from helixpipe.planning.background import BackgroundPlanner
from helixpipe.planning.plan import Plan, Plans, make_plan
from helixpipe.program.program import forward_only
from helixpipe.simulate.simulator import simulate
from megatron.pretrain.arguments import parse_and_plan
from megatron.pretrain.plan.programs import full_batch
from schedules import Shape, build

COSTS = PieceTimes({"mlp": 1.0, "attn": 2.0})
FLAGS = (
    "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4 --train-iters 1 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 1000"
)


def plan_1f1b(microbatches: int) -> Plan:
    return make_plan(build("1f1b", Shape(2, microbatches, 4)), COSTS)


def in_the_child() -> bool:
    spec = sys.modules["__main__"].__spec__
    return spec is not None and spec.name == "helixpipe.planning.background"


def plan_there(microbatches: int) -> Plan:
    """Fails in this process, and in one that has loaded torch; the planner then says nothing and asks again here."""
    assert in_the_child() and "torch" not in sys.modules
    return plan_1f1b(microbatches)


def plan_slowly_there(microbatches: int) -> Plan:
    if in_the_child():
        time.sleep(100)
    return plan_1f1b(microbatches)


@pytest.fixture
def background() -> Iterator[Callable[..., BackgroundPlanner[int, Plan]]]:
    made: list[BackgroundPlanner[int, Plan]] = []

    def start(*arguments: Any) -> BackgroundPlanner[int, Plan]:
        made.append(BackgroundPlanner(*arguments))
        return made[-1]

    yield start
    for planner in made:
        planner.close()


def test_background_plans_equal_those_made_here(background: Callable[..., BackgroundPlanner[int, Plan]]) -> None:
    said: list[str] = []
    planner = background(plan_there, 60.0, said.append)
    planner.announce(3)
    planner.announce(2)
    for size in (2, 3):  # not in the order announced
        there, here = planner.plan(size), plan_1f1b(size)
        assert there == here
        assert there.evaluation == here.evaluation != here
        assert there.simulation.makespan == here.simulation.makespan
    assert said == []


def test_killed_background_falls_back(background: Callable[..., BackgroundPlanner[int, Plan]]) -> None:
    said: list[str] = []
    planner = background(plan_slowly_there, 60.0, said.append)
    planner.announce(2)
    planner.process.kill()
    planner.process.wait()
    assert planner.plan(2) == plan_1f1b(2)
    assert [words for words in said if "has ended (status -9)" in words] == said and len(said) == 1
    planner.announce(3)  # to nobody
    assert planner.plan(3) == plan_1f1b(3) and len(said) == 1


def test_late_background_falls_back(background: Callable[..., BackgroundPlanner[int, Plan]]) -> None:
    said: list[str] = []
    planner = background(plan_slowly_there, 0.05, said.append)
    planner.announce(2)
    assert planner.plan(2) == plan_1f1b(2)
    assert said == ["the planner was not done within 0.05 s, so its plan is made here."]


def test_what_the_background_cannot_plan_fails_here(background: Callable[..., BackgroundPlanner[int, Plan]]) -> None:
    planner = background(plan_1f1b, 60.0)
    planner.announce(0)
    planner.announce(2)
    with pytest.raises(Exception, match="microbatches must be at least 1"):
        planner.plan(0)
    assert planner.plan(2) == plan_1f1b(2)


def test_the_evaluation_of_a_plan_is_its_forwards_with_the_same_costs() -> None:
    program = build("zb1p", Shape(2, 4, 4))
    plan = make_plan(program, COSTS)
    assert plan.evaluation.lowered == lower(forward_only(program), COSTS) and plan.evaluation.costs is COSTS


class Counts(Counter[str]):
    """How often the functions were called that a plan is made with, wherever they were imported; with those in Python
    that others may stand for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        monkeypatch.setenv("HELIXPIPE_COMPILED", "0")
        for function in (build, validate, build_graph, list_schedule, simulate):
            name = function.__name__
            for module in list(sys.modules.values()):
                if vars(module).get(name) is function:
                    monkeypatch.setattr(module, name, self._counting(name, function))

    def _counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self[name] += 1
            return function(*args, **kwargs)

        return call


ONCE = {"build": 1, "validate": 1, "build_graph": 1, "list_schedule": 1}


@pytest.mark.parametrize(
    ("flags", "search"),
    [
        ("--pipeline-schedule 1f1b", {}),
        ("--pipeline-schedule seq1f1b --pipe-sp-splits 2", {}),
        # Which ranks run the last heads: two orders, of which the better one is gone on with.
        ("--pipeline-schedule helix --no-helix-recompute", {"build_graph": 1, "list_schedule": 1}),
        # And R ops in idle time: where they could be, where they are, and which of them are left; in the end the orders
        # with and without them are timed as they run.
        ("--pipeline-schedule helix", {"validate": 1, "build_graph": 4, "list_schedule": 7}),
    ],
)
def test_a_plan_is_made_once(flags: str, search: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the flags on: the check of the arguments, what the run reads of its plan, and its evaluation."""
    counts = Counts(monkeypatch)
    config, plans = parse_and_plan(f"{FLAGS} {flags}".split(), environ={"WORLD_SIZE": "2"})
    assert counts == Counter(ONCE) + Counter(search)
    counts.clear()
    plan = plans.plan(full_batch(config))
    assert plans.program(full_batch(config)) == plan.program
    assert not counts
    assert plan.evaluation is plan.evaluation and plan.simulation is plan.simulation
    assert counts["build"] == counts["validate"] == 0 and counts["build_graph"] == counts["simulate"] == 1


def test_what_is_kept_with_a_program_neither_grows_nor_outlives_it() -> None:
    """A run asks with new costs in every step that it records; and the collector is off where programs are tried."""
    program = build("helix", Shape(2, 4, 4))
    lowered = lower(program, COSTS)
    sizes = []
    for _ in range(3):
        costs = replace(COSTS)
        simulate(lowered, costs)
        lower(program, costs)
        sizes.append((len(program.derived), len(lowered.derived)))
    assert len(set(sizes)) == 1
    assert "derived" not in pickle.loads(pickle.dumps(lowered)).__dict__
    gone = [weakref.ref(each) for each in (program, lowered, lowered.graph)]
    gc.disable()
    try:
        del program, lowered
        assert [each() for each in gone] == [None] * 3
    finally:
        gc.enable()


def test_sizes_are_planned_when_asked_for() -> None:
    asked: list[int] = []

    def make(size: int) -> Any:
        asked.append(size)
        return build("1f1b", Shape(2, size, 4))

    plans = Plans(make, COSTS)
    assert plans.program(3) == plans.plan(3).program and plans.plan(2).program.num_microbatches == 2
    assert asked == [3, 2]  # each once
